"""Datasets made of another one or several: passes over it, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset


@lru_cache(maxsize=64)
def _permutation(size: int, seed: str, cycle: int) -> tuple[int, ...]:
    # The seed may be any text, so its bytes are the entropy.
    rng = np.random.default_rng([*seed.encode(), 256, cycle])
    return tuple(rng.permutation(size).tolist())


def cycle_permutation(size: int, seed: int | str, cycle: int) -> Sequence[int]:
    """Returns the order of pass ``cycle`` over ``size`` items.

    It depends on the arguments alone, so that a resumed run can ask for any pass at once.
    """
    return _permutation(size, str(seed), cycle)


def epoch_batch_index(index: int, num_batches: int, shuffle_seed: int | None = None) -> int:
    """Returns which of ``num_batches`` batches step ``index``, counted over all epochs, takes.

    In their order; with ``shuffle_seed`` each epoch in an order of its own.
    """
    epoch, within = divmod(index, num_batches)
    if shuffle_seed is None:
        return within
    return cycle_permutation(num_batches, shuffle_seed, epoch)[within]


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
        self.inner = inner
        self.num_epochs = num_epochs
        self.shuffle_seed = shuffle_seed
        self._epoch: int | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.inner) * self.num_epochs

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Batch ``index``, counted over all passes."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        epoch, within = divmod(index, len(self.inner))
        if self.shuffle_seed is None:
            return self.inner.get_batch(within)
        with self._lock:  # the epoch is a state of the inner dataset
            if epoch != self._epoch:
                # A fixed number per epoch: reordering must not depend on how one got here.
                rng = np.random.default_rng([self.shuffle_seed, epoch])
                self.inner.set_epoch(int(rng.integers(2**31)))
                self._epoch = epoch
            batch = epoch_batch_index(index, len(self.inner), self.shuffle_seed)
            return self.inner.get_batch(batch)


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
