"""Parts of ``rl.rollouts`` for loops of user code."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.rl.advantages import is_constant
from tinker_cookbook.rl.rollouts.group import run_group
from tinker_cookbook.rl.rollouts.limits import RolloutConfig, TerminationRewardPolicy
from tinker_cookbook.rl.rollouts.strategy import FailFast, RolloutStrategy, skips_group
from tinker_cookbook.rl.types import EnvGroupBuilder, TrajectoryGroup
from tinker_cookbook.utils import logtree

logger = logging.getLogger(__name__)


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

    With ``enable_logging`` environments log to the current ``logtree`` report. Returns ``None`` if
    too few rollouts succeeded, the group failed and ``strategy.catches_group_errors``, or with
    ``do_remove_constant_reward_groups`` if all rewards are equal.
    """
    strategy = strategy or FailFast()
    policy = TinkerTokenCompleter(sampling_client, max_tokens, temperature)
    config = RolloutConfig(termination=termination)
    try:
        with logtree.optional_enable_logging(enable_logging):
            group = await run_group(env_group_builder, policy, strategy=strategy, config=config)
    except Exception as error:
        # A tolerant strategy skips the group instead of ending the run.
        if not skips_group(strategy, error):
            raise
        logger.warning("a group is skipped: %s", error)
        return None
    # Equal rewards have advantages of 0, so the group would train nothing.
    if do_remove_constant_reward_groups and is_constant(group.get_total_rewards()):
        return None
    return group


@dataclass
class RolloutErrorCounter:
    """Counter of rollout errors over a run."""

    counts: Counter[str] = field(default_factory=Counter)
    groups_skipped: int = 0

    def ingest(self, result: TrajectoryGroup | None) -> None:
        """Adds the errors of a group; ``None`` is a group that was skipped."""
        if result is None:
            self.groups_skipped += 1
        else:
            self.counts.update(error.error_type for error in result.rollout_errors)

    def get_metrics(self, prefix: str = "rollout_errors") -> dict[str, float]:
        """Returns ``PREFIX/TYPE``, ``PREFIX/total`` and ``PREFIX/groups_skipped``, if any error."""
        if not self.counts and not self.groups_skipped:
            return {}
        metrics = {f"{prefix}/{kind}": float(count) for kind, count in self.counts.items()}
        metrics[f"{prefix}/total"] = float(self.counts.total())
        metrics[f"{prefix}/groups_skipped"] = float(self.groups_skipped)
        return metrics
