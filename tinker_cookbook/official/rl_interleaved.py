"""Dataset that mixes other datasets by weight."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import chz
import numpy as np

from tinker_cookbook.exceptions import ConfigurationError, DataError
from tinker_cookbook.rl.dataset_utils import cycle_permutation
from tinker_cookbook.rl.rollouts.limits import check_range
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder


class BatchSizeError(DataError, IndexError):
    """Raised if the batches of a source differ in size."""


@chz.chz
class InterleavedRLDatasetBuilder(RLDatasetBuilder):
    """Mixture: each group of a batch is the next one of a source that is sampled by weight.

    A source that is used up starts again, in another order. As in the official cookbook there is no
    test set; use evaluators instead.
    """

    sources: list[RLDatasetBuilder] = chz.field(doc="Datasets to mix")
    weights: list[float] = chz.field(doc="Relative frequency of each source")
    groups_per_batch: int = chz.field(doc="Groups in a batch")
    total_batches: int | None = chz.field(
        default=None, doc="Number of batches; default: until a source would start again"
    )
    seed: int = chz.field(default=0, doc="Seed of sampling and shuffling")

    def check(self) -> None:
        """Raises ``ConfigurationError`` for settings that cannot work."""
        num_sources, weights = len(self.sources), self.weights
        if not num_sources:
            raise ConfigurationError("sources: got none. At least one dataset is needed to mix")
        if len(weights) != num_sources:
            raise ConfigurationError(
                f"weights: got {len(weights)} for {num_sources} sources, expected the same length: "
                "one weight for each"
            )
        for k, weight in enumerate(weights):
            if not 0 < weight < math.inf:
                raise ConfigurationError(
                    f"weights[{k}]: got {weight}, expected a positive number; leave out a source "
                    "that is not wanted"
                )
        for name in ("groups_per_batch", "total_batches"):
            check_range(name, getattr(self, name), 1)
        for source in self.sources:
            source.check()

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Builds the sources and mixes their training data."""
        self.check()
        built = await asyncio.gather(*(source() for source in self.sources))
        # In a thread, because the first and the last batch of each source are built.
        train = await asyncio.to_thread(
            _InterleavedRLDataset,
            [dataset for dataset, _ in built],
            self.weights,
            self.groups_per_batch,
            self.total_batches,
            self.seed,
        )
        return train, None


class _InterleavedRLDataset(RLDataset):
    """Groups of several datasets, sampled by weight; any batch can be requested at any time."""

    def __init__(
        self,
        sources: Sequence[RLDataset],
        weights: Sequence[float],
        groups_per_batch: int,
        total_batches: int | None = None,
        seed: int = 0,
    ) -> None:
        self._datasets = list(sources)
        self._sources = [_Groups(dataset, k) for k, dataset in enumerate(sources)]
        self._groups_per_batch, self._seed = groups_per_batch, seed
        self._source_total_groups = [source.total for source in self._sources]
        # Weights are relative, probabilities must add up to 1.
        shares_K = np.asarray(weights) / math.fsum(weights)
        if total_batches is None:
            per_batch_K = shares_K * groups_per_batch
            # The rounding keeps 10 / 0.5 at 20 where the division gives 19.999….
            lasts_K = np.round(np.asarray(self._source_total_groups) / per_batch_K, 9)
            total_batches = max(1, int(lasts_K.min()))
        # Choose the source of every group of the run now, so that any batch can be built at any
        # time, as a resumed run does.
        rng = np.random.default_rng(seed)
        chosen_N = rng.choice(len(sources), size=groups_per_batch * total_batches, p=shares_K)
        # The number of earlier samples of a source is the number of its next group.
        numbers_N = np.empty(len(chosen_N), dtype=np.int64)
        for k in range(len(sources)):
            of_source = np.flatnonzero(chosen_N == k)
            numbers_N[of_source] = np.arange(len(of_source))
        self._samples_N = list(zip(chosen_N.tolist(), numbers_N.tolist(), strict=True))

    def data_sources(self) -> dict[str, Any]:
        """Returns the datasets."""
        return {f"sources[{k}]": dataset for k, dataset in enumerate(self._datasets)}

    def __len__(self) -> int:
        return len(self._samples_N) // self._groups_per_batch

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Returns batch ``index``."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        start = index * self._groups_per_batch
        batch = []
        for source, number in self._samples_N[start : start + self._groups_per_batch]:
            groups = self._sources[source]
            cycle, within = divmod(number, groups.total)
            # The order depends only on seed, source and cycle, so a resumed run continues it.
            order = cycle_permutation(groups.total, f"{self._seed}:{source}", cycle)
            batch.append(groups.get(order[within]))
        return batch


class _Groups:
    """Groups of a dataset by number; only its first and last batch are built beforehand."""

    def __init__(self, dataset: RLDataset, source: int) -> None:
        self._num_batches, self._source = len(dataset), source
        # Batches may be large, so only two are kept.
        self._batch = lru_cache(maxsize=2)(dataset.get_batch)
        if not len(dataset):
            raise DataError(f"sources[{source}]: has 0 batches, expected at least one")
        last = self._num_batches - 1
        self._size, rest = len(self._batch(0)), len(self._batch(last))
        if not self._size or not rest:
            raise DataError(f"sources[{source}]: has a batch of 0 groups, expected at least one")
        self.total = self._size * last + rest

    def get(self, number: int) -> EnvGroupBuilder:
        batch, offset = divmod(number, self._size)
        groups = self._batch(batch)
        # Numbers are turned into batch and offset by division, which needs batches of equal size.
        expected = self._size if batch < self._num_batches - 1 else self.total - batch * self._size
        if len(groups) != expected:
            raise BatchSizeError(
                f"sources[{self._source}]: batch {batch} has {len(groups)} groups, expected "
                f"{expected}; to be mixed, all batches but the last need the same number of groups "
                "as batch 0"
            )
        return groups[offset]
