"""Runs the members of a group; a failed member fails the group, is retried, or is left out."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs, limit_tokens
from tinker_cookbook.exceptions import (
    AllTrajectoriesFailedError,
    BackendError,
    ConfigurationError,
    DataError,
    DataValidationError,
    EvalGradingError,
    SandboxError,
)
from tinker_cookbook.rl.rollouts.async_utils import bounded, contained_task, stop_tasks
from tinker_cookbook.rl.rollouts.episode import Episode
from tinker_cookbook.rl.rollouts.errors import (
    RolloutExecutorError,
    RolloutTimeoutError,
    SamplerFailedError,
    error_record,
    located,
    located_at,
    original,
)
from tinker_cookbook.rl.rollouts.hooks import RolloutHooks
from tinker_cookbook.rl.rollouts.limits import RolloutConfig, check_range
from tinker_cookbook.rl.types import (
    Env,
    EnvGroupBuilder,
    RolloutError,
    Trajectory,
)
from tinker_cookbook.utils import logtree
from tinker_cookbook.utils.activity import activity
from tinker_cookbook.utils.error_logs import only_to_file
from tinker_cookbook.utils.user_classes import overrides

logger = logging.getLogger(__name__)

FIRST_PROMPTS_SECONDS = 30.0
"""Time that members wait for the first observations of the others, to share one request."""


@dataclass(frozen=True)
class RolloutResult:
    """Successful rollouts of a group with their environments, and the errors of failed ones."""

    trajectories: list[Trajectory]
    envs: Sequence[Env]
    errors: list[RolloutError]


_Outcome: TypeAlias = tuple[Trajectory | None, Env, list[Exception]]
"""Trajectory of a member, if an attempt succeeded, its environment, and the errors before it."""


class RolloutStrategy:
    """Strategy for failed rollouts of a group. A subclass defines ``execute`` and must pickle."""

    @property
    def catches_group_errors(self) -> bool:
        """Whether training skips a group that fails as a whole instead of ending the run."""
        return False

    async def execute(
        self, env_group_builder: EnvGroupBuilder, policy: TokenCompleter
    ) -> RolloutResult:
        """Runs the rollouts of a group; the caller computes rewards and calls ``cleanup``."""
        raise NotImplementedError(f"{type(self).__name__} must define execute")


class MemberStrategy(RolloutStrategy):
    """Strategy that runs all members concurrently and retries failed ones separately.

    Results are in the order of the members, whichever rollout finishes first.
    """

    max_retries: int = 0
    """Further attempts of each member, each in a new environment."""
    per_rollout_timeout: float | None = None
    """Seconds after which an attempt fails; 0 or ``None``: no timeout."""
    skips_failed_groups: bool = False

    @property
    def catches_group_errors(self) -> bool:
        """See :attr:`RolloutStrategy.catches_group_errors`."""
        return self.skips_failed_groups

    def __post_init__(self) -> None:
        for name in ("max_retries", "per_rollout_timeout"):
            check_range(name, getattr(self, name), 0)

    def drops(self, error: Exception) -> bool:
        """Returns whether a member whose last attempt ended with ``error`` is left out; if not, the
        error fails the group."""
        return False

    def check_successes(self, succeeded: int, size: int, errors: Sequence[Exception]) -> None:
        """Raises an error if too few of ``size`` members succeeded."""

    async def execute(
        self,
        env_group_builder: EnvGroupBuilder,
        policy: TokenCompleter,
        config: RolloutConfig | None = None,
        hooks: RolloutHooks | None = None,
    ) -> RolloutResult:
        """Runs the rollouts of all members; see :meth:`RolloutStrategy.execute`."""
        # 1. Build the environments; an error here fails the whole group.
        name = f"{type(env_group_builder).__name__}.make_envs"
        with located_at(lambda: f"make_envs of {type(env_group_builder).__name__}"):
            with activity().waiting(name):
                envs_G = list(await env_group_builder.make_envs())
            if not envs_G:
                raise DataValidationError("got no environments, expected at least one")
        config, hooks = config or RolloutConfig(), hooks or RolloutHooks()
        episodes_G = [Episode(policy, env, config, hooks, i) for i, env in enumerate(envs_G)]
        tasks: list[asyncio.Task[Any]] = []
        members_G: list[asyncio.Task[_Outcome]] = []

        def cancelled_member() -> str:
            members = zip(episodes_G, members_G, strict=False)
            return next((e for e, task in members if task.cancelled()), episodes_G[0]).location

        try:
            # 2. Get the first prompts; members with equal ones share a sampling request.
            opened = await self._open(episodes_G, tasks)
            tasks += _shared_requests([one for one in episodes_G if one.prompt is not None])
            # 3. Run the members. The first error that a member raises cancels the others. An
            # environment may also cancel the task of its own rollout.
            for episode in episodes_G:
                work = self._run_member(env_group_builder, episode, opened.get(episode))
                members_G.append(asyncio.create_task(work))
            with located_at(cancelled_member):
                outcomes_G = await asyncio.gather(*members_G)
        finally:
            # The others last, because members wait for them.
            await stop_tasks(members_G)
            await stop_tasks(tasks)
            for episode in episodes_G:
                episode.close(failed=True)  # without effect if the member has run
        # 4. Keep the successful members with their environments, which the group's rewards need.
        errors = [error for _, _, errors in outcomes_G for error in errors]
        succeeded = [(done, env) for done, env, _ in outcomes_G if done is not None]
        self.check_successes(len(succeeded), len(envs_G), errors)
        return RolloutResult(
            [trajectory for trajectory, _ in succeeded],
            [env for _, env in succeeded],
            [error_record(error) for error in errors],
        )

    async def _open(
        self, episodes: Sequence[Episode], tasks: list[asyncio.Task[Any]]
    ) -> dict[Episode, asyncio.Task[None]]:
        """Gets the first prompts of all members that do not wait for others, as in a game; adds the
        tasks, which may fail, to ``tasks``, and returns them."""
        opened: dict[Episode, asyncio.Task[None]] = {}
        for episode in episodes:
            if not getattr(episode.env, "waits_for_members", False):
                with logtree.scope_div(data__member=episode.member):
                    work = episode.open(self.per_rollout_timeout or None)
                    opened[episode] = contained_task(work)
        tasks += opened.values()
        if not opened:
            return opened
        # Only a group that the error ends need not wait for the others.
        when = asyncio.FIRST_EXCEPTION if isinstance(self, FailFast) else asyncio.ALL_COMPLETED
        # Without a limit, environments that wait for each other would wait forever.
        done, late = await asyncio.wait(
            opened.values(), timeout=FIRST_PROMPTS_SECONDS, return_when=when
        )
        if late and not any(task.cancelled() or task.exception() for task in done):
            logger.warning(
                "%d members of a group have no first observation after %g s, so the others "
                "begin without them; where members wait for each other, as in a game, set "
                "waits_for_members = True on the environment",
                len(late),
                FIRST_PROMPTS_SECONDS,
            )
        return opened

    async def _run_member(
        self, builder: EnvGroupBuilder, episode: Episode, opened: asyncio.Task[None] | None
    ) -> _Outcome:
        """Returns the first successful trajectory, its environment, and the errors before it."""
        member, errors = episode.member, []
        timeout = self.per_rollout_timeout or None
        make_env = f"make_env of {type(builder).__name__}, member {member}"

        def timeout_error() -> Exception:
            message = f"the rollout took longer than per_rollout_timeout={timeout:g} s"
            return located(RolloutTimeoutError(message), episode.location)

        for attempt in range(self.max_retries + 1):
            try:
                # Log lines of the environment belong to this member.
                with logtree.scope_div(data__member=member):
                    if attempt > 0:
                        with located_at(lambda: make_env):
                            env = await builder.make_env(member)
                        # An environment runs one episode, so a retry needs a new one.
                        episode = episode.again(env, attempt)
                    await (opened if opened is not None and attempt == 0 else episode.open(timeout))
                    return await bounded(episode.run(), timeout, timeout_error), episode.env, errors
            except Exception as error:
                # A cancellation is no Exception, so it is never retried.
                errors.append(error)
                final = attempt == self.max_retries or not _may_succeed(error)
                if self.catches_group_errors:
                    last = "; giving up" if final else "; retrying"
                    message = "rollout of member %d failed%s: %s"
                    logger.warning(message, member, last, error, extra=only_to_file())
                if final:
                    break
        if not self.drops(errors[-1]) or isinstance(errors[-1], SamplerFailedError):
            raise errors[-1]
        # The strategy decides with ``check_successes`` whether enough members are left.
        return None, episode.env, errors


def _shared_requests(episodes: Sequence[Episode]) -> list[asyncio.Task[list[TokensWithLogprobs]]]:
    """Starts one sampling request for all members with the same first prompt."""
    if not episodes or not overrides(episodes[0].policy, TokenCompleter, "sample_many"):
        return []  # each response is a separate request, which should fail separately
    equal: list[list[Episode]] = []
    for episode in episodes:
        members = next((m for m in equal if m[0].prompt == episode.prompt), [])
        equal += [] if members else [members]
        members.append(episode)
    requests: list[asyncio.Task[list[TokensWithLogprobs]]] = []
    for members in equal:
        first, num = members[0], len(members)
        assert first.prompt is not None
        # No member has sampled anything yet, so the first one's budget serves all of them.
        budget = first.token_budget(first.prompt[0])
        if num == 1 or budget.exhausted:
            continue
        # Use the first member's random numbers, whichever request finishes first.
        policy = limit_tokens(first.policy.derived(first.member, 0), budget.tokens)
        requests.append(contained_task(policy.sample_many(*first.prompt, num)))
        for i, episode in enumerate(members):
            episode.first_response = partial(_ith_sample, requests[-1], i, num)
    return requests


async def _ith_sample(
    request: asyncio.Task[list[TokensWithLogprobs]], i: int, num: int
) -> TokensWithLogprobs:
    # A member that times out must not cancel the request of the others.
    samples = await asyncio.shield(request)
    # A policy of user code may return too few, and a member would get no response.
    if len(samples) != num:
        raise BackendError(
            f"the policy returned {len(samples)} samples, expected num_samples={num}"
        )
    return samples[i]


def _may_succeed(error: Exception) -> bool:
    """Returns whether another attempt makes sense after this error."""
    task = asyncio.current_task()
    # The environment may have raised it because this task is cancelled.
    if task is not None and task.cancelling():
        return False
    # A reward that is no number or a wrong setting would come again.
    return not isinstance(original(error), (DataError, ConfigurationError))


def skips_group(strategy: RolloutStrategy, error: Exception) -> bool:
    """Returns whether a run goes on without a group that failed with ``error``."""
    # Neither the model nor an environment is the cause: every later group would fail too.
    if isinstance(error, (SamplerFailedError, RolloutExecutorError)):
        return False
    if isinstance(error, AllTrajectoriesFailedError) or strategy.catches_group_errors:
        return True
    return isinstance(strategy, MemberStrategy) and strategy.drops(error)


@dataclass(frozen=True)
class FailFast(MemberStrategy):
    """Strategy that cancels the group at the first failure and raises it."""


@dataclass(frozen=True)
class RetryOnFailure(MemberStrategy):
    """Strategy that retries failed rollouts and skips the group if a member keeps failing."""

    max_retries: int = 3
    per_rollout_timeout: float | None = 0

    skips_failed_groups = True


@dataclass(frozen=True)
class MinViableGroup(MemberStrategy):
    """Strategy that retries failed rollouts and leaves out members that keep failing."""

    min_successful: int | None = None
    """Minimum number of successful members, below which training skips the group; ``None``: three
    quarters of the group, rounded up."""
    max_retries: int = 3
    per_rollout_timeout: float | None = None

    skips_failed_groups = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("min_successful", self.min_successful, 1)

    def check_successes(self, succeeded: int, size: int, errors: Sequence[Exception]) -> None:
        """Raises ``AllTrajectoriesFailedError`` if fewer than ``min_successful`` succeeded."""
        required = self.min_successful
        # A group smaller than the minimum needs all its members.
        required = math.ceil(0.75 * size) if required is None else min(required, size)
        if succeeded < required:
            raise AllTrajectoriesFailedError(
                f"only {succeeded}/{size} rollouts succeeded, fewer than the minimum viable group "
                f"size {required}; the last error: {error_record(errors[-1])}"
            ) from errors[-1]

    def drops(self, error: Exception) -> bool:
        """Returns True."""
        return True


@dataclass(frozen=True)
class LeaveOutUngraded(MinViableGroup):
    """Strategy that leaves out answers without a grade; every other failure ends the run.

    For rewards that come from outside of the run: a judge that gives no score
    (``EvalGradingError``), or a sandbox that breaks (``SandboxError``). This is not the fault of
    the model, so the answer gets no reward instead of one of 0. The grader retries, not the
    rollout.
    """

    min_successful: int | None = 2
    max_retries: int = 0

    skips_failed_groups = False

    def drops(self, error: Exception) -> bool:
        """Returns whether the grader failed."""
        return isinstance(original(error), (EvalGradingError, SandboxError))


def rollout_strategy_from_config(
    rollout_error_tolerance: bool | RolloutStrategy | None,
) -> RolloutStrategy:
    """Returns ``RetryOnFailure()`` for ``True``, ``FailFast()`` for ``False`` and ``None``."""
    if isinstance(rollout_error_tolerance, RolloutStrategy):
        return rollout_error_tolerance
    if rollout_error_tolerance is None or isinstance(rollout_error_tolerance, bool):
        return RetryOnFailure() if rollout_error_tolerance else FailFast()
    raise ConfigurationError(
        f"rollout_error_tolerance: got {rollout_error_tolerance!r}, expected true, false or a "
        "RolloutStrategy such as MinViableGroup()"
    )
