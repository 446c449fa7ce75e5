"""Environments that speak messages, and the wrapper that lets a policy of tokens play them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, ParseTermination, Renderer
from tinker_cookbook.rl.envs.message_history import History
from tinker_cookbook.rl.rollouts.limits import (
    DEFAULT_RETRY_MESSAGE_TEMPLATE,
    ParseErrorPolicy,
    RolloutConfig,
    RolloutLimits,
)
from tinker_cookbook.rl.types import (
    STOP_METRIC_PREFIX,
    Action,
    ActionExtra,
    Env,
    InitialObservationOverflow,
    Logs,
    Metrics,
    Observation,
    StepResult,
    StopCondition,
    StopReason,
)
from tinker_cookbook.utils.imports import lazy_module

if TYPE_CHECKING:
    import tinker
else:
    tinker = lazy_module("tinker")


_MAX_TOKENS_REACHED: Metrics = {"max_tokens_reached": 1.0}


@dataclass
class MessageStepResult:
    """What an environment of messages answers."""

    reward: float
    """For this step alone."""
    episode_done: bool
    next_messages: list[Message]
    """The whole conversation that the policy sees next, the answer just given included."""
    metrics: Metrics = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)
    next_stop_condition: StopCondition | None = None
    """In place of the renderer's own."""
    stop_reason: StopReason | None = None
    """Why the episode ended, where that is not "completed"."""


class MessageEnv(ABC):
    """One episode, in messages. ``EnvFromMessageEnv`` makes an ``Env`` of it."""

    @abstractmethod
    async def initial_observation(self) -> list[Message]:
        """Returns the conversation up to the first answer."""

    @abstractmethod
    async def step(self, message: Message) -> MessageStepResult:
        """Takes the policy's answer."""

    def begin_rollout(self, config: RolloutConfig) -> None:
        """Called first, with how the episode is played (``config.tool_execution``, say)."""

    async def observe_truncated_response(
        self, message: Message
    ) -> MessageStepResult | list[Message] | None:
        """Takes an answer that was cut off, as far as it goes.

        Returns:
            The result of the step, or the whole conversation with the answer in it (a step without
            reward that ends nothing). ``None``, the default: the answer ends the episode.
        """
        return None

    async def add_messages(self, messages: Sequence[Message]) -> list[Message] | bool | None:
        """Adds messages from outside: a malformed answer and the hint to try again, or those of a
        hook.

        Returns:
            The whole conversation, or True, where the environment keeps the messages, so that
            ``next_messages`` contains them. By default the wrapper keeps them in their place.
        """
        return None

    async def grade(
        self, messages: list[Message], stop_reason: StopReason | str
    ) -> tuple[float, Metrics]:
        """Returns a reward for the episode as a whole, whatever ended it; by default nothing.

        Args:
            messages: The conversation; malformed answers and what was put in from outside are in
                it only under ``TerminationRewardPolicy.pass_all_messages_to_grader``.
            stop_reason: What ended the episode.
        """
        return 0.0, {}


