"""Runs the members of a group; a failed member fails the group, is retried, or is left out."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

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
from tinker_cookbook.rl.rollouts.async_utils import bounded, contained, stop_tasks
from tinker_cookbook.rl.rollouts.episode import Episode
from tinker_cookbook.rl.rollouts.errors import (
    RolloutExecutorError,
    RolloutTimeoutError,
    SamplerFailedError,
    error_record,
    located,
    located_at,
    original,
    with_attempts,
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

    def group_failed(self, error: Exception) -> Exception:
        """Returns the error to raise if ``make_envs`` or the group's rewards failed."""
        return error


class MemberStrategy(RolloutStrategy):
    """Strategy that runs all members concurrently and retries failed ones separately.

    Results are in the order of the members, whichever rollout finishes first.
    """

    max_retries: int = 0
    """Further attempts of each member, each in a new environment."""
    per_rollout_timeout: float | None = None
    """Seconds after which an attempt fails; 0 or ``None``: no timeout."""
    drops_failed_members: bool = False
    """Whether a member without a successful attempt is left out instead of failing the group."""
    skips_failed_groups: bool = False

    @property
    def catches_group_errors(self) -> bool:
        """See :attr:`RolloutStrategy.catches_group_errors`."""
        return self.skips_failed_groups

    def __post_init__(self) -> None:
        for name in ("max_retries", "per_rollout_timeout"):
            check_range(name, getattr(self, name), 0)

    async def execute(
        self,
        env_group_builder: EnvGroupBuilder,
        policy: TokenCompleter,
        config: RolloutConfig | None = None,
        hooks: RolloutHooks | None = None,
    ) -> RolloutResult:
        """Runs the rollouts of all members; see :meth:`RolloutStrategy.execute`."""
        # 1. Build the environments; an error here fails the whole group.
        with part_of_group(self, f"make_envs of {type(env_group_builder).__name__}"):
            name = f"{type(env_group_builder).__name__}.make_envs"
            with activity().waiting(name):
                envs_G = list(await env_group_builder.make_envs())
            if not envs_G:
                raise DataValidationError("got no environments, expected at least one")
        # 2. Run the members. The first error that a member raises cancels the others.
        config, hooks = config or RolloutConfig(), hooks or RolloutHooks()
        prompts = _FirstPrompts(len(envs_G))
        episodes_G = [Episode(policy, env, config, hooks, i) for i, env in enumerate(envs_G)]
        members_G = [
            asyncio.create_task(self._run_member(env_group_builder, episode, prompts))
            for episode in episodes_G
        ]

        def cancelled_member() -> str:
            tasks = zip(episodes_G, members_G, strict=True)
            return next((e for e, task in tasks if task.cancelled()), episodes_G[0]).location

        try:
            # An environment may also cancel the task of its own rollout.
            with located_at(cancelled_member):
                outcomes_G = await asyncio.gather(*members_G)
        finally:
            await stop_tasks(members_G)
            # Requests last, because members wait for them.
            await stop_tasks(prompts.requests)
        # 3. Keep the successful members, in the order of the group.
        errors = [error for _, _, errors in outcomes_G for error in errors]
        # Environments go with their trajectories, because the group's rewards need both.
        succeeded = [
            (trajectory, env) for trajectory, env, _ in outcomes_G if trajectory is not None
        ]
        try:
            self.check_successes(len(succeeded), len(envs_G), errors)
        except AllTrajectoriesFailedError as error:
            raise with_attempts(error, errors) from error.__cause__
        return RolloutResult(
            [trajectory for trajectory, _ in succeeded],
            [env for _, env in succeeded],
            [error_record(error) for error in errors],
        )

    def check_successes(self, succeeded: int, size: int, errors: Sequence[Exception]) -> None:
        """Raises an error if too few of ``size`` members succeeded."""

    def drops(self, error: Exception) -> bool:
        """Returns whether a member whose last attempt ended with ``error`` is left out."""
        return self.drops_failed_members

    async def _run_member(
        self, builder: EnvGroupBuilder, episode: Episode, prompts: _FirstPrompts
    ) -> tuple[Trajectory | None, Env, list[Exception]]:
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
                    if attempt == 0:
                        # A retry does not wait for the others: only first attempts share a request.
                        await prompts.open(episode, timeout)
                    else:
                        with located_at(lambda: make_env):
                            env = await builder.make_env(member)
                        # An environment runs one episode, so a retry needs a new one.
                        episode = episode.again(env, attempt)
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
            raise with_attempts(errors[-1], errors)
        # The strategy decides with ``check_successes`` whether enough members are left.
        return None, episode.env, errors


