"""What a group does about a rollout that fails: give up, try again, or go on without it.

A strategy knows nothing of environments. It is handed ``attempt(member, n)``, which plays member's
rollout for the n-th time (a later attempt in a new environment of the same member) within the
strategy's ``timeout_seconds``, and returns the results in the order of the members. So the outcome
never depends on which rollout was done first.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.exceptions import AllTrajectoriesFailedError, ConfigurationError
from tinker_cookbook.rl.rollouts.async_utils import gather_or_cancel
from tinker_cookbook.rl.rollouts.errors import error_record
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RolloutError, Trajectory

__all__ = [
    "FailFast",
    "MinViableGroup",
    "RetryOnFailure",
    "RolloutResult",
    "RolloutStrategy",
    "StrategyOutcome",
    "rollout_strategy_from_config",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

Attempt: TypeAlias = Callable[[int, int], Awaitable[T]]


@dataclass(frozen=True)
class RolloutResult:
    """The rollouts of a group that succeeded, with their environments, and what failed."""

    trajectories: list[Trajectory]
    envs: Sequence[Env]
    errors: list[RolloutError]


@dataclass
class StrategyOutcome(Generic[T]):
    """One entry a member, ``None`` where it failed for good; and a line for each failure."""

    results_G: list[T | None]
    errors: list[RolloutError]


class RolloutStrategy:
    """Decides what becomes of a group when a rollout in it fails. Must pickle.

    A subclass defines ``run``, which is handed attempts to play and says what to do about their
    failures; or ``execute``, which makes environments and plays them all by itself.
    """

    @property
    def catches_group_errors(self) -> bool:
        """Whether a group that fails as a whole is to be left out rather than end the run."""
        return False

    async def execute(
        self, env_group_builder: EnvGroupBuilder, policy: TokenCompleter
    ) -> RolloutResult:
        """Runs the rollouts of a group, without its rewards and without cleaning up after it."""
        # Not at the top: rollouts are built on this module.
        from tinker_cookbook.rl.rollouts.group import collect_rollouts

        return await collect_rollouts(env_group_builder, policy, self)

    @property
    def fails_fast(self) -> bool:
        """Whether the first failure ends the group at once."""
        return False

    @property
    def timeout_seconds(self) -> float | None:
        """Longest time of one attempt, ``None`` for any; an attempt that takes longer fails."""
        return None

    async def run(self, size: int, attempt: Attempt[T]) -> StrategyOutcome[T]:
        """Plays ``size`` members; raises where the group cannot be used."""
        raise NotImplementedError(f"{type(self).__name__} must define execute or run")

    def group_failed(self, error: Exception) -> Exception:
        """What to raise when the group as a whole failed: in ``make_envs``, or in its rewards."""
        return error


@dataclass(frozen=True)
class FailFast(RolloutStrategy):
    """The first failure cancels the group and is raised."""

    @property
    def fails_fast(self) -> bool:
        """Yes."""
        return True

    async def run(self, size: int, attempt: Attempt[T]) -> StrategyOutcome[T]:
        """Plays each member once."""

        async def once(member: int) -> T:
            return await attempt(member, 0)

        return StrategyOutcome([*await gather_or_cancel(map(once, range(size)))], [])


@dataclass(frozen=True)
class _Retrying(RolloutStrategy):
    max_retries: int = 3
    per_rollout_timeout: float | None = 0

    def __post_init__(self) -> None:
        _check("max_retries", self.max_retries)
        _check("per_rollout_timeout", self.per_rollout_timeout or 0)

    @property
    def catches_group_errors(self) -> bool:
        """Yes."""
        return True

    @property
    def timeout_seconds(self) -> float | None:
        """``per_rollout_timeout``, of which 0 and ``None`` mean any time."""
        return self.per_rollout_timeout or None

    async def _persist(self, member: int, attempt: Attempt[T]) -> tuple[T | None, list[Exception]]:
        """The result of the first attempt that succeeds, and the errors before it."""
        errors: list[Exception] = []
        for n in range(self.max_retries + 1):
            try:
                return await attempt(member, n), errors
            except Exception as error:
                errors.append(error)
                last = "; giving up" if n == self.max_retries else "; trying again"
                logger.warning("rollout of member %d failed%s: %s", member, last, error)
        return None, errors


@dataclass(frozen=True)
class RetryOnFailure(_Retrying):
    """A rollout that fails is repeated, in a new environment of the same member, up to
    ``max_retries`` times each; then its last error is raised, and training leaves the group out.

    Attributes:
        max_retries: Further attempts of each member.
        per_rollout_timeout: Seconds after which an attempt has failed; 0 is never.
    """

    async def run(self, size: int, attempt: Attempt[T]) -> StrategyOutcome[T]:
        """Plays until each member has succeeded."""

        async def insist(member: int) -> tuple[T, list[Exception]]:
            result, errors = await self._persist(member, attempt)
            if result is None:
                raise errors[-1]
            return result, errors

        outcomes = await gather_or_cancel(map(insist, range(size)))
        lines = [error_record(error) for _, errors in outcomes for error in errors]
        return StrategyOutcome([result for result, _ in outcomes], lines)


@dataclass(frozen=True)
class MinViableGroup(_Retrying):
    """As ``RetryOnFailure``, but a member that fails for good is left out of the group.

    Raises ``AllTrajectoriesFailedError`` where fewer than ``min_successful`` are left; the loop
    skips such a group.

    Attributes:
        min_successful: Fewest members; ``None`` is three quarters of the group, rounded up.
        max_retries: Further attempts of each member.
        per_rollout_timeout: Seconds after which an attempt has failed; 0 is never.
    """

    min_successful: int | None = None

    def __init__(
        self,
        min_successful: int | None = None,
        max_retries: int = 3,
        per_rollout_timeout: float | None = None,
    ) -> None:
        # Written out because the inherited fields would come first, and the name of the class
        # makes one expect min_successful there.
        object.__setattr__(self, "min_successful", min_successful)
        object.__setattr__(self, "max_retries", max_retries)
        object.__setattr__(self, "per_rollout_timeout", per_rollout_timeout)
        self.__post_init__()
        if min_successful is not None and min_successful < 1:
            raise ConfigurationError(f"min_successful: got {min_successful}, expected at least 1")

    async def run(self, size: int, attempt: Attempt[T]) -> StrategyOutcome[T]:
        """Plays each member until it has succeeded or used up its retries."""

        async def persist(member: int) -> tuple[T | None, list[Exception]]:
            return await self._persist(member, attempt)

        outcomes = await gather_or_cancel(map(persist, range(size)))
        succeeded = sum(result is not None for result, _ in outcomes)
        needed = self.min_successful
        needed = math.ceil(0.75 * size) if needed is None else min(needed, size)
        all_errors = [error for _, errors in outcomes for error in errors]
        if succeeded < needed:
            raise AllTrajectoriesFailedError(
                f"only {succeeded}/{size} rollouts succeeded, fewer than the minimum viable group "
                f"size {needed}; the last error: {error_record(all_errors[-1])}"
            ) from all_errors[-1]
        return StrategyOutcome(
            [result for result, _ in outcomes], [error_record(error) for error in all_errors]
        )

    def group_failed(self, error: Exception) -> Exception:
        """The group is to be skipped, whatever failed in it."""
        return AllTrajectoriesFailedError(f"no rollout of the group can be used: {error}")


def rollout_strategy_from_config(
    rollout_error_tolerance: bool | RolloutStrategy | None,
) -> RolloutStrategy:
    """``True`` is ``RetryOnFailure()``, ``False`` and ``None`` are ``FailFast()``.

    Raises:
        ConfigurationError: It is neither of these nor a strategy.
    """
    if isinstance(rollout_error_tolerance, RolloutStrategy):
        return rollout_error_tolerance
    if rollout_error_tolerance is None or isinstance(rollout_error_tolerance, bool):
        return RetryOnFailure() if rollout_error_tolerance else FailFast()
    raise ConfigurationError(
        f"rollout_error_tolerance: got {rollout_error_tolerance!r}, expected true, false or a "
        "RolloutStrategy such as MinViableGroup()"
    )


def _check(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ConfigurationError(f"{name}: got {value}, expected at least 0")
