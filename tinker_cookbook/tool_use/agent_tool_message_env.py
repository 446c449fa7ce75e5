"""Environment of an episode in which the model calls tools."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.renderers import (
    PARSE_FAILURE_DETAIL_MAX_CHARS,
    Message,
    Renderer,
    ToolCall,
    UnparsedToolCall,
    format_content_as_string,
    get_text_content,
)
from tinker_cookbook.rl.envs.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from tinker_cookbook.rl.rollouts.async_utils import bounded, gather_or_cancel
from tinker_cookbook.rl.rollouts.errors import GraderTimeoutError
from tinker_cookbook.rl.rollouts.limits import (
    DEFAULT_RETRY_MESSAGE_TEMPLATE,
    ParseErrorPolicy,
    RolloutConfig,
    TerminationRewardPolicy,
    ToolExecution,
    check_range,
)
from tinker_cookbook.rl.rollouts.presets import default_rollout_config_for_model
from tinker_cookbook.rl.types import (
    PARSE_ERROR_MASKED_METRIC_KEY,
    STOP_METRIC_PREFIX,
    Logs,
    Metrics,
    StopReason,
)
from tinker_cookbook.tool_use.episode import ToolEpisode
from tinker_cookbook.tool_use.execution import ToolUnavailableError
from tinker_cookbook.tool_use.recording import recorded
from tinker_cookbook.tool_use.tools import handle_tool_call, typed_for
from tinker_cookbook.tool_use.types import Tool, ToolResult

RewardResult: TypeAlias = tuple[float, dict[str, float]]
RewardFn: TypeAlias = Callable[..., "RewardResult | Awaitable[RewardResult]"]
"""``reward_fn(history)`` or ``reward_fn(history, episode)``: a reward and its metrics, at the end
of the episode. ``episode`` is a ``ToolEpisode``: the tool objects, each call and its result."""


@dataclass
class AgentToolMessageEnv(MessageEnv):
    """Episode in which each answer may call tools; an answer without a call ends the episode.

    It also ends after ``max_turns`` answers, after ``max_tool_calls`` calls, after a call of a
    tool with ``should_stop``, and at malformed calls. ``reward_fn`` is called once, at the end; if
    malformed calls or a limit on tokens were the cause, only for its metrics.

    Attributes:
        tools: The tools, with distinct names.
        initial_messages: First messages of the conversation, including the declaration of the
            tools.
        max_turns: Maximum number of answers.
        reward_fn: See ``RewardFn``.
        failed_parse_reward: Reward of an answer that has only malformed calls.
        terminate_on_parse_error: Whether such an answer ends the episode; if not, the model may
            retry.
        max_tool_calls: Maximum number of calls; ``None``: no limit.
        parse_error_policy: Replaces the last two settings for malformed calls.
        tool_execution: Whether the calls of one answer run in ``"parallel"`` or ``"sequential"``.
        termination_policy: Time limit of ``reward_fn``, and whether it sees the initial messages.
        history: The conversation so far.
        on_unavailable: What happens if a tool is unavailable (``error_type="unavailable"``):
            ``"fail"`` raises ``ToolUnavailableError``, so that the rollout is retried or dropped
            and the model is not scored for it; ``"report"`` shows the error to the model.
    """

    tools: list[Tool]
    initial_messages: list[Message]
    max_turns: int
    reward_fn: RewardFn
    failed_parse_reward: float = -0.1
    terminate_on_parse_error: bool = True
    max_tool_calls: int | None = None
    parse_error_policy: ParseErrorPolicy | None = None
    tool_execution: ToolExecution = "parallel"
    termination_policy: TerminationRewardPolicy | None = None
    history: list[Message] = field(default_factory=list)
    on_unavailable: Literal["fail", "report"] = "fail"

    handles_unparsed_tool_calls = True
    """``EnvFromMessageEnv`` passes answers with malformed calls to ``step``."""

    def __post_init__(self) -> None:
        self._by_name = {tool.name: tool for tool in self.tools}
        if len(self._by_name) < len(self.tools):
            names = sorted(tool.name for tool in self.tools)
            raise ConfigurationError(f"tools: got {', '.join(names)}, expected distinct names")
        for name, low in (("max_turns", 1), ("max_tool_calls", 0)):
            check_range(name, getattr(self, name), low)
        if self.tool_execution == "concurrent_safe":
            raise NotImplementedError(
                "tool_execution: got 'concurrent_safe', expected 'parallel' or 'sequential': tools "
                "do not declare whether they may run concurrently"
            )
        for name, known in (
            ("tool_execution", ("parallel", "sequential")),
            ("on_unavailable", ("fail", "report")),
        ):
            if getattr(self, name) not in known:
                raise ConfigurationError(
                    f"{name}: got {getattr(self, name)!r}, expected {' or '.join(known)}"
                )
        self.episode = ToolEpisode(self.tools)
        self._num_turns = 0
        self._num_calls = 0
        self._is_graded = False
        self._errors_in_a_row = 0
        self._takes_episode = _takes_episode(self.reward_fn)

    def begin_rollout(self, config: RolloutConfig) -> None:
        """Runs calls in order if the settings of the rollout require it."""
        if config.tool_execution == "sequential":
            self.tool_execution = "sequential"

    def set_max_tool_calls(self, max_tool_calls: int) -> None:
        """Sets the rollout's limit on tool calls; the lower of both limits applies."""
        given = self.max_tool_calls
        self.max_tool_calls = max_tool_calls if given is None else min(given, max_tool_calls)

    def set_parse_error_policy(self, policy: ParseErrorPolicy) -> None:
        """Sets the rollout's policy for malformed calls."""
        self.parse_error_policy = policy

    async def initial_observation(self) -> list[Message]:
        """Returns the conversation before the first answer."""
        if not self.history:
            self.history = list(self.initial_messages)
        return self.history

    def called_tools(self) -> Sequence[Mapping[str, Any]]:
        """Returns the calls of the episode."""
        return self.episode.rows()

    async def observe_truncated_response(self, message: Message) -> list[Message]:
        """Adds an answer that was truncated; its calls do not run."""
        self.history.append(message)
        return self.history

    async def add_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Adds messages at the end of the conversation."""
        self.history.extend(messages)
        return self.history

    async def step(self, message: Message) -> MessageStepResult:
        """Runs the calls of an answer and returns the conversation with their results.

        Raises:
            ToolUnavailableError: A tool is unavailable, with ``on_unavailable="fail"``.
        """
        self._num_turns += 1
        calls: list[ToolCall] = [
            typed_for(self._by_name.get(call.function.name), call)
            for call in message.get("tool_calls", ())
        ]
        if calls:
            message = Message(**{**message, "tool_calls": calls})
        self.history.append(message)
        malformed: list[UnparsedToolCall] = list(message.get("unparsed_tool_calls", ()))
        at_max_turns = self._num_turns >= self.max_turns
        metrics: Metrics = {}
        logs: Logs = {}
        if text := get_text_content(message):
            logs["assistant_content"] = text
        # 1. Malformed calls: a parse error if there are no others, otherwise they are only
        #    reported.
        if malformed:
            metrics["parse_error"] = 1.0
            logs["parse_errors"] = "\n".join(call.error for call in malformed)
            if not calls:
                return self._malformed(malformed, metrics, logs, at_max_turns)
        self._errors_in_a_row = 0
        # 2. Run the calls that the limit allows.
        allowed = calls
        if self.max_tool_calls is not None:
            allowed = calls[: max(0, self.max_tool_calls - self._num_calls)]
        dropped = len(calls) - len(allowed)
        if dropped:
            metrics["max_tool_calls"] = 1.0
            logs["tool_calls_dropped"] = (
                f"{dropped} of {len(calls)} calls were not run: max_tool_calls is "
                f"{self.max_tool_calls}"
            )
        results = await self._run(allowed, logs)
        # 3. End the episode, or continue with the results.
        stopped = any(result.should_stop for result in results)
        reason = None
        if not calls:
            reason = StopReason.COMPLETED
        elif stopped:
            reason = StopReason.TOOL_STOPPED
        elif dropped:
            reason = StopReason.MAX_TOOL_CALLS
        elif at_max_turns:
            reason = StopReason.MAX_TURNS
        if at_max_turns and calls:
            metrics["max_turns"] = 1.0
        if stopped:
            metrics["tool_stopped"] = 1.0
        reward = 0.0
        if reason is not None:
            metrics[f"{STOP_METRIC_PREFIX}{reason}"] = 1.0
            reward, graded = await self._reward()
            metrics.update(graded)
        return MessageStepResult(
            reward, reason is not None, self.history, metrics, logs, stop_reason=reason
        )

    async def grade(
        self, messages: list[Message], stop_reason: StopReason | str
    ) -> tuple[float, Metrics]:
        """Returns the metrics of the episode's calls; ``reward_fn`` was part of the last step.

        After an end without ``reward_fn`` (malformed calls, a limit on tokens) its metrics are
        added, so that shares such as that of right answers count every episode.
        """
        metrics = {} if self._is_graded else (await self._reward())[1]
        return 0.0, {**metrics, **self.episode.metrics()}

    async def _run(self, calls: Sequence[ToolCall], logs: Logs) -> list[ToolResult]:
        """Runs calls, and adds their results to the conversation in the order of the calls."""
        first = self._num_calls
        self._num_calls += len(calls)
        if self.tool_execution == "sequential":
            results = [await self._run_one(first + i, call) for i, call in enumerate(calls)]
        else:
            results = await gather_or_cancel(
                self._run_one(first + i, call) for i, call in enumerate(calls)
            )
        messages: list[Message] = []
        for i, (call, result) in enumerate(zip(calls, results, strict=True)):
            logs[f"tool_call_{i}"] = f"{call.function.name}({call.function.arguments})"
            self.episode.add(call, result)
            messages += result.messages
            if result.error_type == "unavailable" and self.on_unavailable == "fail":
                text = format_content_as_string(result.messages[0]["content"])
                raise ToolUnavailableError(
                    f"tool {call.function.name}: {text}; the rollout is not scored, since the "
                    "cause is not in the call. Retry failed rollouts with "
                    "rollout_error_tolerance=true, or show such errors to the model with "
                    "on_unavailable='report'"
                )
        for i, message in enumerate(messages):
            logs[f"tool_result_{i}"] = format_content_as_string(message["content"])
        self.history.extend(messages)
        return results

    async def _run_one(self, index: int, call: ToolCall) -> ToolResult:
        tool = self._by_name.get(call.function.name)
        return await recorded(tool, index, call, lambda: handle_tool_call(self._by_name, call))

    def _malformed(
        self,
        malformed: Sequence[UnparsedToolCall],
        metrics: Metrics,
        logs: Logs,
        at_max_turns: bool,
    ) -> MessageStepResult:
        """Ends the episode or lets the model try again, without calling ``reward_fn``."""
        self._errors_in_a_row += 1
        policy = self.parse_error_policy
        if policy is None:
            ends = self.terminate_on_parse_error or at_max_turns
            reward, template = self.failed_parse_reward, DEFAULT_RETRY_MESSAGE_TEMPLATE
        else:
            ends = self._errors_in_a_row > policy.max_consecutive or at_max_turns
            reward = policy.terminal_reward if ends else -policy.penalty_per_error
            template = policy.retry_message_template
            logs["parse_failure_kind"] = "content"
            if policy.mask_error_turns:
                metrics[PARSE_ERROR_MASKED_METRIC_KEY] = 1.0
        if at_max_turns:
            metrics["max_turns"] = 1.0
        reason = StopReason.PARSE_ERROR if ends else None
        if ends:
            metrics[f"{STOP_METRIC_PREFIX}{StopReason.PARSE_ERROR}"] = 1.0
        else:
            details = "; ".join(call.error for call in malformed)[:PARSE_FAILURE_DETAIL_MAX_CHARS]
            self.history.append(Message(role="user", content=template.format(details=details)))
        return MessageStepResult(reward, ends, self.history, metrics, logs, stop_reason=reason)

    async def _reward(self) -> RewardResult:
        self._is_graded = True
        policy = self.termination_policy
        messages, seconds = self.history, None
        if policy is not None:
            seconds = policy.grader_timeout_seconds
            if not policy.pass_all_messages_to_grader:
                messages = self.history[len(self.initial_messages) :]

        async def graded() -> RewardResult:
            arguments = (messages, self.episode) if self._takes_episode else (messages,)
            value = self.reward_fn(*arguments)
            return await value if inspect.isawaitable(value) else cast(RewardResult, value)

        result: Any = await bounded(
            graded(),
            seconds,
            lambda: GraderTimeoutError(
                f"reward_fn took longer than grader_timeout_seconds={seconds:g}"
            ),
        )
        if not (isinstance(result, tuple) and len(result) == 2):
            raise DataValidationError(
                f"reward_fn returned {result!r}, expected (reward, metrics); metrics may be {{}}"
            )
        return result


def _takes_episode(reward_fn: RewardFn) -> bool:
    """Returns whether the function has a second positional argument: required, or ``episode``."""
    try:
        parameters = list(inspect.signature(reward_fn).parameters.values())
    except (TypeError, ValueError):  # a callable without a signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    second = positional[1] if len(positional) > 1 else None
    return second is not None and (second.default is second.empty or second.name == "episode")


def build_agent_tool_env(
    renderer: Renderer,
    tools: list[Tool],
    initial_messages: list[Message],
    reward_fn: RewardFn,
    *,
    rollout_config: RolloutConfig | None = None,
    model_name: str | None = None,
    max_turns: int | None = None,
    failed_parse_reward: float = -0.1,
    terminate_on_parse_error: bool = True,
    max_tool_calls: int | None = None,
    max_trajectory_tokens: int | None = None,
    max_generation_tokens: int | None = None,
    context_overflow_reward: float = -0.1,
    terminate_on_length: bool | None = None,
    parse_error_policy: ParseErrorPolicy | None = None,
    on_unavailable: Literal["fail", "report"] = "fail",
) -> EnvFromMessageEnv:
    """Returns the token environment of an ``AgentToolMessageEnv``, which explains the settings of
    the same name.

    Args:
        renderer: Renderer of the model's chat format.
        tools: The tools; ``renderer.create_conversation_prefix_with_tools`` declares them.
        initial_messages: First messages of the conversation.
        reward_fn: See ``RewardFn``.
        rollout_config: Limits, policy for parse errors, order of calls and grading. Arguments of
            the same name replace its values; of two limits on tool calls the lower one applies.
        model_name: Without ``rollout_config``, the model whose default settings are used.
        max_turns: Default: from ``rollout_config``, else 5.
        max_trajectory_tokens: The episode ends when the next prompt plus ``max_generation_tokens``
            exceed this.
        max_generation_tokens: Tokens reserved for an answer.
        context_overflow_reward: Reward of the step if this limit is exceeded or an answer is
            truncated.
        terminate_on_length: Whether a truncated answer ends the episode; default: yes, unless
            ``rollout_config`` limits the tokens.
    """
    config = rollout_config
    if config is None:
        config = default_rollout_config_for_model(model_name or "")
    limits = config.limits
    if max_turns is None:
        max_turns = limits.max_turns or 5
    call_limits = [n for n in (max_tool_calls, limits.max_tool_calls) if n is not None]
    if terminate_on_length is None:
        # The rollout config then limits the tokens of the episode, so a truncated answer is kept.
        token_limits = (
            limits.max_trajectory_tokens,
            limits.max_sampled_tokens,
            limits.max_turn_tokens,
        )
        terminate_on_length = all(limit is None for limit in token_limits)
    policy = config.parse_errors if parse_error_policy is None else parse_error_policy
    env = AgentToolMessageEnv(
        tools,
        initial_messages,
        max_turns,
        reward_fn,
        failed_parse_reward,
        terminate_on_parse_error,
        min(call_limits, default=None),
        policy,
        config.tool_execution,
        config.termination,
        on_unavailable=on_unavailable,
    )
    return EnvFromMessageEnv(
        renderer,
        env,
        failed_parse_reward,
        terminate_on_parse_error,
        max_trajectory_tokens,
        max_generation_tokens,
        context_overflow_reward,
        terminate_on_length,
        policy,
        limits,
    )
