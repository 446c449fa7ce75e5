"""A policy plays environments: one alone, or a group whose members share what they have in common.

``do_group_rollout`` is what the training loop calls. What it returns depends on the policy's seed
and on each member's place alone, never on which answer came first.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import chz

from tinker_cookbook.completers import TinkerTokenCompleter, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import (
    AllTrajectoriesFailedError,
    BackendError,
    DataValidationError,
)
from tinker_cookbook.rl.advantages import is_constant
from tinker_cookbook.rl.report.transcripts import member_log
from tinker_cookbook.rl.rollouts.async_utils import bounded, finished, gather_or_cancel, stop_tasks
from tinker_cookbook.rl.rollouts.budget import limit_tokens
from tinker_cookbook.rl.rollouts.episode import Episode, InitialPrompt
from tinker_cookbook.rl.rollouts.errors import (
    GraderTimeoutError,
    RolloutFailedError,
    RolloutTimeoutError,
    SamplingTurnTimeoutError,
    checked_reward,
    error_record,
    located,
)
from tinker_cookbook.rl.rollouts.hooks import RolloutHooks, RolloutState
from tinker_cookbook.rl.rollouts.limits import (
    ParseErrorPolicy,
    RolloutLimits,
    TerminationRewardPolicy,
)
from tinker_cookbook.rl.rollouts.presets import RolloutConfig
from tinker_cookbook.rl.rollouts.strategy import FailFast, RolloutResult, RolloutStrategy
from tinker_cookbook.rl.types import (
    Env,
    EnvGroupBuilder,
    Metrics,
    Observation,
    RolloutError,
    StopCondition,
    Trajectory,
    TrajectoryGroup,
)
from tinker_cookbook.utils import logtree

if TYPE_CHECKING:
    from collections.abc import Awaitable, Generator

    from tinker_cookbook.backends import SamplingClient


__all__ = [
    "InitialPrompt",
    "RolloutErrorCounter",
    "RolloutFailedError",
    "RolloutHooks",
    "RolloutState",
    "SamplingTurnTimeoutError",
    "collect_rollouts",
    "do_group_rollout",
    "do_group_rollout_and_filter_constant_reward",
    "do_single_rollout",
    "run_rollout",
]

logger = logging.getLogger(__name__)


async def run_rollout(
    policy: TokenCompleter,
    env: Env,
    *,
    limits: RolloutLimits | None = None,
    hooks: RolloutHooks | None = None,
    parse_errors: ParseErrorPolicy | None = None,
    config: RolloutConfig | None = None,
    opening: InitialPrompt | None = None,
) -> Trajectory:
    """Plays one episode.

    Args:
        policy: Turn t is sampled by ``policy.derived(member, t)``.
        env: Is used up by it.
        limits: In place of ``config.limits``.
        hooks: Called at the seams of the rollout.
        parse_errors: In place of ``config.parse_errors``.
        config: How to play; by default without bounds.
        opening: How the episode begins where that is known; else the environment is asked.

    Raises:
        RolloutFailedError: The environment raised; the message names it and the turn.
        DataValidationError: A reward that is no finite number, an empty observation.
        SamplingTurnTimeoutError: An answer did not come in time.
    """
    config = config or RolloutConfig()
    if limits is not None:
        config = chz.replace(config, limits=limits)
    if parse_errors is not None:
        config = chz.replace(config, parse_errors=parse_errors)
    member, attempt = (opening.member, opening.attempt) if opening is not None else (0, 0)
    episode = Episode(policy, env, config, hooks or RolloutHooks(), member, attempt)
    if opening is None or (opening.observation is None and opening.overflow is None):
        opening = await episode.open()
    return await episode.play(opening)


async def do_single_rollout(policy: TokenCompleter, env: Env) -> Trajectory:
    """Plays one episode, bounded by nothing but the environment."""
    return await run_rollout(policy, env)


async def do_group_rollout(
    env_group_builder: EnvGroupBuilder,
    policy: TokenCompleter,
    strategy: RolloutStrategy | None = None,
    termination: TerminationRewardPolicy | None = None,
    *,
    config: RolloutConfig | None = None,
    hooks: RolloutHooks | None = None,
) -> TrajectoryGroup:
    """Runs the rollouts of a group and computes their rewards.

    Turns are sampled by ``policy.derived(member, turn)``, retries by
    ``policy.derived(member, turn, attempt)``. A policy with a ``sample_many`` of its own answers
    members that begin with the same prompt by one request,
    ``policy.derived(first member, 0).sample_many(prompt, stop, n)``.

    ``cleanup`` of the builder is called once, also where the group fails or is cancelled, and a
    cancellation waits for its end.
    ``termination`` takes the place of ``config.termination``. A strategy with an ``execute`` of its
    own runs the rollouts itself, without ``config.limits`` and ``hooks``.

    Raises:
        AllTrajectoriesFailedError: The strategy found too few rollouts to go on with.
        RolloutFailedError: The strategy is to give up; the message names environment, member and
            turn.
    """
    config = config or RolloutConfig()
    if termination is not None:
        config = chz.replace(config, termination=termination)
    group = _Group(
        env_group_builder, policy, strategy or FailFast(), config, hooks or RolloutHooks()
    )
    try:
        result = await group.run()
    except BaseException:
        await group.clean_up()
        raise
    result.rollout_errors += await group.clean_up()
    return result


async def collect_rollouts(
    env_group_builder: EnvGroupBuilder, policy: TokenCompleter, strategy: RolloutStrategy
) -> RolloutResult:
    """Runs a group as ``strategy.run`` says; its rewards and cleanup are left to the caller."""
    group = _Group(env_group_builder, policy, strategy, RolloutConfig(), RolloutHooks())
    return await group.collect()


async def do_group_rollout_and_filter_constant_reward(
    sampling_client: SamplingClient,
    env_group_builder: EnvGroupBuilder,
    max_tokens: int,
    temperature: float,
    do_remove_constant_reward_groups: bool,
    enable_logging: bool = True,
    strategy: RolloutStrategy | None = None,
    termination: TerminationRewardPolicy | None = None,
) -> TrajectoryGroup | None:
    """Runs a group with the weights of a sampling client, for loops of user code.

    Args:
        sampling_client: Whose weights.
        env_group_builder: Makes the environments.
        max_tokens: Most tokens of an answer.
        temperature: Of the softmax.
        do_remove_constant_reward_groups: Give ``None`` for a group whose rewards are all equal.
        enable_logging: Whether environments log to the current ``logtree`` report.
        strategy: What to do about failures.
        termination: As in :func:`do_group_rollout`.

    Returns:
        The group, or ``None`` where it is left out: its rewards are equal, too few of its rollouts
        succeeded, or it failed and ``strategy.catches_group_errors``.
    """
    from tinker_cookbook.rl.rollouts.executor import run_group  # built on this module

    strategy = strategy or FailFast()
    policy = TinkerTokenCompleter(sampling_client, max_tokens, temperature)
    config = RolloutConfig(termination=termination)
    try:
        with logtree.optional_enable_logging(enable_logging):
            group = await run_group(env_group_builder, policy, strategy=strategy, config=config)
    except AllTrajectoriesFailedError as error:
        logger.warning("%s", error)
        return None
    except Exception as error:
        if not strategy.catches_group_errors:
            raise
        logger.warning("a group is left out: %s", error)
        return None
    if do_remove_constant_reward_groups and is_constant(group.get_total_rewards()):
        return None
    return group


@dataclass
class RolloutErrorCounter:
    """Counts failures over a run; ``ingest`` each group, ``None`` for one that was left out."""

    counts: Counter[str] = field(default_factory=Counter)
    groups_skipped: int = 0

    def ingest(self, result: TrajectoryGroup | None) -> None:
        """Adds the errors of a group."""
        if result is None:
            self.groups_skipped += 1
        else:
            self.counts.update(error.error_type for error in result.rollout_errors)

    def get_metrics(self, prefix: str = "rollout_errors") -> dict[str, float]:
        """``PREFIX/TYPE``, ``PREFIX/total`` and ``PREFIX/groups_skipped`` so far; nothing where
        nothing failed."""
        if not self.counts and not self.groups_skipped:
            return {}
        metrics = {f"{prefix}/{kind}": float(count) for kind, count in self.counts.items()}
        metrics[f"{prefix}/total"] = float(self.counts.total())
        metrics[f"{prefix}/groups_skipped"] = float(self.groups_skipped)
        return metrics


class _Group:
    def __init__(
        self,
        builder: EnvGroupBuilder,
        policy: TokenCompleter,
        strategy: RolloutStrategy,
        config: RolloutConfig,
        hooks: RolloutHooks,
    ) -> None:
        self._builder = builder
        self._policy = policy
        self._strategy = strategy
        self._config = config
        self._hooks = hooks
        self._envs_G: list[Env] = []
        self._episodes_G: list[Episode] = []
        # A member's opening once it may be played, or the error of its environment.
        self._ready_G: list[asyncio.Future[InitialPrompt]] = []
        self._requests: list[asyncio.Task[list[TokensWithLogprobs]]] = []

    async def run(self) -> TrajectoryGroup:
        # A strategy of user code may run the rollouts in a way of its own.
        own_way = type(self._strategy).execute is not RolloutStrategy.execute
        if own_way:
            result = await self._strategy.execute(self._builder, self._policy)
        else:
            result = await self.collect()
        rewards_G, metrics_G = await self._reward(result.trajectories, result.envs)
        return TrajectoryGroup(result.trajectories, rewards_G, metrics_G, result.errors)

    async def collect(self) -> RolloutResult:
        """Runs the rollouts of all members."""
        self._envs_G = await self._make_envs()
        self._episodes_G = [self._episode(i, 0) for i in range(len(self._envs_G))]
        self._ready_G = [asyncio.get_running_loop().create_future() for _ in self._envs_G]
        begun = asyncio.create_task(self._begin())
        try:
            outcome = await self._strategy.run(len(self._envs_G), self._attempt)
        finally:
            await stop_tasks([begun, *self._ready_G])
            await stop_tasks(self._requests)
        kept = [i for i, result in enumerate(outcome.results_G) if result is not None]
        trajectories_G = [result for result in outcome.results_G if result is not None]
        return RolloutResult(trajectories_G, [self._envs_G[i] for i in kept], outcome.errors)

    async def clean_up(self) -> list[RolloutError]:
        """Returns the error, if any: it must not hide that of a rollout nor cost the group."""
        try:
            await finished(self._builder.cleanup())
        except Exception as error:
            logger.exception("cleanup of %s failed", self._name)
            return [error_record(located(error, f"cleanup of {self._name}"))]
        return []

    @property
    def _name(self) -> str:
        return type(self._builder).__name__

    def _episode(self, member: int, attempt: int) -> Episode:
        env = self._envs_G[member]
        return Episode(self._policy, env, self._config, self._hooks, member, attempt)

    async def _make_envs(self) -> list[Env]:
        place = f"make_envs of {self._name}"
        try:
            envs_G = list(await self._builder.make_envs())
            if not envs_G:
                raise DataValidationError("got no environments, expected at least one")
        except Exception as error:
            raise self._strategy.group_failed(located(error, place)) from error
        return envs_G

    async def _begin(self) -> None:
        """Opens all environments, and lets the members play once all are open.

        Only then is it known which first prompts are the same. A member whose environment fails
        does not wait, so that its retry may begin. The others begin in their order, whichever of
        their environments was open first.
        """
        openings_G = await gather_or_cancel(map(self._open, range(len(self._envs_G))))
        try:
            self._share_first_answers([opening for opening in openings_G if opening is not None])
        except Exception as error:
            for ready in self._ready_G:
                if not ready.done():
                    ready.set_exception(error)
        for ready, opening in zip(self._ready_G, openings_G, strict=True):
            if opening is not None and not ready.done():
                ready.set_result(opening)

    async def _open(self, member: int) -> InitialPrompt | None:
        try:
            with member_log(member):
                return await self._episodes_G[member].open(self._strategy.timeout_seconds)
        except BaseException as error:
            ready = self._ready_G[member]
            if not ready.done():
                ready.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return None

    def _share_first_answers(self, openings: Sequence[InitialPrompt]) -> None:
        """Sends one request for all members with the same first prompt."""
        if type(self._policy).sample_many is TokenCompleter.sample_many:
            return  # each answer is a request of its own, and should fail alone
        alike: dict[Hashable, list[InitialPrompt]] = {}
        for opening in openings:
            if opening.observation is not None:
                assert opening.stop is not None
                alike.setdefault(_key(opening.observation, opening.stop), []).append(opening)
        for same in alike.values():
            budget = self._episodes_G[same[0].member].first_budget(same[0])
            if len(same) == 1 or budget.exhausted:
                continue
            policy = limit_tokens(self._policy.derived(same[0].member, 0), budget.tokens)
            request = asyncio.create_task(_sample_many(policy, same))
            self._requests.append(request)
            for i, opening in enumerate(same):
                opening.first_action = _Nth(request, i)

    async def _attempt(self, member: int, attempt: int) -> Trajectory:
        with member_log(member):  # what the environment logs belongs to this episode
            return await self._play(member, attempt)

    async def _play(self, member: int, attempt: int) -> Trajectory:
        if attempt == 0:
            opening = await self._ready_G[member]  # opening is bounded by itself
            episode = self._episodes_G[member]
            return await self._in_time(episode, episode.play(opening))
        try:
            self._envs_G[member] = await self._builder.make_env(member)
        except Exception as error:
            raise located(error, f"make_env of {self._name}, member {member}") from error
        episode = self._episode(member, attempt)
        return await self._in_time(episode, _open_and_play(episode))

    async def _in_time(self, episode: Episode, work: Awaitable[Trajectory]) -> Trajectory:
        seconds = self._strategy.timeout_seconds

        def error() -> Exception:
            message = f"the rollout took longer than per_rollout_timeout={seconds:g} s"
            return located(RolloutTimeoutError(message), episode.place)

        return await bounded(work, seconds, error)

    async def _reward(
        self, trajectories_G: list[Trajectory], envs_G: Sequence[Env]
    ) -> tuple[list[float], list[Metrics]]:
        """Final rewards, and metrics (those of the episodes among them)."""
        place = f"compute_group_rewards of {self._name}"
        termination = self._config.termination_policy
        # Members are graded together, so that grading can only be skipped for all of them.
        if all(termination.skips_grading(t.stop_reason) for t in trajectories_G):
            return [0.0] * len(trajectories_G), [dict(t.metrics) for t in trajectories_G]
        seconds = termination.grader_timeout_seconds
        try:
            graded_G = await bounded(
                self._builder.compute_group_rewards(trajectories_G, envs_G),
                seconds,
                lambda: GraderTimeoutError(
                    f"grading took longer than grader_timeout_seconds={seconds:g}; raise it, or "
                    "look whether the grader still answers"
                ),
            )
            return self._checked(graded_G, trajectories_G, place)
        except Exception as error:
            raise self._strategy.group_failed(located(error, place)) from error

    def _checked(
        self,
        graded_G: Sequence[tuple[float, Metrics]],
        trajectories_G: Sequence[Trajectory],
        place: str,
    ) -> tuple[list[float], list[Metrics]]:
        termination = self._config.termination_policy
        if len(graded_G) != len(trajectories_G):
            raise DataValidationError(
                f"got {len(graded_G)} rewards, expected {len(trajectories_G)}, one for each "
                "trajectory it was given"
            )
        rewards_G: list[float] = []
        metrics_G: list[Metrics] = []
        for i, trajectory in enumerate(trajectories_G):
            value, metrics = graded_G[i]
            reward = checked_reward(value, f"{place}, member {i}")
            metrics = {**trajectory.metrics, **metrics}
            if termination.clamps(trajectory.stop_reason) and trajectory.reward + reward > 0:
                # The final reward takes back what the steps earned, so that the total is 0.
                reward = -trajectory.reward
                metrics["zero_reward_on_limit"] = 1.0
            rewards_G.append(reward)
            metrics_G.append(metrics)
        return rewards_G, metrics_G


async def _open_and_play(episode: Episode) -> Trajectory:
    return await episode.play(await episode.open())


def _key(ob: Observation, stop: StopCondition) -> Hashable:
    """Equal for observations of the same tokens that are ended by the same."""
    chunks = []
    for chunk in ob.chunks:
        tokens = getattr(chunk, "tokens", None)
        chunks += [chunk.model_dump_json()] if tokens is None else tokens
    return tuple(chunks), tuple(stop)


async def _sample_many(
    policy: TokenCompleter, openings: Sequence[InitialPrompt]
) -> list[TokensWithLogprobs]:
    ob, stop = openings[0].observation, openings[0].stop
    assert ob is not None
    assert stop is not None
    samples = await policy.sample_many(ob, stop, len(openings))
    if len(samples) != len(openings):
        raise BackendError(
            f"the policy gave {len(samples)} samples, expected num_samples={len(openings)}"
        )
    return samples


class _Nth:
    """One of the answers of a shared request; a member that gives up waiting leaves it to the
    others. Unlike a coroutine it may stay unused."""

    def __init__(self, request: Awaitable[list[TokensWithLogprobs]], i: int) -> None:
        self._request = request
        self._i = i

    async def _wait(self) -> TokensWithLogprobs:
        return (await asyncio.shield(self._request))[self._i]

    def __await__(self) -> Generator[Any, None, TokensWithLogprobs]:
        return self._wait().__await__()
