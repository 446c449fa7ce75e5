"""Environments that exchange messages, and a wrapper that converts them to token environments."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import chz

from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.rl.envs.prompts import EpisodePrompts
from tinker_cookbook.rl.rollouts.hooks import SupportsParseErrorPolicy, SupportsToolCallLimit
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

logger = logging.getLogger(__name__)

_MAX_TOKENS_REACHED: Metrics = {"max_tokens_reached": 1.0}


@dataclass
class MessageStepResult:
    """Result of a step of a ``MessageEnv``."""

    reward: float
    """Reward of this step only."""
    episode_done: bool
    next_messages: list[Message]
    """The whole conversation for the next prompt, including the last answer."""
    metrics: Metrics = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)
    next_stop_condition: StopCondition | None = None
    """Replaces the renderer's stop sequences."""
    stop_reason: StopReason | None = None
    """Stop reason of the episode; default: "completed"."""


class MessageEnv(ABC):
    """One episode of messages. ``EnvFromMessageEnv`` converts it to an ``Env``."""

    handles_unparsed_tool_calls = False
    """Whether ``step`` gets properly ended answers with a malformed tool call."""
    compact_thinking_every: int | None = None
    """Number of answers after which the thinking of all earlier answers is removed from the prompt;
    between removals it stays. None: as the renderer does (``Renderer.compact_thinking``)."""

    @abstractmethod
    async def initial_observation(self) -> list[Message]:
        """Returns the conversation before the first answer."""

    @abstractmethod
    async def step(self, message: Message) -> MessageStepResult:
        """Handles an answer of the policy."""

    def begin_rollout(self, config: RolloutConfig) -> None:
        """Called first, with the settings of the rollout (such as ``config.tool_execution``)."""

    async def observe_truncated_response(
        self, message: Message
    ) -> MessageStepResult | list[Message] | None:
        """Handles an answer that was truncated; ``message`` is its parsed part.

        Called with ``EnvFromMessageEnv(terminate_on_length=False)``. Returns the result of the
        step, or the whole conversation with the answer (a step without a reward that does not end
        the episode). ``None``, the default: the answer is treated as malformed.
        """
        return None

    async def add_messages(self, messages: Sequence[Message]) -> list[Message] | bool | None:
        """Adds messages that the environment did not create: a malformed answer and the hint to
        retry, or messages of a hook.

        Returns the whole conversation, or True, if the environment stores the messages, so that
        ``next_messages`` contains them. By default the wrapper stores them.
        """
        return None

    def called_tools(self) -> Sequence[Mapping[str, Any]]:
        """Returns the tool calls so far with their results, for the record of the run."""
        return ()

    async def grade(
        self, messages: list[Message], stop_reason: StopReason | str
    ) -> tuple[float, Metrics]:
        """Returns a reward for the whole episode, for any stop reason; by default 0.

        ``messages`` has malformed answers and added messages only with
        ``TerminationRewardPolicy.pass_all_messages_to_grader``.
        """
        return 0.0, {}


class History:
    """The environment's conversation, merged with messages that the environment does not store.

    An added message keeps its position, so that the prompt of a later turn
    extends the earlier prompt. If the environment shortens its conversation (compaction) to
    before this position, the message is dropped.
    """

    def __init__(self) -> None:
        self.own: list[Message] = []
        """The environment's conversation."""
        self._added: list[tuple[int, Message]] = []  # length of `own` when it was added, in order

    def update(self, own: Sequence[Message]) -> None:
        """Replaces the environment's conversation."""
        self.own = list(own)
        self._added = [(at, message) for at, message in self._added if at <= len(self.own)]

    def add(self, messages: Sequence[Message]) -> None:
        """Adds messages at the end."""
        self._added += [(len(self.own), message) for message in messages]

    @property
    def seen(self) -> list[Message]:
        """The whole conversation in order."""
        merged = list(self.own)
        for at, message in reversed(
            self._added
        ):  # from the end, so that earlier positions stay valid
            merged.insert(at, message)
        return merged


