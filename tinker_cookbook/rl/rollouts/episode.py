"""Runs one episode: observe, sample and step, until the environment or a limit ends it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import chz

from tinker_cookbook.completers import (
    StopCondition,
    TokenCompleter,
    TokensWithLogprobs,
    limit_tokens,
)
from tinker_cookbook.exceptions import BackendError, CheckpointError, DataValidationError
from tinker_cookbook.rl.rollouts.async_utils import bounded
from tinker_cookbook.rl.rollouts.conversation import conversation_of
from tinker_cookbook.rl.rollouts.errors import (
    RolloutTimeoutError,
    SamplerFailedError,
    SamplingTurnTimeoutError,
    checked_reward,
    located_at,
)
from tinker_cookbook.rl.rollouts.hooks import (
    RolloutHooks,
    RolloutState,
    SupportsGrading,
    UnsupportedMessagesError,
    call_step,
    configure,
    teacher_observation,
)
from tinker_cookbook.rl.rollouts.hooks import SupportsParseErrorPolicy as SupportsParseErrorPolicy
from tinker_cookbook.rl.rollouts.hooks import SupportsToolCallLimit as SupportsToolCallLimit
from tinker_cookbook.rl.rollouts.limits import (
    ParseErrorPolicy,
    RolloutConfig,
    RolloutLimits,
    TurnBudget,
)
from tinker_cookbook.rl.rollouts.place import enter_member
from tinker_cookbook.rl.types import (
    STOP_METRIC_PREFIX,
    ActionExtra,
    Env,
    InitialObservationOverflow,
    Metrics,
    Observation,
    StepResult,
    StopReason,
    Trajectory,
    Transition,
    as_stop_reason,
    stop_reason_from_metrics,
)
from tinker_cookbook.utils.activity import activity
from tinker_cookbook.utils.imports import tinker

TRUNCATION_METRIC_KEY = "num_truncations_max_turn_tokens"
"""Metric of an episode: number of responses truncated at ``RolloutLimits.max_turn_tokens``."""

T = TypeVar("T")


async def run_rollout(
    policy: TokenCompleter,
    env: Env,
    *,
    limits: RolloutLimits | None = None,
    hooks: RolloutHooks | None = None,
    parse_errors: ParseErrorPolicy | None = None,
    config: RolloutConfig | None = None,
) -> Trajectory:
    """Runs one episode in an environment, which cannot be used again.

    ``limits`` and ``parse_errors`` replace those of ``config``, which defaults to no limits. Turn t
    is sampled by ``policy.derived(0, t)``.

    Raises:
        RolloutFailedError: The environment raised an error; the message names it and the turn.
        DataValidationError: A reward is not finite, or an observation is empty.
        SamplingTurnTimeoutError: A response took too long.
    """
    config = config or RolloutConfig()
    if limits is not None:
        config = chz.replace(config, limits=limits)
    if parse_errors is not None:
        config = chz.replace(config, parse_errors=parse_errors)
    return await Episode(policy, env, config, hooks or RolloutHooks()).run()


async def do_single_rollout(policy: TokenCompleter, env: Env) -> Trajectory:
    """Runs one episode without limits."""
    return await run_rollout(policy, env)


class _OutOfTimeError(Exception):
    """Raised once ``rollout_timeout_seconds`` are over."""


_COMPLETED = f"{STOP_METRIC_PREFIX}{StopReason.COMPLETED}"


class Episode:
    """One rollout in one environment.

    Turn t is sampled by ``policy.derived(member, t)``, in a retry by
    ``policy.derived(member, t, attempt)``, so each member of a group has its own random numbers.
    """

    def __init__(
        self,
        policy: TokenCompleter,
        env: Env,
        config: RolloutConfig,
        hooks: RolloutHooks,
        member: int = 0,
        attempt: int = 0,
    ) -> None:
        self._given_config = config
        # An environment may define limits, which apply if the settings have none.
        limits = getattr(env, "rollout_limits", None)
        if limits is not None and config.limits == RolloutLimits():
            config = chz.replace(config, limits=limits)
        self.policy, self.env, self.member = policy, env, member
        self._config, self._hooks, self._attempt = config, hooks, attempt
        self.prompt: tuple[Observation, StopCondition] | None = None
        """First observation and stop condition, once ``open`` has returned them."""
        self.first_response: Callable[[], Awaitable[TokensWithLogprobs]] | None = None
        """Awaits the first response, if it is part of a request for several members."""
        self._overflow: InitialObservationOverflow | None = None
        self._turns: list[Transition] = []
        self._sampled, self._truncations, self._tool_calls = 0, 0, 0.0
        self._seconds = {"sampling": 0.0, "env": 0.0, "grading": 0.0}
        self._metrics: Metrics = {}
        self._started, self._deadline = time.monotonic(), None
        self._activity = activity()
        # An environment that wraps another one is named by the inner one.
        self._env_name = type(getattr(env, "message_env", None) or env).__name__
        self._overtime = False
        """Whether a hook continued the rollout after its timeout."""
        self._first_turn_begun = False
        self._closed = False
        self._reports_completed = False

    def again(self, env: Env, attempt: int) -> Episode:
        """Returns another attempt of the same member, in a new environment."""
        return Episode(self.policy, env, self._given_config, self._hooks, self.member, attempt)

    @property
    def location(self) -> str:
        """Environment, member and turn, for error messages."""
        # An environment that wraps another one is named together with the inner one.
        name, inner = type(self.env).__name__, getattr(self.env, "message_env", None)
        name = name if inner is None else f"{name} of {type(inner).__name__}"
        turn = f"turn {len(self._turns)}" if self._first_turn_begun else "before its first turn"
        return f"{name}, member {self.member}, {turn}"

    async def open(self, timeout_seconds: float | None = None) -> None:
        """Gets the first observation from the environment."""
        try:
            await self._open(timeout_seconds)
        except BaseException:  # a cancellation too: ``run`` will not be called
            self.close(failed=True)
            raise

    async def _open(self, timeout_seconds: float | None) -> None:
        # The environment may hang before the deadline of ``run`` exists, so both timeouts apply.
        timeouts = (timeout_seconds, self._config.limits.rollout_timeout_seconds)
        seconds = min((timeout for timeout in timeouts if timeout), default=None)
        with located_at(lambda: self.location):
            configure(self.env, self._config)
            with self._awaiting("env", f"{self._env_name}.initial_observation"):
                first = await bounded(
                    self.env.initial_observation(),
                    seconds,
                    lambda: RolloutTimeoutError(
                        f"initial_observation took longer than the rollout may ({seconds:g} s); "
                        "look for a call in it that hangs, or raise the timeout"
                    ),
                )
            if isinstance(first, InitialObservationOverflow):
                self._overflow = first
            else:
                self.prompt = await self._begin_turn(*first)
                _check_observation(self.prompt[0])

    async def run(self) -> Trajectory:
        """Runs the episode to its end. Errors name the environment, the member and the turn."""
        failed = True
        try:
            trajectory = await self._run()
            failed = False
            return trajectory
        finally:
            self.close(failed)

    def close(self, failed: bool) -> None:
        """Tells the environment, once, that its rollout is over."""
        # None: the episode was never opened, or it is closed already.
        if self._activity.episodes.pop(id(self), None) is not None and not failed:
            self._activity.finished += 1
        # Environments of user code need not derive from Env.
        ended = getattr(self.env, "rollout_ended", None)
        if ended is not None and not self._closed:
            self._closed = True
            with located_at(lambda: f"{self.location}, rollout_ended"):
                ended(failed)

    async def _run(self) -> Trajectory:
        enter_member(self.member, self._attempt)
        if self.prompt is None and self._overflow is None:
            await self.open()
        self._first_turn_begun = True
        self._started = time.monotonic()
        timeout = self._config.limits.rollout_timeout_seconds
        # The clock starts here: waiting for the first prompts of other members does not count.
        self._deadline = None if timeout is None else self._started + timeout
        with located_at(lambda: self.location):
            if self._overflow is not None:
                # The first prompt leaves no room for a response.
                metrics = self._overflow.metrics
                self._metrics.update(_without_stop_reason(metrics))
                # An environment may name another reason than the overflow.
                reason = stop_reason_from_metrics(metrics) or StopReason.CONTEXT_OVERFLOW
                reward = checked_reward(self._overflow.reward, self.location)
                return await self._finish(reason, tinker.ModelInput.empty(), reward)
            assert self.prompt is not None
            ob, stop = self.prompt
            by_env = False
            try:
                while True:
                    # 1. End the episode if a limit leaves no room for a response.
                    _check_observation(ob)
                    budget = self.token_budget(ob)
                    reason = await self._resolve(budget.reason if budget.exhausted else None, ob)
                    if reason is not None:
                        break
                    # 2. Sample a response and pass it to the environment. The teacher's prompt is
                    # rendered before the response is part of the conversation.
                    teacher_ob = await teacher_observation(self.env)
                    action = await self._sample(ob, stop, budget)
                    extra = ActionExtra(stop_reason=action.stop_reason)
                    if action.maybe_logprobs is not None:
                        extra["logprobs"] = list(action.maybe_logprobs)
                    # The environment gets a copy: training needs exactly the sampled tokens.
                    name = f"{self._env_name}.step"
                    work = call_step(self.env, list(action.tokens), extra)
                    step = await self._wait("env", work, name)
                    self._record(ob, action, step, teacher_ob)
                    ob, stop = step.next_observation, step.next_stop_condition
                    # 3. End the episode if the environment reports its end, or at a limit.
                    if step.episode_done:
                        truncated = action.stop_reason == "length"
                        reported = step.stop_reason or stop_reason_from_metrics(step.metrics)
                        # Without a reported reason, only a truncated response counts as a limit.
                        default = StopReason.MAX_TOKENS if truncated else StopReason.COMPLETED
                        reason = await self._resolve(reported or default, ob)
                        if reason is not None:
                            by_env = True
                            break
                    # A hook may continue an episode that the environment has ended.
                    self._turns[-1].episode_done = False
                    reason = await self._resolve(self._reason_between(), ob)
                    if reason is not None:
                        break
                    ob, stop = await self._begin_turn(ob, stop)
            except _OutOfTimeError:
                # The unfinished turn is dropped; finished turns are kept and graded.
                reason = StopReason.ROLLOUT_TIMEOUT
            return await self._finish(reason, ob, await self._grade(reason, ob, by_env))

    async def _begin_turn(
        self, ob: Observation, stop: StopCondition
    ) -> tuple[Observation, StopCondition]:
        messages = await self._hooks.on_turn_begin(self._state(ob))
        if not messages:
            return ob, stop
        add = getattr(self.env, "add_messages", None) or getattr(self.env, "inject_messages", None)
        if add is None:
            raise UnsupportedMessagesError(
                f"on_turn_begin of {type(self._hooks).__name__} returned messages, but "
                f"{type(self.env).__name__} has no add_messages, so it does not support message "
                "injection; derive from MessageEnv and wrap it in EnvFromMessageEnv, or return None"
            )
        return await add(list(messages))

    async def _resolve(
        self, reason: StopReason | str | None, ob: Observation
    ) -> StopReason | str | None:
        """Passes a stop reason to the hook; returns ``None`` if the episode continues."""
        if reason is None:
            return None
        resolved = await self._hooks.on_stop_reason(reason, self._state(ob))
        # A hook that continues after the timeout also lifts it from the awaits of later turns.
        if resolved is None and reason == StopReason.ROLLOUT_TIMEOUT:
            self._overtime = True
        return None if resolved is None else as_stop_reason(resolved)

    def _state(self, ob: Observation, trajectory: Trajectory | None = None) -> RolloutState:
        return RolloutState(
            turn_index=len(self._turns),
            observation_tokens=ob.length,
            sampled_tokens=self._sampled,
            num_length_truncations=self._truncations,
            elapsed_seconds=time.monotonic() - self._started,
            transitions=self._turns,
            env=self.env,
            config=self._config,
            member=self.member,
            attempt=self._attempt,
            trajectory=trajectory,
        )

    def token_budget(self, ob: Observation, *, skip_exhausted: bool = False) -> TurnBudget:
        """Returns the tightest token limit of the response to ``ob``.

        ``skip_exhausted`` ignores limits that are used up, for a hook that continues the rollout.
        """
        return self._config.limits.turn_budget(
            getattr(self.policy, "context_window", None),
            ob.length,
            self._sampled,
            skip_exhausted,
        )

    def _reason_between(self) -> StopReason | None:
        """Returns the limit of the whole episode that is reached, or ``None``."""
        limits = self._config.limits
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return StopReason.ROLLOUT_TIMEOUT
        if limits.max_tool_calls is not None and self._tool_calls > limits.max_tool_calls:
            return StopReason.MAX_TOOL_CALLS
        if limits.max_turns is not None and len(self._turns) >= limits.max_turns:
            return StopReason.MAX_TURNS
        return None

    async def _sample(
        self, ob: Observation, stop: StopCondition, budget: TurnBudget
    ) -> TokensWithLogprobs:
        if self.first_response is not None and not self._turns:
            work = self.first_response()  # one request for several members
        else:
            if budget.exhausted:  # a hook continued the rollout
                budget = self.token_budget(ob, skip_exhausted=True)
            # A retry has other random numbers, or it would repeat the failure.
            retry = (self._attempt,) if self._attempt else ()
            policy = self.policy.derived(self.member, len(self._turns), *retry)
            work = limit_tokens(policy, budget.tokens)(ob, stop)
        seconds = self._config.limits.sampling_turn_timeout_seconds
        timeout = SamplingTurnTimeoutError(
            f"no response came within sampling_turn_timeout_seconds={seconds}; raise it, lower "
            "max_tokens, or check whether the backend still responds"
        )
        try:
            action = await self._wait("sampling", work, "the sampler", seconds, timeout)
        except (BackendError, CheckpointError) as error:
            # An environment may raise the same classes; only here is it the policy's backend.
            raise SamplerFailedError(str(error)) from error
        # Only truncations by the limit of a turn count, not those by the policy's own limit.
        truncated = action.stop_reason == "length"
        self._truncations += truncated and len(action.tokens) == self._config.limits.max_turn_tokens
        self._sampled += len(action.tokens)
        return action

    def _record(
        self,
        ob: Observation,
        action: TokensWithLogprobs,
        step: StepResult,
        teacher_ob: Observation | None,
    ) -> None:
        parse_errors = self._config.parse_errors
        self._tool_calls += step.metrics.get("tool_calls", 0)
        # A masked turn stays in the sequence as context but is not trained.
        masks = parse_errors is not None and parse_errors.mask_error_turns
        self._reports_completed = _COMPLETED in step.metrics
        self._turns.append(
            Transition(
                ob=ob,
                ac=action,
                reward=checked_reward(step.reward, self.location),
                episode_done=step.episode_done,
                metrics=_without_stop_reason(step.metrics),
                logs=dict(step.logs),
                masked=masks and bool(step.metrics.get("parse_error")),
                teacher_ob=teacher_ob,
            )
        )

    async def _finish(self, reason: StopReason | str, ob: Observation, reward: float) -> Trajectory:
        """Returns the trajectory; ``reward`` is the reward of the whole episode."""
        # The reward of the whole episode is added to its last turn, if there is one.
        if self._turns:
            self._turns[-1].episode_done = True
            self._turns[-1].reward += reward
            reward = 0.0
            # As in the official cookbook, which has no reason where an environment reports none.
            if reason != StopReason.COMPLETED or self._reports_completed:
                self._turns[-1].metrics[f"{STOP_METRIC_PREFIX}{reason}"] = 1.0
        if self._config.limits.max_turn_tokens is not None:
            self._metrics[TRUNCATION_METRIC_KEY] = self._truncations
        messages, tool_calls = conversation_of(self.env)
        trajectory = Trajectory(
            self._turns,
            ob,
            reason,
            reward_without_turn=reward,
            metrics=self._metrics,
            logs={} if self._overflow is None else dict(self._overflow.logs),
            messages=messages,
            tool_calls=tool_calls,
            seconds=self._seconds,
        )
        # Last, before cleanup closes what the environment holds, such as a sandbox.
        await self._hooks.on_artifacts(self._state(ob, trajectory))
        return trajectory

    async def _grade(self, reason: StopReason | str, ob: Observation, by_env: bool) -> float:
        """Returns the reward of the whole episode; 0 if the grader timed out."""
        termination = self._config.termination_policy
        if not isinstance(self.env, SupportsGrading) or termination.skips_grading(reason):
            # An environment that ends its episode has graded it by the reward of its last step.
            if by_env:
                await self._hooks.on_grade(self._state(ob))
            return 0.0
        seconds = termination.grader_timeout_seconds
        # A grader that is too slow gives no reward, but does not fail the rollout.
        reward, metrics, timed_out = 0.0, {}, 0.0
        try:
            with self._awaiting("grading", f"{self._env_name}.grade"):
                reward, metrics = await bounded(self.env.grade(reason), seconds, _OutOfTimeError)
        except _OutOfTimeError:
            timed_out = 1.0
        if seconds is not None:
            # Reported as 0 too, so that the mean over episodes is the share of timeouts.
            self._metrics["grader_timeout"] = timed_out
        self._metrics.update(metrics)
        reward = checked_reward(reward, f"{self.location}, grade")
        await self._hooks.on_grade(self._state(ob))
        return reward

    async def _wait(
        self,
        what: str,
        work: Awaitable[T],
        name: str,
        seconds: float | None = None,
        error: Exception | None = None,
    ) -> T:
        """Awaits work within its own timeout and within the time left for the rollout."""
        deadline = None if self._overtime else self._deadline
        # The tighter timeout decides which error is raised.
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if left is not None and (seconds is None or left < seconds):
            seconds, error = left, _OutOfTimeError()
        with self._awaiting(what, name):
            return await bounded(work, seconds, lambda: error or _OutOfTimeError())

    @contextmanager
    def _awaiting(self, what: str, name: str) -> Iterator[None]:
        """Measures the time of the block, and shows that the episode waits for ``name``."""
        started = time.monotonic()
        self._activity.episodes[id(self)] = name, started
        try:
            yield
        finally:
            now = time.monotonic()
            self._activity.episodes[id(self)] = "", now
            self._seconds[what] += now - started


def _check_observation(ob: Observation) -> None:
    if ob.length == 0:
        raise DataValidationError(
            "the observation is empty, expected a prompt of at least one token; an environment "
            "ends an episode with episode_done=True"
        )


def _without_stop_reason(metrics: Metrics) -> Metrics:
    """Returns the metrics without ``stop/REASON``, which only the last turn has."""
    return {k: v for k, v in metrics.items() if not k.startswith(STOP_METRIC_PREFIX)}
