"""Several chat datasets as one, drawn from by weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import chz
import numpy as np
import numpy.typing as npt

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.renderers import Message, normalize_messages
from tinker_cookbook.supervised.chat_dataset import chat_dataset
from tinker_cookbook.supervised.conversation_file import prompts_of
from tinker_cookbook.supervised.data import Rows
from tinker_cookbook.supervised.hf_datasets import load_hf_dataset
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset

StoppingStrategy = Literal["all_exhausted", "first_exhausted", "all_exhausted_without_replacement"]
"""When an epoch ends: when every source was used up (small ones repeat), when the first was, or
when every row was used exactly once (a source that is used up is drawn no more)."""


@chz.chz
class HFDatasetSource:
    """One source of a mixture."""

    path: str = chz.field(doc="Hub name, or local folder or file (json, jsonl, parquet)")
    name: str | None = chz.field(default=None, doc="Named configuration of the Hub dataset")
    split: str = chz.field(default="train", doc="Split to read")
    weight: float = chz.field(default=1.0, doc="How often it is drawn from, relative to others")
    message_field: str = chz.field(default="messages", doc="Field with the conversation")


def interleave(
    sizes: Sequence[int], weights: Sequence[float], strategy: StoppingStrategy, seed: int
) -> npt.NDArray[np.int64]:
    """Draws (source, row number) pairs [N, 2] from sources of the given sizes.

    Each draw takes source k with probability ``weights[k] / sum(weights)`` and its next row, modulo
    its size. Rows are in their own order: shuffle them before, or the pairs after.
    """
    sizes_K = np.asarray(sizes)
    probabilities_K = np.asarray(weights, dtype=np.float64) / math.fsum(weights)
    rng = np.random.default_rng(seed)
    chosen_N = np.empty(0, dtype=np.int64)
    finished = np.any if strategy == "first_exhausted" else np.all
    while not finished(np.bincount(chosen_N, minlength=len(sizes)) >= sizes_K):
        more = max(64, int(sizes_K.sum()))
        chosen_N = np.append(chosen_N, rng.choice(len(sizes), size=more, p=probabilities_K))
    row_N = np.empty(len(chosen_N), dtype=np.int64)
    last_K = np.empty(len(sizes), dtype=np.int64)  # the draw that uses up each source
    for k, size in enumerate(sizes):
        draws = np.flatnonzero(chosen_N == k)
        row_N[draws] = np.arange(len(draws))
        last_K[k] = draws[size - 1] if len(draws) >= size else len(chosen_N)
    if strategy == "all_exhausted_without_replacement":
        kept = row_N < sizes_K[chosen_N]
        return np.stack([chosen_N[kept], row_N[kept]], axis=1)
    end = int(last_K.min() if strategy == "first_exhausted" else last_K.max()) + 1
    return np.stack([chosen_N, row_N % sizes_K[chosen_N]], axis=1)[:end]


class _Mixture:
    """Conversations of several sources at given (source, row number) pairs."""

    def __init__(
        self, rows_K: list[Rows], fields_K: list[str], pairs_N: npt.NDArray[np.int64]
    ) -> None:
        self._rows_K, self._fields_K, self._pairs_N = rows_K, fields_K, pairs_N

    def __len__(self) -> int:
        return len(self._pairs_N)

    def __getitem__(self, index: int) -> Any:
        source, number = self._pairs_N[index].tolist()
        row, field = self._rows_K[source][number], self._fields_K[source]
        if field not in row:
            raise DataFormatError(
                f"sources[{source}].message_field: got {field!r}, expected one of the row's "
                f"fields: {', '.join(row)}"
            )
        return row[field]


@chz.chz
class InterleavedChatDatasetBuilder(ChatDatasetBuilder):
    """A mixture of sources. The ``test_size`` held-out conversations are drawn first, by the same
    weights, and never trained on, also where a small source repeats."""

    sources: list[HFDatasetSource] = chz.field(doc="Datasets to mix")
    test_size: int = chz.field(default=0, doc="Conversations to hold out")
    shuffle_seed: int = chz.field(default=0, doc="Seed of the mixture and of the held-out part")
    stopping_strategy: StoppingStrategy = chz.field(
        default="all_exhausted",
        doc="all_exhausted (small sources repeat), first_exhausted, or "
        "all_exhausted_without_replacement",
    )

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Loads and mixes the sources."""
        self.common_config.check()
        batch_size = self.common_config.batch_size
        train, test = self._mixtures
        train_set = chat_dataset(self, train, batch_size)
        if not len(test):
            return train_set, None
        return train_set, chat_dataset(self, test, min(batch_size, len(test)))

    def held_out_prompts(self, n: int) -> list[list[Message]]:
        """The first ``n`` held-out conversations, each up to its last answer."""
        test = self._mixtures[1]
        return prompts_of((normalize_messages(test[i]) for i in range(len(test))), n)

    def _check_sources(self) -> None:
        if not self.sources:
            raise ConfigurationError("sources: got none, expected at least one dataset")
        for k, source in enumerate(self.sources):
            if not (source.weight > 0 and math.isfinite(source.weight)):
                raise ConfigurationError(
                    f"sources[{k}].weight: got {source.weight}, expected a positive number; leave "
                    "out a source that is not wanted"
                )

    @cached_property
    def _mixtures(self) -> tuple[_Mixture, _Mixture]:
        """Training and held-out part."""
        self._check_sources()
        rows_K = [load_hf_dataset(s.path, s.split, s.name) for s in self.sources]
        fields_K = [source.message_field for source in self.sources]
        weights_K = [source.weight for source in self.sources]
        for source, rows in zip(self.sources, rows_K, strict=True):
            if not len(rows):
                raise ConfigurationError(f"sources: {source.path} has no rows; leave it out")
        total = sum(map(len, rows_K))
        if not 0 <= self.test_size < total:
            raise ConfigurationError(
                f"test_size: got {self.test_size}, expected 0 to {total - 1}: the sources have "
                f"{total} conversations"
            )
        rng = np.random.default_rng(self.shuffle_seed)
        order_K = [rng.permutation(len(rows)) for rows in rows_K]
        sizes = [len(rows) for rows in rows_K]
        once = interleave(sizes, weights_K, "all_exhausted_without_replacement", self.shuffle_seed)
        held_out_K = np.bincount(once[: self.test_size, 0], minlength=len(sizes))
        test_pairs = _shuffled(once[: self.test_size], order_K)
        left_K = [int(size - out) for size, out in zip(sizes, held_out_K, strict=True)]
        # A source that is held out as a whole has nothing left to draw from.
        drawn = [k for k, left in enumerate(left_K) if left]
        pairs = interleave(
            [left_K[k] for k in drawn],
            [weights_K[k] for k in drawn],
            self.stopping_strategy,
            self.shuffle_seed + 1,
        )
        pairs[:, 0] = np.asarray(drawn)[pairs[:, 0]]
        pairs[:, 1] += held_out_K[pairs[:, 0]]
        return (
            _Mixture([*rows_K], fields_K, _shuffled(pairs, order_K)),
            _Mixture([*rows_K], fields_K, test_pairs),
        )


def _shuffled(
    pairs_N: npt.NDArray[np.int64], order_K: list[npt.NDArray[np.int64]]
) -> npt.NDArray[np.int64]:
    """The pairs with row numbers looked up in each source's shuffled order."""
    result = pairs_N.copy()
    for k, order in enumerate(order_K):
        of_k = pairs_N[:, 0] == k
        result[of_k, 1] = order[pairs_N[of_k, 1]]
    return result
