"""Metrics of trajectories, and the evaluator that runs rollouts on a test set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tinker_cookbook.official.rl_rollout_logging import (
    RolloutSummaryExportConfig,
    RolloutSummaryGroup,
    serialize_rollout_summaries_from_groups,
)
from tinker_cookbook.rl import test_evaluator
from tinker_cookbook.rl.trajectory_metrics import (
    compute_sampling_client_metrics,
    compute_trajectory_metrics,
)
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, TrajectoryGroup

if TYPE_CHECKING:
    from tinker_cookbook.backends import SamplingClient
    from tinker_cookbook.completers import TokenCompleter

__all__ = [
    "RLTestSetEvaluator",
    "compute_sampling_client_metrics",
    "compute_trajectory_metrics",
    "dataset_to_env_group_builders",
]


class RLTestSetEvaluator(test_evaluator.RLTestSetEvaluator):
    """Test set whose episodes may be written to a store, one row for each (``stores``)."""

    def observe(self, index: int, group: TrajectoryGroup, tags: Sequence[str]) -> None:
        """Keeps the rows of a finished group, if they are exported."""
        if self._export is not None:
            names = self._export
            entry = RolloutSummaryGroup(group, list(tags), names.sampling_client_step)
            rows = serialize_rollout_summaries_from_groups(
                split=names.split, iteration=names.iteration, groups_P=[entry]
            )
            self._rows[index] = [{**row, "group_idx": index} for row in rows]

    async def __call__(
        self,
        sampling_client: SamplingClient,
        *,
        rollout_summary_export: RolloutSummaryExportConfig | None = None,
        store: Any = None,
    ) -> dict[str, float]:
        """Evaluates the weights of ``sampling_client``; see ``eval_token_completer``."""
        return await self.eval_token_completer(
            self.policy(sampling_client),
            rollout_summary_export=rollout_summary_export,
            store=store,
        )

    async def eval_token_completer(
        self,
        policy: TokenCompleter,
        *,
        rollout_summary_export: RolloutSummaryExportConfig | None = None,
        store: Any = None,
    ) -> dict[str, float]:
        """Evaluates any policy; with both keywords, ``store.write_rollouts`` gets the rows."""
        names = None if store is None else rollout_summary_export
        self._export, self._rows = names, dict[int, list[dict[str, Any]]]()
        metrics = await super().eval_token_completer(policy)
        if names is not None and store is not None:
            # In the order of the dataset; groups finish in any order.
            records = [row for index in sorted(self._rows) for row in self._rows[index]]
            store.write_rollouts(names.iteration, records, names.base_name)
        return metrics


def dataset_to_env_group_builders(dataset: RLDataset) -> list[EnvGroupBuilder]:
    """Returns the group builders of all batches of a dataset, in order."""
    return [builder for index in range(len(dataset)) for builder in dataset.get_batch(index)]
