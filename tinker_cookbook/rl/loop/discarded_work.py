"""What sampling took for groups that no step trains on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tinker_cookbook.rl.loop.parts import rollout_usage
from tinker_cookbook.utils.misc_utils import all_same

if TYPE_CHECKING:
    from tinker_cookbook.rl.config import PolicyTrainingConfig
    from tinker_cookbook.rl.types import TrajectoryGroup
    from tinker_cookbook.utils.cost_estimation import CostTracker
    from tinker_cookbook.utils.ml_log import Logger

DISCARDED_WORK_LOG_INTERVAL_SECONDS = 60.0
"""Seconds between two summaries of discarded work in a run whose steps log nothing."""


def count_discarded_rollout(
    cost_tracker: CostTracker | None, trajectory_group: TrajectoryGroup
) -> None:
    """Counts the tokens of a finished group that is dropped before training."""
    if cost_tracker is not None:
        cost_tracker.record_discarded_sampling(rollout_usage([trajectory_group]))


def drop_constant_reward_group(
    trajectory_group: TrajectoryGroup | None,
    config: PolicyTrainingConfig,
    cost_tracker: CostTracker | None,
    discarded_log: DiscardedWorkLog | None = None,
    step: int = 0,
) -> TrajectoryGroup | None:
    """Returns the group, or ``None`` where ``remove_constant_reward_groups`` drops it.

    Args:
        trajectory_group: A finished group; ``None`` stays ``None``.
        config: Says whether groups with a constant reward are dropped.
        cost_tracker: Counts the tokens of a dropped group.
        discarded_log: Logs the totals from time to time.
        step: Updates that are done.
    """
    if trajectory_group is None or not config.remove_constant_reward_groups:
        return trajectory_group
    if not all_same(trajectory_group.get_total_rewards()):
        return trajectory_group
    count_discarded_rollout(cost_tracker, trajectory_group)
    if discarded_log is not None:
        discarded_log.discarded(step)
    return None


class DiscardedWorkLog:
    """Logs the totals of discarded work while no training step writes a row.

    Dropped groups are in the totals that each step logs. Where all groups are dropped there are no
    steps, so the totals are logged as a summary, which belongs to no step.

    Args:
        cost_tracker: Has the totals; without one nothing is logged.
        ml_logger: Gets the summary.
        interval_seconds: Least time between two summaries; by default
            ``rl.train.DISCARDED_WORK_LOG_INTERVAL_SECONDS``.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        cost_tracker: CostTracker | None,
        ml_logger: Logger,
        *,
        interval_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cost_tracker, self.ml_logger = cost_tracker, ml_logger
        if interval_seconds is None:
            from tinker_cookbook.rl import train  # a user may have set the interval there

            interval_seconds = train.DISCARDED_WORK_LOG_INTERVAL_SECONDS
        self.interval_seconds = interval_seconds
        self.clock = clock
        self._logged_at = clock()

    def step_logged(self) -> None:
        """Begins the interval anew, as a step has just logged the totals."""
        self._logged_at = self.clock()

    def discarded(self, step: int) -> None:
        """Logs the totals if the interval is over; call it after a group was counted."""
        if self.cost_tracker is None:
            return
        now = self.clock()
        if now - self._logged_at >= self.interval_seconds:
            self._logged_at = now
            self.ml_logger.log_summary(self.cost_tracker.cumulative_metrics())
