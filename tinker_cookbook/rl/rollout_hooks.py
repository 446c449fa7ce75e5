"""Where a rollout can be looked into and steered, and what an environment may offer it.

``Env`` asks for two methods. An environment that also has one of the methods of the protocols here
is told or asked more; the bases ``ProblemEnv`` and ``EnvFromMessageEnv`` have them. Two metrics of
a ``StepResult`` mean something to the rollout: ``parse_error`` (not 0: the answer was malformed,
see ``ParseErrorPolicy.mask_error_turns``) and ``tool_calls`` (counted against
``RolloutLimits.max_tool_calls``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from tinker_cookbook.exceptions import ConfigurationError

if TYPE_CHECKING:
    from tinker_cookbook.renderers import Message
    from tinker_cookbook.rl.rollout_limits import ParseErrorPolicy
    from tinker_cookbook.rl.rollout_presets import RolloutConfig
    from tinker_cookbook.rl.types import (
        Env,
        Metrics,
        Observation,
        StopCondition,
        StopReason,
        Trajectory,
        Transition,
    )


@dataclass
class RolloutContext:
    """What a hook sees of the rollout. ``turn`` counts answers from 0."""

    env: Env
    config: RolloutConfig
    member: int = 0
    attempt: int = 0
    turn: int = 0
    transitions: list[Transition] = field(default_factory=list)


class RolloutHooks:
    """Called at the seams of every rollout; a subclass overrides what it needs."""

    async def on_turn_begin(self, context: RolloutContext) -> Sequence[Message] | None:
        """Before an answer is sampled. Messages returned are put into the conversation, which
        needs an environment of messages (``SupportsMessages``)."""

    async def on_stop_reason(
        self, context: RolloutContext, stop_reason: StopReason
    ) -> StopReason | None:
        """When the episode has ended; a reason returned takes the place of this one."""

    async def on_grade(self, context: RolloutContext, reward: float, metrics: Metrics) -> None:
        """After the grader of the whole episode, with what it gave."""

    async def on_artifacts(self, context: RolloutContext, trajectory: Trajectory) -> None:
        """At the very end, while the environment still lives: to collect what it made."""


@runtime_checkable
class SupportsRolloutConfig(Protocol):
    """An environment that adapts to how it is played."""

    def begin_rollout(self, config: RolloutConfig) -> None:
        """Called once, before ``initial_observation``."""
        ...


@runtime_checkable
class SupportsToolCallLimit(Protocol):
    """An environment that enforces ``RolloutLimits.max_tool_calls`` itself."""

    def set_max_tool_calls(self, max_tool_calls: int) -> None:
        """Called once, before ``initial_observation``, where the limit is set."""
        ...


@runtime_checkable
class SupportsParseErrorPolicy(Protocol):
    """An environment that follows a ``ParseErrorPolicy`` when it parses answers."""

    def set_parse_error_policy(self, policy: ParseErrorPolicy) -> None:
        """Called once, before ``initial_observation``, where ``parse_errors`` is set."""
        ...


def configure(env: Env, config: RolloutConfig) -> None:
    """Tells an environment the settings of its rollout that it has methods for."""
    if isinstance(env, SupportsRolloutConfig):
        env.begin_rollout(config)
    if isinstance(env, SupportsToolCallLimit) and config.limits.max_tool_calls is not None:
        env.set_max_tool_calls(config.limits.max_tool_calls)
    if isinstance(env, SupportsParseErrorPolicy) and config.parse_errors is not None:
        env.set_parse_error_policy(config.parse_errors)


@runtime_checkable
class SupportsMessages(Protocol):
    """An environment whose conversation can be added to from outside."""

    async def add_messages(self, messages: Sequence[Message]) -> tuple[Observation, StopCondition]:
        """Adds to the end of the conversation; returns what the policy sees now."""
        ...


@runtime_checkable
class SupportsGrading(Protocol):
    """An environment that pays for the episode as a whole, once it has ended."""

    async def grade(self, stop_reason: StopReason) -> tuple[float, Metrics]:
        """A reward on top of the steps' own, whatever ended the episode."""
        ...


@runtime_checkable
class HasMessages(Protocol):
    """An environment whose observation is a conversation, which others may render in their way."""

    @property
    def messages(self) -> list[Message]:
        """The conversation as the policy sees it now, without the answer that is due."""
        ...


async def teacher_observation(env: Env) -> Observation | None:
    """What the environment's teacher sees in place of its observation; ``None``: the same.

    Raises:
        ConfigurationError: The environment has no conversation to render.
    """
    render = env.teacher_prompt
    if render is None:
        return None
    if not isinstance(env, HasMessages):
        raise ConfigurationError(
            f"{type(env).__name__} has no messages, which a teacher with another renderer_name, "
            "system_prompt or convo_prefix than the student needs: derive it from ProblemEnv, wrap "
            "a MessageEnv in EnvFromMessageEnv, add a property of that name, or give the teacher "
            "the student's renderer and no prompt"
        )
    return await asyncio.to_thread(render, env.messages)
