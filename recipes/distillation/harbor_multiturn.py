"""Terminal tasks without a reward, for distillation: the teacher is the only signal."""

from __future__ import annotations

import chz

from tinker_cookbook.recipes.harbor_rl.harbor_env import HarborDataset, HarborDatasetBuilder
from tinker_cookbook.renderers import Message
from tinker_cookbook.rl.types import RLDataset


async def zero_reward(history: list[Message]) -> tuple[float, dict[str, float]]:
    """Returns reward 0 and no metrics: no tests run."""
    return 0.0, {}


@chz.chz
class HarborDistillationDatasetBuilder(HarborDatasetBuilder):
    """Tasks for training, all of them, and none for evaluation."""

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Builds the dataset."""
        self.check()
        groups = self._groups(self.tasks, self.group_size)
        return HarborDataset(groups, self.batch_size), None
