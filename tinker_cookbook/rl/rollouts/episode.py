"""One episode, turn by turn: observe, sample, step, until the environment or a limit ends it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import chz

from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.rl.rollouts.async_utils import bounded
from tinker_cookbook.rl.rollouts.budget import TurnBudget, limit_tokens, turn_budget
from tinker_cookbook.rl.rollouts.errors import (
    Place,
    RolloutTimeoutError,
    SamplingTurnTimeoutError,
    checked_reward,
    located_at,
)
from tinker_cookbook.rl.rollouts.hooks import (
    RolloutHooks,
    RolloutState,
    SupportsGrading,
    configure,
    put_messages,
    teacher_observation,
)
from tinker_cookbook.rl.rollouts.limits import RolloutLimits
from tinker_cookbook.rl.rollouts.presets import RolloutConfig
from tinker_cookbook.rl.types import (
    STOP_METRIC_PREFIX,
    Action,
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
from tinker_cookbook.utils.lazy_imports import lazy_module

if TYPE_CHECKING:
    import tinker
else:
    tinker = lazy_module("tinker")

T = TypeVar("T")

_NO_LIMITS = RolloutLimits()


class _OutOfTimeError(Exception):
    """``rollout_timeout_seconds`` are over."""


@dataclass
class InitialPrompt:
    """How an episode begins: its first prompt, and the answer to it where that is on its way.

    ``first_action`` lets the members of a group share one request. ``member`` and ``attempt`` give
    the episode its own random numbers: turn t is sampled by ``policy.derived(member, t)``, in a
    retry by ``policy.derived(member, t, attempt)``.
    """

    observation: Observation | None = None
    stop: StopCondition | None = None
    overflow: InitialObservationOverflow | None = None
    first_action: Awaitable[TokensWithLogprobs] | None = None
    member: int = 0
    attempt: int = 0


@dataclass(frozen=True)
class _End:
    """Why an episode is over, what would have been seen next, and whether the environment said
    so."""

    reason: StopReason | str
    observation: Observation
    by_env: bool = False


class Episode:
    """Plays one environment once: ``open`` it, then ``play`` it."""

    def __init__(
        self,
        policy: TokenCompleter,
        env: Env,
        config: RolloutConfig,
        hooks: RolloutHooks,
        member: int = 0,
        attempt: int = 0,
    ) -> None:
        self._policy = policy
        self._env = env
        self._config = _with_limits_of(env, config)
        self._hooks = hooks
        self._member = member
        self._attempt = attempt
        self._turns: list[Transition] = []
        self._sampled = 0
        self._truncations = 0
        self._tool_calls = 0.0
        self._seconds = {"sampling": 0.0, "env": 0.0, "grading": 0.0}
        self._metrics: Metrics = {}
        self._started = time.monotonic()
        self._deadline: float | None = None
        self._overtime = False
        self._opened = False

    @property
    def place(self) -> Place:
        """Where the episode stands, for messages."""
        turn = len(self._turns) if self._opened else None
        return Place(_name(self._env), self._member, turn)

    def first_budget(self, opening: InitialPrompt) -> TurnBudget:
        """Tokens that the first answer may have."""
        assert opening.observation is not None
        return turn_budget(self._config.limits, opening.observation.length, 0)

    async def open(self, timeout_seconds: float | None = None) -> InitialPrompt:
        """Asks the environment for its first observation; may be done for a whole group before
        any of it is played."""
        bounds = (timeout_seconds, self._config.limits.rollout_timeout_seconds)
        seconds = min((bound for bound in bounds if bound), default=None)
        with located_at(lambda: self.place):
            configure(self._env, self._config)
            started = time.monotonic()
            first = await bounded(
                self._env.initial_observation(),
                seconds,
                lambda: RolloutTimeoutError(
                    f"initial_observation took longer than the rollout may ({seconds:g} s); look "
                    "for a call in it that hangs, or raise the timeout"
                ),
            )
            self._seconds["env"] += time.monotonic() - started
            opening = InitialPrompt(member=self._member, attempt=self._attempt)
            if isinstance(first, InitialObservationOverflow):
                opening.overflow = first
                return opening
            opening.observation, opening.stop = await self._begin_turn(*first)
            self._check_observation(opening.observation)
            return opening

    async def play(self, opening: InitialPrompt) -> Trajectory:
        """Plays to the end. Errors name the environment, the member and the turn."""
        self._opened = True
        self._started = time.monotonic()
        seconds = self._config.limits.rollout_timeout_seconds
        self._deadline = None if seconds is None else self._started + seconds
        with located_at(lambda: self.place):
            if opening.overflow is not None:
                said = stop_reason_from_metrics(opening.overflow.metrics)
                end = _End(said or StopReason.CONTEXT_OVERFLOW, tinker.ModelInput.empty())
                return await self._finish(end, opening.overflow)
            assert opening.observation is not None
            assert opening.stop is not None
            end = await self._play(opening.observation, opening.stop, opening.first_action)
            return await self._finish(end)

    async def _play(
        self,
        ob: Observation,
        stop: StopCondition,
        first_action: Awaitable[TokensWithLogprobs] | None,
    ) -> _End:
        try:
            while True:
                self._check_observation(ob)
                budget = turn_budget(self._config.limits, ob.length, self._sampled)
                reason = await self._resolve(self._reason_before(ob, budget), ob)
                if reason is not None:
                    return _End(reason, ob)
                if budget.exhausted:  # a hook lets the rollout go on
                    budget = turn_budget(
                        self._config.limits, ob.length, self._sampled, heed_exhausted=False
                    )
                teacher_ob = await teacher_observation(self._env)
                action = await self._sample(ob, stop, budget, first_action)
                first_action = None
                step = await self._step(action)
                self._record(ob, action, step, teacher_ob)
                ob, stop = step.next_observation, step.next_stop_condition
                reason = await self._resolve(_reason_of(action, step), ob)
                if reason is not None:
                    return _End(reason, ob, by_env=True)
                self._turns[-1].episode_done = False
                if (reason := await self._resolve(self._reason_between(), ob)) is not None:
                    return _End(reason, ob)
                ob, stop = await self._begin_turn(ob, stop)
        except _OutOfTimeError:
            return _End(StopReason.ROLLOUT_TIMEOUT, ob)

    async def _begin_turn(
        self, ob: Observation, stop: StopCondition
    ) -> tuple[Observation, StopCondition]:
        messages = await self._hooks.on_turn_begin(self._state(ob))
        return await put_messages(self._env, messages, self._hooks) if messages else (ob, stop)

    async def _resolve(
        self, reason: StopReason | str | None, ob: Observation
    ) -> StopReason | str | None:
        """Asks the hooks about a reason to stop, if there is one; ``None``: the episode goes on."""
        if reason is None:
            return None
        said = await self._hooks.on_stop_reason(reason, self._state(ob))
        if said is None and reason == StopReason.ROLLOUT_TIMEOUT:
            self._overtime = True
        return None if said is None else as_stop_reason(said)

    def _state(self, ob: Observation, trajectory: Trajectory | None = None) -> RolloutState:
        return RolloutState(
            turn_index=len(self._turns),
            observation_tokens=ob.length,
            sampled_tokens=self._sampled,
            num_length_truncations=self._truncations,
            elapsed_seconds=time.monotonic() - self._started,
            transitions=self._turns,
            env=self._env,
            config=self._config,
            member=self._member,
            attempt=self._attempt,
            trajectory=trajectory,
        )

    def _reason_before(self, ob: Observation, budget: TurnBudget) -> StopReason | None:
        """Why no further answer can be sampled, if none can."""
        if budget.exhausted:
            return budget.reason
        window = getattr(self._policy, "context_window", None)
        # The first prompt is the data's doing rather than the episode's: there the policy's own
        # error stands, which says what to change.
        if self._turns and window is not None and ob.length >= window:
            return StopReason.CONTEXT_OVERFLOW
        return None

    def _reason_between(self) -> StopReason | None:
        """Which limit of the whole episode is reached, if one is."""
        limits = self._config.limits
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return StopReason.ROLLOUT_TIMEOUT
        if limits.max_tool_calls is not None and self._tool_calls > limits.max_tool_calls:
            return StopReason.MAX_TOOL_CALLS
        if limits.max_turns is not None and len(self._turns) >= limits.max_turns:
            return StopReason.MAX_TURNS
        return None

    async def _sample(
        self,
        ob: Observation,
        stop: StopCondition,
        budget: TurnBudget,
        first_action: Awaitable[TokensWithLogprobs] | None,
    ) -> TokensWithLogprobs:
        work = first_action
        if work is None:
            retry = (self._attempt,) if self._attempt else ()
            policy = self._policy.derived(self._member, len(self._turns), *retry)
            work = limit_tokens(policy, budget.tokens)(ob, stop)
        seconds = self._config.limits.sampling_turn_timeout_seconds
        action = await self._wait(
            "sampling",
            work,
            seconds,
            SamplingTurnTimeoutError(
                f"no answer came within sampling_turn_timeout_seconds={seconds}; raise it, lower "
                "max_tokens, or look whether the backend still answers"
            ),
        )
        logprobs = action.maybe_logprobs
        if logprobs is not None and len(logprobs) != len(action.tokens):
            raise DataValidationError(
                f"the policy gave {len(action.tokens)} tokens and {len(logprobs)} "
                "log-probabilities, expected one for each token"
            )
        cut = action.stop_reason == "length"
        self._truncations += cut and len(action.tokens) == self._config.limits.max_turn_tokens
        self._sampled += len(action.tokens)
        return action

    async def _step(self, action: TokensWithLogprobs) -> StepResult:
        extra = ActionExtra(stop_reason=action.stop_reason)
        work = call_step(self._env, list(action.tokens), extra)
        result = await self._wait("env", work)
        if not isinstance(result, StepResult):
            raise DataValidationError(
                f"step returned {type(result).__name__}, expected a StepResult"
            )
        return result

    def _record(
        self,
        ob: Observation,
        action: TokensWithLogprobs,
        step: StepResult,
        teacher_ob: Observation | None,
    ) -> None:
        parse_errors = self._config.parse_errors
        self._tool_calls += step.metrics.get("tool_calls", 0)
        metrics = _without_stop_reason(step.metrics)
        self._turns.append(
            Transition(
                ob=ob,
                ac=action,
                reward=checked_reward(step.reward, self.place),
                episode_done=step.episode_done,
                metrics=metrics,
                logs=dict(step.logs),
                masked=parse_errors is not None
                and parse_errors.mask_error_turns
                and bool(step.metrics.get("parse_error")),
                teacher_ob=teacher_ob,
            )
        )

    async def _finish(
        self, end: _End, overflow: InitialObservationOverflow | None = None
    ) -> Trajectory:
        if overflow is not None:
            earned = checked_reward(overflow.reward, self.place)
            self._metrics.update(_without_stop_reason(overflow.metrics))
        else:
            earned = await self._grade(end)
        if self._turns:
            self._turns[-1].episode_done = True
            self._turns[-1].reward += earned
            earned = 0.0
        if self._config.limits.max_turn_tokens is not None:
            self._metrics["num_truncations_max_turn_tokens"] = self._truncations
        trajectory = Trajectory(
            self._turns,
            end.observation,
            end.reason,
            reward_without_turn=earned,
            metrics=self._metrics,
            logs={} if overflow is None else dict(overflow.logs),
            seconds=self._seconds,
        )
        await self._hooks.on_artifacts(self._state(end.observation, trajectory))
        return trajectory

    async def _grade(self, end: _End) -> float:
        """Reward for the episode as a whole; 0 where the grader was too slow."""
        termination = self._config.termination_policy
        if not isinstance(self._env, SupportsGrading) or termination.skips_grading(end.reason):
            if end.by_env:
                await self._hooks.on_grade(self._state(end.observation))
            return 0.0
        seconds = termination.grader_timeout_seconds
        started = time.monotonic()
        too_slow = 0.0
        reward, metrics = 0.0, {}
        try:
            reward, metrics = await bounded(self._env.grade(end.reason), seconds, _OutOfTimeError)
        except _OutOfTimeError:
            too_slow = 1.0
        self._seconds["grading"] += time.monotonic() - started
        if seconds is not None:
            self._metrics["grader_timeout"] = too_slow
        self._metrics.update(metrics)
        reward = checked_reward(reward, f"{self.place}, grade")
        await self._hooks.on_grade(self._state(end.observation))
        return reward

    async def _wait(
        self,
        what: str,
        work: Awaitable[T],
        seconds: float | None = None,
        error: Exception | None = None,
    ) -> T:
        """Awaits work within its own bound and within what is left of the rollout's."""
        started = time.monotonic()
        bound = None if self._overtime else self._deadline
        left = None if bound is None else max(0.0, bound - started)
        if left is not None and (seconds is None or left < seconds):
            seconds, error = left, _OutOfTimeError()
        try:
            return await bounded(work, seconds, lambda: error or _OutOfTimeError())
        finally:
            self._seconds[what] += time.monotonic() - started

    def _check_observation(self, ob: Observation) -> None:
        if not isinstance(getattr(ob, "length", None), int):
            raise DataValidationError(
                f"the observation is a {type(ob).__name__}, expected a tinker.ModelInput; "
                "ModelInput.from_ints(tokens) makes one"
            )
        if ob.length == 0:
            raise DataValidationError(
                "the observation is empty, expected a prompt of one token at least; an episode "
                "that is over says so with episode_done=True"
            )


