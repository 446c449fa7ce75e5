"""Mixtures of chat datasets by weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import chz
import numpy as np

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.renderers import Message
from tinker_cookbook.supervised.arrow_rows import without_arrow_nulls
from tinker_cookbook.supervised.conversation_file import ChatDataset, prompts_of, wanted_rows
from tinker_cookbook.supervised.hf_datasets import load_hf_dataset
from tinker_cookbook.supervised.layouts import is_used
from tinker_cookbook.supervised.row_datasets import Rows
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset

if TYPE_CHECKING:
    from datasets import Dataset

_MESSAGES = "messages"
StoppingStrategy = Literal["all_exhausted", "first_exhausted", "all_exhausted_without_replacement"]
"""When an epoch ends: when every source is exhausted (small ones repeat), when the first one is, or
when every row was used exactly once."""


@chz.chz
class HFDatasetSource:
    """Source dataset of a mixture."""

    path: str = chz.field(doc="Hub name, or local folder or file (json, jsonl, parquet)")
    name: str | None = chz.field(default=None, doc="Named configuration of the Hub dataset")
    split: str = chz.field(default="train", doc="Split to read")
    weight: float | None = chz.field(
        default=None, doc="Sampling weight relative to the others; None for all: by their sizes"
    )
    message_field: str = chz.field(default=_MESSAGES, doc="Field with the conversation")


class _MixedRows:
    """Rows of several sources with different columns, in the order of (source, row) numbers.

    Arrow cannot represent such rows, so their numbers are mixed instead.
    """

    def __init__(
        self, sources: list[HFDatasetSource], rows_K: list[Rows], numbers: Dataset
    ) -> None:
        self._sources, self._rows_K, self._numbers = sources, rows_K, numbers
        # The columns of tables have their final names, those of other rows do not.
        self._fields_K = [
            source.message_field if isinstance(rows, list) else _MESSAGES
            for source, rows in zip(sources, rows_K, strict=True)
        ]

    def data_sources(self) -> dict[str, Any]:
        """Returns the rows of each source."""
        return {f"sources[{k}]": rows for k, rows in enumerate(self._rows_K)}

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        number = self._numbers[index]
        source = number["source"]
        row, field = self._rows_K[source][number["row"]], self._fields_K[source]
        if field not in row:
            raise _no_field(source, field, row)
        return {**{k: v for k, v in row.items() if k != field}, _MESSAGES: row[field]}

    def place(self, index: int) -> str:
        """Returns the source and its row number, for messages."""
        number = self._numbers[index]
        return f"{self._sources[number['source']].path}[{number['row']}]"


def _no_field(source: int, field: str, names: Iterable[str]) -> DataFormatError:
    return DataFormatError(
        f"sources[{source}].message_field: got {field!r}, expected one of the row's fields: "
        f"{', '.join(names)}"
    )


@chz.chz
class InterleavedChatDatasetBuilder(ChatDatasetBuilder):
    """A mixture of sources.

    Each row of the mixture comes from source k with probability ``weight[k] / sum(weights)``, and
    is the next row of that source. Without weights, all rows of all sources are equally probable.
    ``test_size`` rows are held out before mixing, so that none of them is trained on if a small
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
        """Returns the mixture and the test set; the held-out rows are one batch."""
        self.common_config.check()
        train, test = self._mixtures
        train_set = ChatDataset(self, train, self.common_config.batch_size, _MESSAGES)
        test_set = None if test is None else ChatDataset(self, test, len(test), _MESSAGES)
        return train_set, test_set

    def held_out_prompts(self, n: int) -> list[list[Message]]:
        """Returns the prompts of the first ``n`` held-out conversations."""
        test = self._mixtures[1]
        if test is None:
            return []
        # ``messages`` declares the tools, which belong to the prompt.
        data = ChatDataset(self, test, len(test), _MESSAGES)
        return prompts_of((data.messages(test[i]) for i in range(len(test))), n)

    @cached_property
    def _mixtures(self) -> tuple[Rows, Rows | None]:
        """Training rows and held-out rows."""
        import datasets

        # Check the weights before any source is loaded.
        weights_K = self._given_weights()
        rows_K = [self._load(k) for k in range(len(self.sources))]
        # Mix numbers instead of rows, because rows may have different columns (see _MixedRows).
        numbers_K = []
        for k, rows in enumerate(rows_K):
            wanted = wanted_rows(rows, self.sources[k].path)
            numbers = {"source": np.full(len(wanted), k), "row": wanted}
            numbers_K.append(datasets.Dataset.from_dict(numbers))
        effective_K = _weights_or_sizes(numbers_K, weights_K)
        if not any(effective_K):
            raise ConfigurationError(
                "sources: the total weight must be positive; got "
                f"{', '.join(map(str, effective_K))}. Give a source with rows a positive weight"
            )
        test = None
        # Hold out before mixing, because a row of a small source may occur twice in the mixture.
        if self.test_size > 0:
            numbers_K, weights_K, held_out = hold_out(
                numbers_K, weights_K, self.test_size, self.shuffle_seed
            )
            test = self._rows(rows_K, held_out)
            # Sources with weight 0 are removed, and the others are smaller now.
            effective_K = _weights_or_sizes(numbers_K, weights_K)
        train = datasets.interleave_datasets(
            numbers_K,
            probabilities=[weight / math.fsum(effective_K) for weight in effective_K],
            seed=self.shuffle_seed,
            stopping_strategy=self.stopping_strategy,
        )
        return self._rows(rows_K, train), test

    def _load(self, k: int) -> Rows:
        """Returns the rows of a source; a table has only the columns that affect training, with
        the conversation in ``messages``."""
        import datasets

        source = self.sources[k]
        rows = load_hf_dataset(source.path, source.split, source.name)
        if not isinstance(rows, datasets.Dataset):
            return rows
        field, names = source.message_field, rows.column_names
        if field not in names:
            raise _no_field(k, field, names)
        rows = rows.select_columns([n for n in names if n == field or is_used(n, _MESSAGES)])
        if field == _MESSAGES:
            return rows
        # The format of the table names its columns.
        others = rows.remove_columns(_MESSAGES) if _MESSAGES in rows.column_names else rows
        return without_arrow_nulls(others.with_format(None).rename_column(field, _MESSAGES))

    def _rows(self, rows_K: list[Rows], numbers: Dataset) -> Rows:
        """Returns the rows with these numbers: a table, if all sources have the same columns."""
        import datasets

        tables = [rows for rows in rows_K if isinstance(rows, datasets.Dataset)]
        if len(tables) < len(rows_K) or any(t.features != tables[0].features for t in tables):
            return _MixedRows(self.sources, rows_K, numbers)
        begins_K = np.cumsum([0, *map(len, tables)])
        order = begins_K[np.array(numbers["source"])] + np.array(numbers["row"])
        return datasets.concatenate_datasets(tables).select(order)

    def _given_weights(self) -> list[float] | None:
        """Returns the weights of all sources; None if they are mixed by size."""
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
    """Holds out ``test_size`` rows of the sources, without replacement.

    A row comes from source k with a probability proportional to ``weights_K[k]``, or, without
    weights, to the rows that source k still has. A source keeps at least one row, so that training
    sees each source. Sources with weight 0 are in neither part. Returns the sources without these
    rows (shuffled), their weights, and the held-out rows.
    """
    import datasets

    effective_K = _weights_or_sizes(sources_K, weights_K)
    sizes_K = np.array([len(source) for source in sources_K])
    for k, (size, weight) in enumerate(zip(sizes_K, effective_K, strict=True)):
        if weight > 0 and size == 0:
            raise ConfigurationError(
                f"sources[{k}]: got an empty positively weighted source; leave it out"
            )
    # Every source with a positive weight keeps a row to train on.
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
        # Sources without spare rows have probability 0.
        share_K = np.where(capacity_K > 0, left_K if weights_K is None else weights_K, 0.0)
        chosen = rng.choice(len(sources_K), p=share_K / share_K.sum())
        capacity_K[chosen] -= 1
        left_K[chosen] -= 1
    kept, test = [], []
    for source, left, size, weight in zip(sources_K, left_K, sizes_K, effective_K, strict=True):
        if weight > 0:
            # Shuffle each source, so that its first rows are a random choice.
            shuffled = source.shuffle(seed=int(rng.integers(2**32)))
            test.append(shuffled.take(int(size - left)))
            kept.append(shuffled.skip(int(size - left)))
    remaining = None if weights_K is None else [weight for weight in weights_K if weight > 0]
    held_out = datasets.concatenate_datasets([part for part in test if len(part)])
    # The parts are concatenated source by source, so shuffle the rows again.
    return kept, remaining, held_out.shuffle(seed=seed)


def _weights_or_sizes(
    sources_K: Sequence[Dataset], weights_K: Sequence[float] | None
) -> list[float]:
    return [float(len(s)) for s in sources_K] if weights_K is None else list(weights_K)
