"""Batches of groups over a list of problems."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset

P = TypeVar("P")


class ProblemDataset(RLDataset, Generic[P]):
    """Every problem once, in batches of ``groups_per_batch``; the last batch may be smaller.

    The problems keep the order of the list until ``set_epoch`` shuffles them.
    """

    def __init__(
        self,
        problems: Sequence[P],
        make_group: Callable[[P], EnvGroupBuilder],
        groups_per_batch: int,
        shuffle: bool = True,
    ) -> None:
        """``make_group`` returns the builder of a problem's group; called when its batch is
        requested."""
        if groups_per_batch < 1:
            raise ConfigurationError(
                f"groups_per_batch: got {groups_per_batch}, expected at least 1"
            )
        if not problems:
            raise DataValidationError("problems: got none, expected at least one")
        self._problems, self._make_group, self._shuffle = problems, make_group, shuffle
        self._groups_per_batch = groups_per_batch
        self._order = list(range(len(problems)))

    def data_sources(self) -> dict[str, Any]:
        """Returns the problems."""
        return {"": self._problems}

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Returns the groups of batch ``index``."""
        start = index * self._groups_per_batch
        here = self._order[start : start + self._groups_per_batch]
        # A slice accepts negative and large indices, which would hide an error.
        if index < 0 or not here:
            raise IndexError(f"batch {index} of a dataset with {len(self)} batches")
        return [self._make_group(self._problems[i]) for i in here]

    def __len__(self) -> int:
        return -(-len(self._problems) // self._groups_per_batch)

    def set_epoch(self, seed: int) -> None:
        """Shuffles the problems, if ``shuffle`` is set; the order depends only on ``seed``."""
        if self._shuffle:
            # The permutation depends only on the seed, not on the previous order, so a resumed run
            # gets the same order.
            count = len(self._problems)
            self._order = random.Random(seed).sample(range(count), count)