def _with_limits_of(env: Env, config: RolloutConfig) -> RolloutConfig:
    """The settings, with the limits that an environment asks for where there are none."""
    limits = getattr(env, "rollout_limits", None)
    if limits is None or config.limits != _NO_LIMITS:
        return config
    return chz.replace(config, limits=limits)


def _reason_of(action: TokensWithLogprobs, step: StepResult) -> StopReason | str | None:
    """Why the environment ended the episode, if it did."""
    if not step.episode_done:
        return None
    cut = action.stop_reason == "length"
    reported = step.stop_reason or stop_reason_from_metrics(step.metrics)
    return reported or (StopReason.MAX_TOKENS if cut else StopReason.COMPLETED)


def _without_stop_reason(metrics: Metrics) -> Metrics:
    """The metrics but for ``stop/REASON``: reasons are counted once for each trajectory."""
    return {k: v for k, v in metrics.items() if not k.startswith(STOP_METRIC_PREFIX)}


def _name(env: Env) -> str:
    """Its class; of a wrapper that of what it wraps too."""
    inner = getattr(env, "message_env", None)
    name = type(env).__name__
    return name if inner is None else f"{name} of {type(inner).__name__}"


def call_step(env: Env, action: Action, extra: ActionExtra | None) -> Awaitable[StepResult]:
    """``env.step``, whether it takes ``extra`` or not."""
    return env.step(action, extra=extra) if _takes_extra(type(env)) else env.step(action)


@lru_cache(maxsize=256)
def _takes_extra(env_class: type[Any]) -> bool:
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(env_class.step).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    return "extra" in parameters or inspect.Parameter.VAR_KEYWORD in kinds
