"""Batches of groups over a list of problems."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset

P = TypeVar("P")


class ProblemDataset(RLDataset, Generic[P]):
    """Every problem once, in batches of ``groups_per_batch``; the last one may be smaller.

    Until ``set_epoch`` shuffles them, the problems are in the order of the list.
    """

    def __init__(
        self,
        problems: Sequence[P],
        make_group: Callable[[P], EnvGroupBuilder],
        groups_per_batch: int,
        shuffle: bool = True,
    ) -> None:
        """``make_group`` returns the builder of a problem's group, when its batch is requested."""
        if groups_per_batch < 1:
            raise ConfigurationError(
                f"groups_per_batch: got {groups_per_batch}, expected at least 1"
            )
        if not problems:
            raise DataValidationError("problems: got none, expected at least one")
        self._problems, self._make_group, self._shuffle = problems, make_group, shuffle
        self._groups_per_batch = groups_per_batch
        self._order = list(range(len(problems)))

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Returns the groups of batch ``index``."""
        start = index * self._groups_per_batch
        here = self._order[start : start + self._groups_per_batch]
        # A slice accepts negative and large indices, and would hide the mistake.
        if index < 0 or not here:
            raise IndexError(f"batch {index} of a dataset with {len(self)} batches")
        return [self._make_group(self._problems[i]) for i in here]

    def __len__(self) -> int:
        return -(-len(self._problems) // self._groups_per_batch)

    def set_epoch(self, seed: int) -> None:
        """Puts the problems in an order that depends on ``seed`` only, if ``shuffle`` is set."""
        if self._shuffle:
            # A permutation of the seed alone, not of the order before: a resumed run gets the same.
            count = len(self._problems)
            self._order = random.Random(seed).sample(range(count), count)
