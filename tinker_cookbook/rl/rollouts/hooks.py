"""Hooks of a rollout, and optional protocols of environments.

An environment that implements a protocol receives settings of the rollout or grades the whole
episode. The rollout reads two metrics of a ``StepResult``: ``parse_error`` (not 0: the response
could not be parsed) and ``tool_calls``, which ``RolloutLimits.max_tool_calls`` limits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.rollouts.limits import ParseErrorPolicy, RolloutConfig
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    Metrics,
    Observation,
    StepResult,
    StopReason,
    Trajectory,
    Transition,
)
from tinker_cookbook.utils.user_classes import accepts

if TYPE_CHECKING:
    from tinker_cookbook.renderers import Message

logger = logging.getLogger(__name__)


class UnsupportedMessagesError(ConfigurationError, TypeError):
    """Raised if a hook returns messages for an environment that does not accept messages."""


@dataclass
class RolloutState:
    """State of a rollout at the time a hook is called; ``trajectory`` only in ``on_artifacts``.

    ``turn_index`` is the number of finished turns, ``observation_tokens`` the length of the next
    prompt, ``num_length_truncations`` the number of responses truncated at ``max_turn_tokens``.
    ``transitions`` has the finished turns and is read-only.
    """

    turn_index: int
    observation_tokens: int
    sampled_tokens: int
    num_length_truncations: int
    elapsed_seconds: float
    transitions: list[Transition]
    env: Env | None = None
    config: RolloutConfig | None = None
    member: int = 0
    attempt: int = 0
    trajectory: Trajectory | None = None


class RolloutHooks:
    """Callbacks of every rollout; a subclass overrides those it needs."""

    async def on_turn_begin(self, state: RolloutState) -> Sequence[Message] | None:
        """Called before a response is sampled.

        Returned messages are appended to the conversation by the environment's ``add_messages``,
        which returns the new observation and stop condition.
        """

    async def on_stop_reason(self, reason: str, state: RolloutState) -> str | None:
        """Called when the environment or a limit is about to end the rollout.

        Returns the reason to record, which may be any text, or ``None`` to continue the rollout. A
        limit that stays exceeded is reported again in the next turn. The hook is not called if an
        await exceeds ``rollout_timeout_seconds``, nor if the first prompt leaves no room for a
        response.
        """
        return reason

    async def on_grade(self, state: RolloutState) -> None:
        """Called after the environment ended the episode or graded the whole episode."""

    async def on_artifacts(self, state: RolloutState) -> None:
        """Called last, before cleanup, to collect artifacts of the environment."""


@runtime_checkable
class SupportsRolloutConfig(Protocol):
    """Environment that reads the settings of its rollout."""

    def begin_rollout(self, config: RolloutConfig) -> None:
        """Called once, before ``initial_observation``."""


@runtime_checkable
class SupportsToolCallLimit(Protocol):
    """Environment that enforces ``RolloutLimits.max_tool_calls`` itself."""

    def set_max_tool_calls(self, max_tool_calls: int) -> None:
        """Called once, before ``initial_observation``, if the limit is set."""


@runtime_checkable
class SupportsParseErrorPolicy(Protocol):
    """Environment that follows a ``ParseErrorPolicy`` when it parses responses."""

    def set_parse_error_policy(self, policy: ParseErrorPolicy) -> None:
        """Called once, before ``initial_observation``, if ``parse_errors`` is set."""


def configure(env: Env, config: RolloutConfig) -> None:
    """Passes the settings of a rollout to its environment; warns of those it does not support."""
    if isinstance(env, SupportsRolloutConfig):
        env.begin_rollout(config)
    calls, parse_errors = config.limits.max_tool_calls, config.parse_errors
    if calls is not None and isinstance(env, SupportsToolCallLimit):
        env.set_max_tool_calls(calls)
    if parse_errors is None:
        return
    if isinstance(env, SupportsParseErrorPolicy):
        env.set_parse_error_policy(parse_errors)
    elif not isinstance(env, SupportsRolloutConfig):
        # An environment that cannot follow a setting is used as it is, so the user is warned.
        _warn_once(type(env), "set_parse_error_policy, so its own rules for parse errors apply")


@lru_cache(maxsize=64)
def _warn_once(env_class: type[Env], what: str) -> None:
    logger.warning("%s: it has no %s", env_class.__name__, what)


@runtime_checkable
class SupportsGrading(Protocol):
    """Environment that rewards the whole episode once it has ended."""

    async def grade(self, stop_reason: StopReason | str) -> tuple[float, Metrics]:
        """Returns a reward that is added to the steps' rewards, and its metrics."""
        ...


async def teacher_observation(env: Env) -> Observation | None:
    """Returns the teacher's observation, or ``None`` if it is the student's.

    Raises:
        ConfigurationError: The environment has no conversation to render.
    """
    render = env.teacher_prompt
    if render is None:
        return None
    # A teacher with another prompt renders the conversation again, from its messages.
    messages = getattr(env, "messages", None)
    if messages is None:
        raise ConfigurationError(
            f"{type(env).__name__} has no messages, which a teacher with another renderer_name, "
            "system_prompt or convo_prefix than the student needs: derive it from ProblemEnv, wrap "
            "a MessageEnv in EnvFromMessageEnv, add a property of that name, or give the teacher "
            "the student's renderer and no prompt"
        )
    return await asyncio.to_thread(render, messages)


def call_step(env: Env, action: Action, extra: ActionExtra | None) -> Awaitable[StepResult]:
    """Calls ``env.step`` with ``extra`` if its signature has it."""
    takes_extra = accepts(type(env), "step", "extra")
    return env.step(action, extra=extra) if takes_extra else env.step(action)
