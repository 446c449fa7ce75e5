"""Where a rollout can be looked into and steered, and what an environment may offer it.

``Env`` asks for two methods. An environment that also has one of the methods of the protocols here
is told or asked more; the bases ``ProblemEnv`` and ``EnvFromMessageEnv`` have them. Two metrics of
a ``StepResult`` mean something to the rollout: ``parse_error`` (not 0: the answer was malformed,
see ``ParseErrorPolicy.mask_error_turns``) and ``tool_calls`` (counted against
``RolloutLimits.max_tool_calls``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from tinker_cookbook.exceptions import ConfigurationError

if TYPE_CHECKING:
    from tinker_cookbook.renderers import Message
    from tinker_cookbook.rl.rollouts.limits import ParseErrorPolicy
    from tinker_cookbook.rl.rollouts.presets import RolloutConfig
    from tinker_cookbook.rl.types import (
        Env,
        Metrics,
        Observation,
        StopCondition,
        StopReason,
        Trajectory,
        Transition,
    )

logger = logging.getLogger(__name__)


class UnsupportedMessagesError(ConfigurationError, TypeError):
    """A hook gives messages to an environment that cannot take any."""


@dataclass
class RolloutState:
    """What a hook sees of the rollout, as of the call.

    ``env``, ``config``, ``member`` and ``attempt`` say which rollout it is; ``trajectory`` is set
    in ``on_artifacts`` alone.
    """

    turn_index: int
    """Answers so far."""
    observation_tokens: int
    """Tokens of the prompt that would be sampled from next."""
    sampled_tokens: int
    """Tokens of all answers so far."""
    num_length_truncations: int
    """Answers so far that were cut off at ``max_turn_tokens``."""
    elapsed_seconds: float
    """Time since the rollout began."""
    transitions: list[Transition]
    """The turns so far; not to be changed."""
    env: Env | None = None
    config: RolloutConfig | None = None
    member: int = 0
    attempt: int = 0
    trajectory: Trajectory | None = None


class RolloutHooks:
    """Called at the seams of every rollout; a subclass overrides what it needs."""

    async def on_turn_begin(self, state: RolloutState) -> Sequence[Message] | None:
        """Called before an answer is sampled.

        Messages returned are put into the conversation, which needs an environment of messages
        (``SupportsMessages``).
        """

    async def on_stop_reason(self, reason: str, state: RolloutState) -> str | None:
        """Called when the environment or a limit is about to end the rollout.

        Returns the reason to record, which may be any text, or ``None`` to go on. A limit that was
        passed over is met again in the next turn. Not called where a wait outlasts
        ``rollout_timeout_seconds``, nor for a first prompt without room for an answer.
        """
        return reason

    async def on_grade(self, state: RolloutState) -> None:
        """Called after the environment ended the episode, or graded it as a whole."""

    async def on_artifacts(self, state: RolloutState) -> None:
        """Called at the very end, while the environment still lives: to collect what it made."""


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
    """Tells an environment the settings of its rollout; warns of those that it has no method for.

    One with ``begin_rollout`` is taken to follow all of them.
    """
    follows = isinstance(env, SupportsRolloutConfig)
    if follows:
        env.begin_rollout(config)
    calls, policy = config.limits.max_tool_calls, config.parse_errors
    if calls is not None:
        if isinstance(env, SupportsToolCallLimit):
            env.set_max_tool_calls(calls)
        elif not follows:
            _warn_once(
                type(env),
                "it has no set_max_tool_calls, so max_tool_calls counts only what it reports as "
                "the metric tool_calls",
            )
    if policy is not None:
        if isinstance(env, SupportsParseErrorPolicy):
            env.set_parse_error_policy(policy)
        elif not follows:
            _warn_once(
                type(env),
                "it has no set_parse_error_policy, so its own rules for malformed answers apply",
            )


@lru_cache(maxsize=64)
def _warn_once(env_class: type[Env], what: str) -> None:
    logger.warning("%s: %s", env_class.__name__, what)


@runtime_checkable
class SupportsMessages(Protocol):
    """An environment whose conversation can be added to from outside."""

    async def add_messages(self, messages: Sequence[Message]) -> tuple[Observation, StopCondition]:
        """Adds to the end of the conversation; returns what the policy sees now."""
        ...


async def put_messages(
    env: Env, messages: Sequence[Message], hooks: RolloutHooks
) -> tuple[Observation, StopCondition]:
    """Puts messages of a hook into an environment's conversation."""
    add = getattr(env, "add_messages", None) or getattr(env, "inject_messages", None)
    if add is None:
        raise UnsupportedMessagesError(
            f"on_turn_begin of {type(hooks).__name__} gave messages, but {type(env).__name__} has "
            "no add_messages, so it does not support message injection; derive from MessageEnv and "
            "wrap it in EnvFromMessageEnv, or give none"
        )
    return await add(list(messages))


@runtime_checkable
class SupportsGrading(Protocol):
    """An environment that pays for the episode as a whole, once it has ended."""

    async def grade(self, stop_reason: StopReason | str) -> tuple[float, Metrics]:
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
