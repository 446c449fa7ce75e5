"""Several chat datasets mixed by weight, with ``datasets.interleave_datasets``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import chz
import numpy as np

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.renderers import Message, normalize_messages
from tinker_cookbook.supervised.chat_dataset import chat_dataset
from tinker_cookbook.supervised.conversation_file import prompts_of
from tinker_cookbook.supervised.data import Rows
from tinker_cookbook.supervised.hf_datasets import load_hf_dataset
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset

if TYPE_CHECKING:
    from datasets import Dataset

StoppingStrategy = Literal["all_exhausted", "first_exhausted", "all_exhausted_without_replacement"]
"""When an epoch ends: when every source is exhausted (small ones repeat), when the first one is, or
when every row was used exactly once."""

_MESSAGES = "messages"


@chz.chz
class HFDatasetSource:
    """One source of a mixture."""

    path: str = chz.field(doc="Hub name, or local folder or file (json, jsonl, parquet)")
    name: str | None = chz.field(default=None, doc="Named configuration of the Hub dataset")
    split: str = chz.field(default="train", doc="Split to read")
    weight: float | None = chz.field(
        default=None, doc="Sampling weight relative to the others; None for all: by their sizes"
    )
    message_field: str = chz.field(default=_MESSAGES, doc="Field with the conversation")


class _RowsByNumber:
    """Conversations of several sources, at the source and row numbers that a dataset holds."""

    def __init__(self, rows_K: list[Rows], fields_K: list[str], numbers: Dataset) -> None:
        self._rows_K, self._fields_K, self._numbers = rows_K, fields_K, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        number = self._numbers[index]
        source = number["source"]
        row = self._rows_K[source][number["row"]]
        return {_MESSAGES: row[_check_field(source, self._fields_K[source], list(row))]}


@chz.chz
class InterleavedChatDatasetBuilder(ChatDatasetBuilder):
    """A mixture of sources.

    Each row of the mixture comes from source k with probability ``weight[k] / sum(weights)``, and
    is the next row of that source. Without weights each row of all sources is equally probable.
    ``test_size`` rows are held out before mixing, so that none of them is trained on where a small
    source repeats; every source with a positive weight keeps a row to train on.
    """

    sources: list[HFDatasetSource] = chz.field(doc="Datasets to mix")
    test_size: int = chz.field(default=0, doc="Conversations to hold out")
    shuffle_seed: int = chz.field(default=0, doc="Seed of the mixture and of the held-out part")
    stopping_strategy: StoppingStrategy = chz.field(
        default="all_exhausted",
        doc="all_exhausted (small sources repeat), first_exhausted, or "
        "all_exhausted_without_replacement",
    )

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Loads and mixes the sources; the held-out rows are one batch."""
        self.common_config.check()
        train, test = self._mixtures
        train_set = chat_dataset(self, train, self.common_config.batch_size, _MESSAGES)
        if test is None:
            return train_set, None
        return train_set, chat_dataset(self, test, len(test), _MESSAGES)

    def held_out_prompts(self, n: int) -> list[list[Message]]:
        """The first ``n`` held-out conversations, each up to its last answer."""
        test = self._mixtures[1]
        rows = [] if test is None else (test[i][_MESSAGES] for i in range(len(test)))
        return prompts_of(map(normalize_messages, rows), n)

    @cached_property
    def _mixtures(self) -> tuple[Rows, Rows | None]:
        """Training and held-out part."""
        import datasets

        weights_K = self._given_weights()
        rows_K = [load_hf_dataset(s.path, s.split, s.name) for s in self.sources]
        fields_K = [source.message_field for source in self.sources]
        tables_K = [rows for rows in rows_K if isinstance(rows, datasets.Dataset)]
        by_number = len(tables_K) < len(rows_K)
        if by_number:
            # Rows of JSON files need not have the same columns, so that Arrow cannot hold them:
            # their numbers are mixed in their place.
            sources_K = [_numbers_of(k, len(rows)) for k, rows in enumerate(rows_K)]
        else:
            sources_K = [
                _messages_of(k, table, field)
                for k, (table, field) in enumerate(zip(tables_K, fields_K, strict=True))
            ]
        test = None
        if self.test_size > 0:
            sources_K, weights_K, test = hold_out(
                sources_K, weights_K, self.test_size, self.shuffle_seed
            )
        train = self._interleaved(sources_K, weights_K)
        if not by_number:
            return train, test
        looked_up = _RowsByNumber(rows_K, fields_K, train)
        return looked_up, None if test is None else _RowsByNumber(rows_K, fields_K, test)

    def _interleaved(self, sources_K: list[Dataset], weights_K: list[float] | None) -> Dataset:
        import datasets

        effective_K = _effective_weights(sources_K, weights_K)
        total = math.fsum(effective_K)
        if not total > 0:
            raise ConfigurationError(
                "sources: the total weight must be positive; got "
                f"{', '.join(map(str, effective_K))}. Give a source with rows a positive weight"
            )
        return datasets.interleave_datasets(
            sources_K,
            probabilities=[weight / total for weight in effective_K],
            seed=self.shuffle_seed,
            stopping_strategy=self.stopping_strategy,
        )

    def _given_weights(self) -> list[float] | None:
        """The weights of all sources, or None where they are mixed by size."""
        if not self.sources:
            raise ConfigurationError(
                "sources: got none. At least one dataset source must be provided"
            )
        given = [source.weight for source in self.sources if source.weight is not None]
        if not given:
            return None
        if len(given) < len(self.sources):
            raise ConfigurationError(
                "sources: got a weight for some of them. Either all sources must have explicit "
                "weights or none of them"
            )
        for k, weight in enumerate(given):
            if not (weight >= 0 and math.isfinite(weight)):
                raise ConfigurationError(
                    f"sources[{k}].weight: got {weight}, expected a finite and non-negative number"
                )
        return given


