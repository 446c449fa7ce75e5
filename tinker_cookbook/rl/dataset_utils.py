"""Datasets that repeat or chain other datasets."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset


@lru_cache(maxsize=64)
def cycle_permutation(size: int, seed: int | str, cycle: int) -> Sequence[int]:
    """Returns the order of pass ``cycle`` over ``size`` items, which only the arguments decide."""
    # The seed may be any text, so its bytes are the entropy.
    rng = np.random.default_rng([*str(seed).encode(), 256, cycle])
    return tuple(rng.permutation(size).tolist())


def epoch_batch_index(index: int, num_batches: int, shuffle_seed: int | None = None) -> int:
    """Returns the batch of step ``index``, counted over epochs of ``num_batches`` batches.

    Epochs have the batches in order, or with ``shuffle_seed`` each in another order.
    """
    epoch, within = divmod(index, num_batches)
    if shuffle_seed is None:
        return within
    return cycle_permutation(num_batches, shuffle_seed, epoch)[within]


class EpochCycledRLDataset(RLDataset):
    """Several passes over a dataset; any batch can be requested at any time.

    ``shuffle_seed`` gives each pass another order of batches, and of problems if the dataset
    supports it (``set_epoch``). Without one every pass is the same.
    """

    def __init__(self, inner: RLDataset, num_epochs: int, shuffle_seed: int | None = None) -> None:
        self.inner, self.num_epochs, self.shuffle_seed = inner, num_epochs, shuffle_seed
        self._epoch: int | None = None
        self._lock = threading.Lock()

    def data_sources(self) -> dict[str, Any]:
        """Returns the repeated dataset."""
        return {"": self.inner}

    def __len__(self) -> int:
        return len(self.inner) * self.num_epochs

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Returns batch ``index``, counted over all passes."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        epoch, within = divmod(index, len(self.inner))
        # Without a seed every pass is the same, so the inner dataset has no state to change.
        if self.shuffle_seed is None:
            return self.inner.get_batch(within)
        with self._lock:  # the epoch is a state of the inner dataset
            if epoch != self._epoch:
                # The order depends only on the epoch, not on earlier requests.
                rng = np.random.default_rng([self.shuffle_seed, epoch])
                self.inner.set_epoch(int(rng.integers(2**31)))
                self._epoch = epoch
            batch = epoch_batch_index(index, len(self.inner), self.shuffle_seed)
            return self.inner.get_batch(batch)


class ChainedRLDataset(RLDataset):
    """Batches of several datasets, one dataset after the other."""

    def __init__(self, datasets: Sequence[RLDataset]) -> None:
        self._datasets = datasets

    def __len__(self) -> int:
        return sum(map(len, self._datasets))

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Returns batch ``index``, counted over all datasets."""
        for dataset in self._datasets:
            if index < len(dataset):
                return dataset.get_batch(index)
            index -= len(dataset)
        raise IndexError(f"batch {index} beyond the {len(self)} of the test set")