@dataclass(eq=False, repr=False)
class EnvFromMessageEnv(Env):
    """Token environment for a ``MessageEnv``: renders messages and parses answers.

    An answer is malformed if it did not end properly or has an invalid tool call. The
    ``ParseErrorPolicy`` of the rollout decides what happens then; without one, the arguments do.

    Attributes:
        renderer: Renderer of the model's chat format.
        message_env: The environment; it can only be used for one episode.
        failed_parse_reward: Reward of a malformed answer.
        terminate_on_parse_error: Whether it ends the episode; if not, the model may retry.
        max_trajectory_tokens: The episode ends when the next prompt plus ``max_generation_tokens``
            exceed this.
        max_generation_tokens: Tokens reserved for an answer.
        context_overflow_reward: Reward of the step if this limit is exceeded or an answer is
            truncated.
        terminate_on_length: Whether a truncated answer ends the episode; if not,
            ``observe_truncated_response`` decides. By default the answer then is malformed; where
            malformed answers end the episode, its reward is ``context_overflow_reward``.
        parse_error_policy: Used if the rollout has none.
        rollout_limits: Limits of ``run_rollout``, if it has none.
    """

    renderer: Renderer
    message_env: MessageEnv
    failed_parse_reward: float = -1.0
    terminate_on_parse_error: bool = True
    max_trajectory_tokens: int | None = None
    max_generation_tokens: int | None = None
    context_overflow_reward: float = -0.1
    terminate_on_length: bool = True
    parse_error_policy: ParseErrorPolicy | None = None
    rollout_limits: RolloutLimits | None = None

    def __post_init__(self) -> None:
        # Stored answers of a benchmark are found by it.
        self.example_id: str | None = getattr(self.message_env, "example_id", None)
        if (every := getattr(self.message_env, "compact_thinking_every", None)) is not None:
            # A copy, because other environments have the same renderer. copy.copy would pickle it,
            # which needs a name.
            own = object.__new__(type(self.renderer))
            vars(own).update(vars(self.renderer))
            own.compact_thinking(every)
            self.renderer = own
        self._config = RolloutConfig()
        self._history = History()
        self._prompts = EpisodePrompts(self.renderer)
        # The conversation up to the latest answer, and its tokens, until the next prompt.
        self._answered: tuple[list[Message], Action] | None = None
        self._stop: StopCondition | None = None
        self._errors_in_a_row = 0
        self._tool_calls = 0

    @property
    def messages(self) -> list[Message]:
        """The conversation in the policy's prompt."""
        return self._history.seen

    def called_tools(self) -> Sequence[Mapping[str, Any]]:
        """Returns the tool calls of the message environment."""
        return self.message_env.called_tools()

    def begin_rollout(self, config: RolloutConfig) -> None:
        """Stores the rollout's settings for malformed answers, tool calls and grading."""
        self._config = config
        self.message_env.begin_rollout(config)

    def set_max_tool_calls(self, max_tool_calls: int) -> None:
        """Sets the limit on tool calls, here or in a message environment that enforces it."""
        limits = chz.replace(self._config.limits, max_tool_calls=max_tool_calls)
        self._config = chz.replace(self._config, limits=limits)
        if isinstance(self.message_env, SupportsToolCallLimit):
            self.message_env.set_max_tool_calls(max_tool_calls)

    def set_parse_error_policy(self, policy: ParseErrorPolicy) -> None:
        """Sets the handling of malformed answers, also in a message environment that has one."""
        self._config = chz.replace(self._config, parse_errors=policy)
        if isinstance(self.message_env, SupportsParseErrorPolicy):
            self.message_env.set_parse_error_policy(policy)

    async def initial_observation(
        self,
    ) -> tuple[Observation, StopCondition] | InitialObservationOverflow:
        """Returns the first prompt, or an overflow if it leaves no room for an answer."""
        self._history.update(await self.message_env.initial_observation())
        ob = await self._render()
        if not self._overflows(ob):
            return ob, self._stop_condition
        text = (
            f"the first prompt has {ob.length} tokens and {self.max_generation_tokens or 1} are "
            "reserved for the answer, more than "
            f"max_trajectory_tokens={self.max_trajectory_tokens}: this task is too long for the "
            "model's context window"
        )
        # An episode without turns, not an error, because other prompts may be short enough.
        return InitialObservationOverflow(
            self.context_overflow_reward,
            {**_MAX_TOKENS_REACHED, f"{STOP_METRIC_PREFIX}{StopReason.MAX_TOKENS}": 1.0},
            {"initial_observation_overflow": text},
        )

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Parses the answer and passes it to the environment if it is well-formed."""
        cut = (extra or {}).get("stop_reason") == "length"
        if cut and self.terminate_on_length:
            return self._truncated()
        # Parse in a thread, so that a long answer does not delay other episodes.
        message, ending = await asyncio.to_thread(self.renderer.parse_response, action)
        self._answered = ([*self._history.seen, message], action)
        if cut:
            observed = await self.message_env.observe_truncated_response(message)
            if isinstance(observed, list):
                observed = MessageStepResult(0.0, False, observed)
            if observed is not None:
                return await self._after_step(observed, {})
            policy = self._config.parse_errors or self.parse_error_policy
            if policy is None and self.terminate_on_parse_error:
                _warn_without_effect(type(self.message_env).__name__)
                return self._truncated()
        unparsed = message.get("unparsed_tool_calls", ())
        reads = self.message_env.handles_unparsed_tool_calls
        if not ending.is_clean or (unparsed and not reads):
            problem = "the message did not end properly"
            if unparsed:
                problem = "; ".join(call.error for call in unparsed)
            elif cut:
                problem = "the message is too long and was truncated"
            return await self._malformed(message, problem, cut)
        # A valid message resets the count of parse errors.
        self._errors_in_a_row = 0
        # Count tool calls before they run, for the limit.
        calls = len(message.get("tool_calls", ()))
        blank = not calls and not get_text_content(message).strip()
        metrics: Metrics = {"empty_answer": 1.0} if blank else {}
        limit = self._config.limits.max_tool_calls
        if isinstance(self.message_env, SupportsToolCallLimit):
            limit = None  # the message environment runs the calls up to the limit
        if limit is not None and self._tool_calls + calls > limit:
            # The environment never sees this message, but a grader of all messages does.
            self._history.add([message])
            return self._final(0.0, StopReason.MAX_TOOL_CALLS, metrics)
        if limit is not None or calls:
            metrics["tool_calls"] = calls
        self._tool_calls += calls
        return await self._after_step(await self.message_env.step(message), metrics)

    async def add_messages(self, messages: Sequence[Message]) -> tuple[Observation, StopCondition]:
        """Adds messages at the end of the conversation."""
        # The wrapper's history keeps messages that the environment does not store.
        kept = await self.message_env.add_messages(messages)
        if kept:
            whole = kept if isinstance(kept, list) else [*self._history.own, *messages]
            self._history.update(whole)
        else:
            self._history.add(messages)
        return await self._render(), self._stop_condition

    inject_messages = add_messages
    """Name of ``add_messages`` in the official cookbook."""

    async def grade(self, stop_reason: StopReason | str) -> tuple[float, Metrics]:
        """Returns the message environment's reward for the whole episode."""
        # By default, a grader gets only the messages that the environment stores.
        everything = self._config.termination_policy.pass_all_messages_to_grader
        messages = self._history.seen if everything else self._history.own
        return await self.message_env.grade(list(messages), stop_reason)

    @property
    def _stop_condition(self) -> StopCondition:
        return self.renderer.get_stop_sequences() if self._stop is None else self._stop

    async def _render(self) -> Observation:
        # Render in a thread, so that long conversations do not delay other episodes.
        answered, self._answered = self._answered, None
        return await asyncio.to_thread(self._prompts.build, self._history.seen, answered)

    def _overflows(self, ob: Observation) -> bool:
        if self.max_trajectory_tokens is None:
            return False
        return ob.length + (self.max_generation_tokens or 1) > self.max_trajectory_tokens

    async def _after_step(self, result: MessageStepResult, metrics: Metrics) -> StepResult:
        if not hasattr(result, "next_messages"):
            raise TypeError(
                f"{type(self.message_env).__name__}.step returned {result!r:.80}, expected a "
                "MessageStepResult(reward=…, episode_done=…, next_messages=…)"
            )
        # next_messages is the whole conversation, which the environment may have shortened.
        self._history.update(result.next_messages)
        self._stop = result.next_stop_condition
        metrics, logs = {**metrics, **result.metrics}, dict(result.logs)
        if result.episode_done:
            return self._final(result.reward, result.stop_reason, metrics, logs)
        return self._continue(await self._render(), result.reward, metrics, logs)

    async def _malformed(self, message: Message, problem: str, cut: bool) -> StepResult:
        """Ends the episode or lets the model retry."""
        self._errors_in_a_row += 1
        policy = self._config.parse_errors or self.parse_error_policy
        if policy is None:
            ends = self.terminate_on_parse_error
            template = DEFAULT_RETRY_MESSAGE_TEMPLATE
            reward = self.failed_parse_reward
        else:
            ends = self._errors_in_a_row > policy.max_consecutive
            template = policy.retry_message_template
            reward = policy.terminal_reward if ends else -policy.penalty_per_error
        metrics: Metrics = {"parse_error": 1.0}
        # The metric shows an answer without an end, but not why a tool call is invalid.
        explained = policy is not None or "unparsed_tool_calls" in message
        logs: Logs = {"parse_error": problem} if explained else {}
        if ends:
            self._history.add([message])
            # A truncated answer does not parse either, but its cause is the limit.
            reason = StopReason.MAX_TOKENS if cut else StopReason.PARSE_ERROR
            return self._final(reward, reason, metrics, logs)
        # Keep the malformed answer before the hint, so that the next prompt extends this turn.
        hint = Message(role="user", content=template.format(details=problem))
        ob, _ = await self.add_messages([message, hint])
        return self._continue(ob, reward, metrics, logs)

    def _continue(self, ob: Observation, reward: float, metrics: Metrics, logs: Logs) -> StepResult:
        # Check before sampling, which needs room for an answer.
        if self._overflows(ob):
            metrics = {**metrics, "context_overflow": 1.0}
            reward, reason = self.context_overflow_reward, StopReason.CONTEXT_OVERFLOW
            return self._final(reward, reason, metrics, logs)
        return StepResult(reward, False, ob, self._stop_condition, metrics=metrics, logs=logs)

    def _truncated(self) -> StepResult:
        reward = self.context_overflow_reward
        return self._final(reward, StopReason.MAX_TOKENS, _MAX_TOKENS_REACHED)

    def _final(
        self, reward: float, reason: StopReason | None, metrics: Metrics, logs: Logs | None = None
    ) -> StepResult:
        if reason is not None:
            metrics = {**metrics, f"{STOP_METRIC_PREFIX}{reason}": 1.0}
        return StepResult.final(
            reward, self._stop_condition, metrics=metrics, logs=logs or {}, stop_reason=reason
        )


@cache  # once for each class
def _warn_without_effect(name: str) -> None:
    logger.warning(
        "terminate_on_length=False has no effect: an answer was cut off at max_tokens, and %s does "
        "not handle it. Define its observe_truncated_response, or set "
        "terminate_on_parse_error=False, so that the model may try again",
        name,
    )