def _may_succeed(error: Exception) -> bool:
    """Returns whether another attempt makes sense after this error."""
    task = asyncio.current_task()
    # The environment may have raised it because this task is cancelled.
    if task is not None and task.cancelling():
        return False
    # A reward that is no number or a wrong setting would come again.
    return not isinstance(original(error), (DataError, ConfigurationError))


@contextmanager
def part_of_group(strategy: RolloutStrategy, location: str) -> Iterator[None]:
    """Passes an error of the block, which concerns the whole group, to ``strategy``."""
    try:
        with located_at(lambda: location):
            yield
    except Exception as error:
        failed = strategy.group_failed(error)
        if failed is error:
            raise
        raise with_attempts(failed, [error]) from error


def skips_group(strategy: RolloutStrategy, error: Exception) -> bool:
    """Returns whether a run goes on without a group that failed with ``error``."""
    # Neither the model nor an environment is the cause: every later group would fail too.
    if isinstance(error, (SamplerFailedError, RolloutExecutorError)):
        return False
    return isinstance(error, AllTrajectoriesFailedError) or strategy.catches_group_errors


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

    drops_failed_members = skips_failed_groups = True

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

    def group_failed(self, error: Exception) -> Exception:
        """Returns an error for which training skips the group."""
        return AllTrajectoriesFailedError(f"no rollout of the group can be used: {error}")


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


class _FirstPrompts:
    """First prompts of a group, which share a sampling request where they are equal."""

    def __init__(self, num_members: int) -> None:
        self.requests: list[asyncio.Task[list[TokensWithLogprobs]]] = []
        self._missing = num_members
        # Log lines of a request belong to the group, not to the member that opened last.
        self._context = contextvars.copy_context()
        # Episode of each member with an open environment, and the future that its rollout awaits.
        self._opened: dict[int, tuple[Episode, asyncio.Future[None]]] = {}

    async def open(self, episode: Episode, timeout: float | None) -> None:
        """Gets the first prompt of a member, and waits for the prompts of the others.

        A member whose environment fails does not wait, so it is retried at once. Nor does one whose
        environment waits for other members: they can only move once they run.
        """
        if getattr(episode.env, "waits_for_members", False):
            self._arrived()
            await episode.open(timeout)
            return
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            await episode.open(timeout)
            self._opened[episode.member] = (episode, ready)
        finally:
            self._arrived()
        # Without a limit, environments that wait for each other would wait forever.
        await asyncio.wait({ready}, timeout=FIRST_PROMPTS_SECONDS)
        if not ready.done():
            logger.warning(
                "%d members of a group have no first observation after %g s, so the others "
                "begin without them; where members wait for each other, as in a game, set "
                "waits_for_members = True on the environment",
                self._missing,
                FIRST_PROMPTS_SECONDS,
            )
            self._missing = 0  # later members begin at once
            self._release()
        await ready

    def _arrived(self) -> None:
        """Counts a member; the last one releases those that wait."""
        self._missing -= 1
        # Only now is it known which first prompts are equal. The member that opened last waits
        # like the others, or it would run before them.
        if self._missing <= 0:
            asyncio.get_running_loop().call_soon(self._release, context=self._context)

    def _release(self) -> None:
        """Starts the requests and lets the rollouts continue."""
        # In the order of the members, so that a policy gets their calls in the same order in every
        # run, whichever environment opened first.
        opened, self._opened = sorted(self._opened.items()), {}
        try:
            self._start_requests([episode for _, (episode, _) in opened])
        finally:  # after an error each member samples by itself, and raises it with its place
            for _, (_, ready) in opened:
                if not ready.done():  # otherwise the member was cancelled meanwhile
                    ready.set_result(None)

    def _start_requests(self, episodes: Sequence[Episode]) -> None:
        """Starts one sampling request for all members with the same first prompt."""
        if not episodes or not overrides(episodes[0].policy, TokenCompleter, "sample_many"):
            return  # each response is a separate request, which should fail separately
        equal: list[list[Episode]] = []
        for episode in episodes:
            if episode.prompt is not None:  # otherwise the prompt leaves no room for a response
                members = next((m for m in equal if m[0].prompt == episode.prompt), [])
                equal += [] if members else [members]
                members.append(episode)
        for members in equal:
            first, num = members[0], len(members)
            assert first.prompt is not None
            # No member has sampled anything yet, so the first one's budget serves all of them.
            budget = first.token_budget(first.prompt[0])
            if num == 1 or budget.exhausted:
                continue
            # Use the first member's random numbers, whichever request finishes first.
            policy = limit_tokens(first.policy.derived(first.member, 0), budget.tokens)
            work = contained(policy.sample_many(*first.prompt, num))
            self.requests.append(asyncio.create_task(work))
            for i, episode in enumerate(members):
                episode.first_response = partial(_ith_sample, self.requests[-1], i, num)


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
