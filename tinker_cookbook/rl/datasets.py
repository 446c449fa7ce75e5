"""Datasets made of others: several passes over one, several mixed by weight."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence

import chz
import numpy as np

from tinker_cookbook.exceptions import ConfigurationError, DataError
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder

__all__ = ["ChainedRLDataset", "EpochCycledRLDataset", "InterleavedRLDatasetBuilder"]

_KEPT_BATCHES = 2


class EpochCycledRLDataset(RLDataset):
    """Several passes over a dataset.

    Without a seed every pass is the same. With one, each pass has its batches in another order,
    and a dataset that can reorder its problems (``set_epoch``) does that as well. Any batch can be
    asked for at any time, as a resumed run does.

    Args:
        inner: The dataset to repeat.
        num_epochs: Passes.
        shuffle_seed: Of the orders; ``None`` keeps the dataset's own.
    """

    def __init__(self, inner: RLDataset, num_epochs: int, shuffle_seed: int | None = None) -> None:
        if num_epochs < 1:
            raise ConfigurationError(f"num_epochs: got {num_epochs}, expected at least 1")
        self._inner = inner
        self._num_epochs = num_epochs
        self._shuffle_seed = shuffle_seed
        self._epoch: int | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._inner) * self._num_epochs

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Batch ``index``, counted over all passes."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        epoch, within = divmod(index, len(self._inner))
        if self._shuffle_seed is None:
            return self._inner.get_batch(within)
        rng = np.random.default_rng([self._shuffle_seed, epoch])
        order = rng.permutation(len(self._inner))
        with self._lock:  # the epoch is a state of the inner dataset
            if epoch != self._epoch:
                self._inner.set_epoch(int(rng.integers(2**31)))
                self._epoch = epoch
            return self._inner.get_batch(int(order[within]))


@chz.chz
class InterleavedRLDatasetBuilder(RLDatasetBuilder):
    """A mixture: each group of a batch is the next one of a source drawn by weight.

    A source that is used up begins again. The test set is that of all sources, one after the
    other.
    """

    sources: list[RLDatasetBuilder] = chz.field(doc="Datasets to mix")
    weights: list[float] = chz.field(doc="How often each is drawn from, relative to the others")
    groups_per_batch: int = chz.field(doc="Groups in a batch")
    total_batches: int = chz.field(doc="Batches in all")
    seed: int = chz.field(default=0, doc="Seed of the draws")

    def check(self) -> None:
        """Raises ``ConfigurationError`` for settings that cannot work."""
        if not self.sources or len(self.weights) != len(self.sources):
            raise ConfigurationError(
                f"weights: got {len(self.weights)} for {len(self.sources)} sources, expected one "
                "for each, and one source at least"
            )
        for k, weight in enumerate(self.weights):
            if not 0 < weight < math.inf:
                raise ConfigurationError(
                    f"weights[{k}]: got {weight}, expected a positive number; leave out a source "
                    "that is not wanted"
                )
        for name in ("groups_per_batch", "total_batches"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}: got {getattr(self, name)}, expected at least 1")
        for source in self.sources:
            source.check()

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Builds the sources and mixes them."""
        self.check()
        built = await asyncio.gather(*(source() for source in self.sources))
        rng = np.random.default_rng(self.seed)
        chosen = rng.choice(
            len(built),
            size=self.groups_per_batch * self.total_batches,
            p=np.asarray(self.weights) / math.fsum(self.weights),
        )
        train = _Interleaved(
            [_Groups(dataset, k) for k, (dataset, _) in enumerate(built)],
            chosen.tolist(),
            self.groups_per_batch,
        )
        tests = [test for _, test in built if test is not None]
        return train, ChainedRLDataset(tests) if tests else None


class _Groups:
    """The groups of a dataset by number, over and over.

    Batches may be asked for in any order, so they must all be of one size but the last.
    """

    def __init__(self, dataset: RLDataset, source: int) -> None:
        self._dataset = dataset
        self._source = source
        self._kept: OrderedDict[int, Sequence[EnvGroupBuilder]] = OrderedDict()
        self._sizes: tuple[int, int] | None = None
        if not len(dataset):
            raise DataError(f"sources[{source}]: has no batches, expected one at least")

    def get(self, number: int) -> EnvGroupBuilder:
        size, total = self._size()
        batch, offset = divmod(number % total, size)
        groups = self._batch(batch)
        expected = size if batch < len(self._dataset) - 1 else total - batch * size
        if len(groups) != expected:
            raise DataError(
                f"sources[{self._source}]: batch {batch} has {len(groups)} groups, expected "
                f"{expected}; all batches but the last must be of one size to be mixed"
            )
        return groups[offset]

    def _size(self) -> tuple[int, int]:
        """Groups in a batch, and in all."""
        if self._sizes is None:
            last = len(self._dataset) - 1
            size, rest = len(self._batch(0)), len(self._batch(last))
            if not size or not rest:
                raise DataError(f"sources[{self._source}]: has an empty batch")
            self._sizes = size, size * last + rest
        return self._sizes

    def _batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        if index not in self._kept:
            self._kept[index] = self._dataset.get_batch(index)
            while len(self._kept) > _KEPT_BATCHES:
                self._kept.popitem(last=False)
        return self._kept[index]


class _Interleaved(RLDataset):
    def __init__(
        self, sources: Sequence[_Groups], chosen_N: Sequence[int], groups_per_batch: int
    ) -> None:
        self._sources = sources
        self._groups_per_batch = groups_per_batch
        counts = [0] * len(sources)
        self._pairs_N: list[tuple[int, int]] = []
        for source in chosen_N:
            self._pairs_N.append((source, counts[source]))
            counts[source] += 1

    def __len__(self) -> int:
        return len(self._pairs_N) // self._groups_per_batch

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        start = index * self._groups_per_batch
        pairs = self._pairs_N[start : start + self._groups_per_batch]
        return [self._sources[source].get(number) for source, number in pairs]


class ChainedRLDataset(RLDataset):
    """The batches of one dataset after those of another."""

    def __init__(self, datasets: Sequence[RLDataset]) -> None:
        self._datasets = datasets

    def __len__(self) -> int:
        return sum(map(len, self._datasets))

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Batch ``index``, counted over all of them."""
        for dataset in self._datasets:
            if index < len(dataset):
                return dataset.get_batch(index)
            index -= len(dataset)
        raise IndexError(f"batch {index} beyond the {len(self)} of the test set")