class EnvFromMessageEnv(Env):
    """Plays a ``MessageEnv`` with tokens: renders what it says, parses what the policy answers.

    An answer is malformed if it did not end properly or has a tool call that cannot be read. A
    ``ParseErrorPolicy`` of the rollout says what follows; without one the arguments here do.

    Args:
        renderer: Of the model's chat format.
        message_env: Is used up with it.
        failed_parse_reward: Reward of a malformed answer.
        terminate_on_parse_error: Whether it ends the episode; else the model is asked again.
        max_trajectory_tokens: The episode ends once the next prompt, with
            ``max_generation_tokens``, would have more tokens.
        max_generation_tokens: Room to keep for an answer.
        context_overflow_reward: The step's reward where that happens, or where an answer was cut
            off; it replaces the reward of the environment.
        terminate_on_length: Whether an answer that was cut off ends the episode; else
            ``observe_truncated_response`` decides, and without it the answer is malformed.
        parse_error_policy: Takes the place of the rollout's, if it has none.
        rollout_limits: Limits that ``run_rollout`` applies where it is given none.
    """

    def __init__(
        self,
        renderer: Renderer,
        message_env: MessageEnv,
        failed_parse_reward: float = -1.0,
        terminate_on_parse_error: bool = True,
        max_trajectory_tokens: int | None = None,
        max_generation_tokens: int | None = None,
        context_overflow_reward: float = -0.1,
        terminate_on_length: bool = True,
        parse_error_policy: ParseErrorPolicy | None = None,
        rollout_limits: RolloutLimits | None = None,
    ) -> None:
        for name, value in (
            ("max_trajectory_tokens", max_trajectory_tokens),
            ("max_generation_tokens", max_generation_tokens),
        ):
            if value is not None and value < 1:
                raise ConfigurationError(f"{name}: got {value}, expected at least 1, or None")
        self.renderer = renderer
        self.message_env = message_env
        self.failed_parse_reward = failed_parse_reward
        self.terminate_on_parse_error = terminate_on_parse_error
        self.max_trajectory_tokens = max_trajectory_tokens
        self.max_generation_tokens = max_generation_tokens
        self.context_overflow_reward = context_overflow_reward
        self.terminate_on_length = terminate_on_length
        self.parse_error_policy = parse_error_policy
        self.rollout_limits = rollout_limits
        self._config = RolloutConfig()
        self._history = History()
        self._stop: StopCondition | None = None
        self._errors_in_a_row = 0
        self._tool_calls = 0

    @property
    def messages(self) -> list[Message]:
        """The conversation as the policy sees it."""
        return self._history.seen

    def begin_rollout(self, config: RolloutConfig) -> None:
        """Takes over the rollout's rules for malformed answers, tool calls and grading."""
        self._config = config
        self.message_env.begin_rollout(config)

    async def initial_observation(
        self,
    ) -> tuple[Observation, StopCondition] | InitialObservationOverflow:
        """Returns the first prompt; an overflow where it leaves no room to answer."""
        self._history.update(await self.message_env.initial_observation())
        ob = await self._render()
        if self._overflows(ob):
            return InitialObservationOverflow(
                self.context_overflow_reward,
                {**_MAX_TOKENS_REACHED, f"{STOP_METRIC_PREFIX}{StopReason.MAX_TOKENS}": 1.0},
                {"initial_observation_overflow": self._overflow_text(ob)},
            )
        return ob, self._stop_condition

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Parses the answer and hands it on, or deals with it where it is malformed."""
        cut = (extra or {}).get("stop_reason") == "length"
        if cut and self.terminate_on_length:
            return self._over(
                self.context_overflow_reward, StopReason.MAX_TOKENS, _MAX_TOKENS_REACHED
            )
        message, ending = await _parse(self.renderer, action)
        if cut:
            observed = await self.message_env.observe_truncated_response(message)
            if isinstance(observed, list):
                observed = MessageStepResult(0.0, False, observed)
            if observed is not None:
                return await self._answered(observed, {})
        details = _what_is_wrong(message, ending.is_clean, cut)
        if details is not None:
            return await self._malformed(message, details, cut)
        self._errors_in_a_row = 0
        calls = len(message.get("tool_calls", ()))
        metrics: Metrics = {}
        most = self._config.limits.max_tool_calls
        if most is not None and self._tool_calls + calls > most:
            self._history.add([message])
            return self._over(0.0, StopReason.MAX_TOOL_CALLS, metrics)
        if most is not None or calls:
            metrics["tool_calls"] = calls
        self._tool_calls += calls
        return await self._answered(await self.message_env.step(message), metrics)

    async def add_messages(self, messages: Sequence[Message]) -> tuple[Observation, StopCondition]:
        """Puts messages from outside at the end of the conversation."""
        await self._put_in(messages)
        return await self._render(), self._stop_condition

    inject_messages = add_messages
    """The name of ``add_messages`` in the official cookbook."""

    async def grade(self, stop_reason: StopReason | str) -> tuple[float, Metrics]:
        """Returns the message environment's reward for the whole."""
        everything = self._config.termination_policy.pass_all_messages_to_grader
        messages = self._history.seen if everything else self._history.own
        return await self.message_env.grade(list(messages), stop_reason)

    @property
    def _stop_condition(self) -> StopCondition:
        return self.renderer.get_stop_sequences() if self._stop is None else self._stop

    async def _render(self) -> Observation:
        return await asyncio.to_thread(
            self.renderer.build_generation_prompt, list(self._history.seen)
        )

    def _overflows(self, ob: Observation) -> bool:
        if self.max_trajectory_tokens is None:
            return False
        return ob.length + (self.max_generation_tokens or 1) > self.max_trajectory_tokens

    def _overflow_text(self, ob: Observation) -> str:
        reserved = self.max_generation_tokens or 1
        return (
            f"the first prompt has {ob.length} tokens and {reserved} are reserved for the answer, "
            f"more than max_trajectory_tokens={self.max_trajectory_tokens}: this task is too long "
            "for the model's context window"
        )

    async def _put_in(self, messages: Sequence[Message]) -> None:
        kept = await self.message_env.add_messages(messages)
        if kept:
            whole = kept if isinstance(kept, list) else [*self._history.own, *messages]
            self._history.update(whole)
        else:
            self._history.add(messages)

    async def _answered(self, result: MessageStepResult, metrics: Metrics) -> StepResult:
        self._history.update(result.next_messages)
        self._stop = result.next_stop_condition
        metrics = {**metrics, **result.metrics}
        if result.episode_done:
            done = self._over(result.reward, result.stop_reason, metrics)
            done.logs = dict(result.logs)
            return done
        return await self._go_on(result.reward, metrics, dict(result.logs))

    async def _malformed(self, message: Message, details: str, cut: bool) -> StepResult:
        """Returns the policy of the rollout decides, or the arguments of this wrapper."""
        self._errors_in_a_row += 1
        policy = self._config.parse_errors or self.parse_error_policy
        if policy is None:
            ends = self.terminate_on_parse_error
            template = DEFAULT_RETRY_MESSAGE_TEMPLATE
            reward = self.failed_parse_reward
        else:
            ends = self._errors_in_a_row > policy.max_consecutive
            template = policy.retry_message_template
            reward = (policy.terminal_reward if ends else 0.0) - policy.penalty_per_error
        metrics: Metrics = {"parse_error": 1.0}
        # That an answer has no end says the metric; why a tool call cannot be read, only this.
        explained = policy is not None or "unparsed_tool_calls" in message
        logs: Logs = {"parse_error": details} if explained else {}
        if ends:
            self._history.add([message])
            reason = StopReason.MAX_TOKENS if cut else StopReason.PARSE_ERROR
            result = self._over(reward, reason, metrics)
            result.logs = logs
            return result
        hint = Message(role="user", content=template.format(details=details))
        await self._put_in([message, hint])
        return await self._go_on(reward, metrics, logs)

    async def _go_on(self, reward: float, metrics: Metrics, logs: Logs) -> StepResult:
        ob = await self._render()
        if self._overflows(ob):
            result = self._over(
                self.context_overflow_reward,
                StopReason.CONTEXT_OVERFLOW,
                {**metrics, "context_overflow": 1.0},
            )
            result.logs = logs
            return result
        return StepResult(reward, False, ob, self._stop_condition, metrics=metrics, logs=logs)

    def _over(self, reward: float, reason: StopReason | None, metrics: Metrics) -> StepResult:
        if reason is not None:
            metrics = {**metrics, f"{STOP_METRIC_PREFIX}{reason}": 1.0}
        return StepResult.final(reward, self._stop_condition, metrics=metrics, stop_reason=reason)


async def _parse(renderer: Renderer, action: Action) -> tuple[Message, ParseTermination]:
    """Parses in a thread, so that a long answer does not hold up other episodes."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(None, renderer.parse_response, action)


def _what_is_wrong(message: Message, ended: bool, cut: bool) -> str | None:
    """Returns what keeps the answer from being read as a message, in words for the model."""
    unread = message.get("unparsed_tool_calls", ())
    if unread:
        return "; ".join(call.error for call in unread)
    if ended:
        return None
    if cut:
        return "the message is too long and was cut off"
    return "the message did not end properly"