def hold_out(
    sources_K: Sequence[Dataset], weights_K: list[float] | None, test_size: int, seed: int
) -> tuple[list[Dataset], list[float] | None, Dataset]:
    """Takes ``test_size`` rows out of the sources, without replacement.

    A row comes from source k with a probability proportional to ``weights_K[k]``, or, without
    weights, to the rows that source k still has. A source from which only one row is left gives no
    more, so that training sees each source. Sources of weight 0 are in neither part.

    Returns:
        The sources without these rows (shuffled), their weights, and the rows held out.
    """
    import datasets

    effective_K = _effective_weights(sources_K, weights_K)
    if not math.fsum(effective_K) > 0:
        raise ConfigurationError("sources: the total weight must be finite and positive; got 0")
    sizes_K = np.array([len(source) for source in sources_K])
    for k, (size, weight) in enumerate(zip(sizes_K, effective_K, strict=True)):
        if weight > 0 and size == 0:
            raise ConfigurationError(
                f"sources[{k}]: got an empty positively weighted source; leave it out"
            )
    capacity_K = np.where(np.array(effective_K) > 0, sizes_K - 1, 0)
    most = int(capacity_K.sum())
    if test_size > most:
        raise ConfigurationError(
            f"test_size: got {test_size}, expected at most {most}, the maximum unique holdout size "
            f"({most}); test_size beyond it is impossible while retaining one training row of each "
            "source"
        )
    rng = np.random.default_rng(seed)
    left_K = sizes_K.copy()
    for _ in range(test_size):
        share_K = np.where(capacity_K > 0, left_K if weights_K is None else weights_K, 0.0)
        chosen = rng.choice(len(sources_K), p=share_K / share_K.sum())
        capacity_K[chosen] -= 1
        left_K[chosen] -= 1
    kept, test = [], []
    for source, left, size, weight in zip(sources_K, left_K, sizes_K, effective_K, strict=True):
        if weight > 0:
            shuffled = source.shuffle(seed=int(rng.integers(2**32)))
            test.append(shuffled.take(int(size - left)))
            kept.append(shuffled.skip(int(size - left)))
    remaining = None if weights_K is None else [weight for weight in weights_K if weight > 0]
    held_out = datasets.concatenate_datasets([part for part in test if len(part)])
    return kept, remaining, held_out.shuffle(seed=seed)


def _effective_weights(
    sources_K: Sequence[Dataset], weights_K: Sequence[float] | None
) -> list[float]:
    if weights_K is None:
        return [float(len(source)) for source in sources_K]
    return list(weights_K)


def _numbers_of(source: int, size: int) -> Dataset:
    """Stands for the rows of a source: their numbers."""
    import datasets

    return datasets.Dataset.from_dict({"source": [source] * size, "row": list(range(size))})


def _messages_of(source: int, table: Dataset, field: str) -> Dataset:
    """The conversations of a source as the one column of a dataset."""
    _check_field(source, field, table.column_names)
    table = table.select_columns([field])
    return table if field == _MESSAGES else table.rename_column(field, _MESSAGES)


def _check_field(source: int, field: str, fields: list[str]) -> str:
    if field not in fields:
        raise DataFormatError(
            f"sources[{source}].message_field: got {field!r}, expected one of the row's fields: "
            f"{', '.join(fields)}"
        )
    return field
