"""Datasets of rows: converts rows to datums, in seeded batches."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataError,
    DataValidationError,
    TinkerCookbookError,
)
from tinker_cookbook.renderers import Message, Renderer, TrainOnWhat
from tinker_cookbook.supervised.arrow_rows import stream_without_nulls, without_arrow_nulls
from tinker_cookbook.supervised.common import (
    Reduction,
    check_images_fit,
    count_loss_tokens,
    data_from_examples,
    datum_from_model_input_weights,
)
from tinker_cookbook.supervised.types import EmptyBatchError, SupervisedDataset
from tinker_cookbook.utils.error_logs import where_raised
from tinker_cookbook.utils.imports import tinker

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

_STREAM_RECORDED = 64

Conversation: TypeAlias = Sequence[Message] | Sequence[Mapping[str, Any]]
MapFn: TypeAlias = "Callable[[Any], tinker.Datum]"
FlatmapFn: TypeAlias = "Callable[[Any], list[tinker.Datum]]"


class Rows(Protocol):
    """Rows with indices, such as a ``datasets.Dataset`` or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class PlacedRows:
    """Rows with their places (``FILE:LINE``, or ``FILE[N]`` with N from 0), for messages."""

    rows: Sequence[Any]
    places: Sequence[str]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> Any:
        return self.rows[index]

    @classmethod
    def joined(cls, parts: Sequence[PlacedRows]) -> PlacedRows:
        """Returns the rows of all parts."""
        rows = [row for part in parts for row in part.rows]
        return cls(rows, [place for part in parts for place in part.places])

    def data_sources(self) -> dict[str, Any]:
        """Returns the rows, so that a run's record has all of them."""
        return {"": self.rows}

    def place(self, index: int) -> str:
        """Returns the place of a row."""
        return self.places[index]

    def take(self, mask: npt.NDArray[np.bool_]) -> PlacedRows:
        """Returns the rows of this mask."""
        chosen = np.flatnonzero(mask).tolist()
        return PlacedRows([self.rows[i] for i in chosen], [self.places[i] for i in chosen])


def place_of(rows: Rows, index: int) -> str:
    """Returns the place of a row in its source, or its number (from 0)."""
    place = getattr(rows, "place", None)
    return f"row {index}" if place is None else place(index)


def conversation_to_datum(
    conversation: Conversation,
    renderer: Renderer,
    max_length: int | None,
    train_on_what: TrainOnWhat = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    reduction: Reduction = "mean",
) -> tinker.Datum:
    """Returns the whole conversation as one datum; ``conversation_to_data`` may split it.

    Raises DataValidationError where ``max_length`` would cut an image.
    """
    model_input, weights = renderer.build_supervised_example(conversation, train_on_what)
    check_images_fit(model_input, max_length)
    return datum_from_model_input_weights(model_input, weights, max_length, reduction)


def conversation_to_data(
    conversation: Conversation,
    renderer: Renderer,
    max_length: int | None,
    train_on_what: TrainOnWhat = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    reduction: Reduction = "mean",
) -> list[tinker.Datum]:
    """Returns one datum for each distinct prompt of the conversation.

    A renderer that changes the history (for example, strips earlier thinking)
    needs several datums, so that every answer is trained after its inference prompt; others need
    one. ``reduction="mean"`` gives the conversation a weight of 1, not each datum. ``max_length``
    truncates each datum, possibly leaving no token to train on; raises DataValidationError where it
    would cut an image.
    """
    examples = renderer.build_merged_examples(conversation, train_on_what)
    for model_input, _ in examples:
        check_images_fit(model_input, max_length)
    return data_from_examples(examples, max_length, reduction)


def trained_batch(dataset: SupervisedDataset, index: int) -> list[tinker.Datum]:
    """Returns the batch at ``index``; empty (to be skipped) if no datum has a trained token."""
    try:
        data = dataset.get_batch(index)
    except EmptyBatchError:
        return []
    # Datums of other losses have no weights: all their targets are trained.
    trained = ("weights" not in d.loss_fn_inputs or count_loss_tokens(d) for d in data)
    return data if any(trained) else []


class _RowDataset(SupervisedDataset):
    """Batches of ``num_rows`` rows; converts rows to datums and counts dropped ones."""

    def __init__(
        self, num_rows: int, batch_size: int, map_fn: MapFn | None, flatmap_fn: FlatmapFn | None
    ) -> None:
        # Check this first: for an empty dataset, every batch_size would be reported as too large.
        if num_rows < 1:
            raise DataValidationError(
                "the dataset is empty: got 0 rows, expected at least one; check the file and the "
                "split"
            )
        if batch_size < 1:
            raise ConfigurationError(f"batch_size: got {batch_size}, expected at least 1")
        if batch_size > num_rows:
            raise ConfigurationError(
                f"batch_size: got {batch_size}, expected at most {num_rows}, the number of rows in "
                f"the dataset; set batch_size={num_rows} or less, or add data"
            )
        if (map_fn is None) == (flatmap_fn is None):
            got = "neither" if map_fn is None else "both"
            raise ConfigurationError(
                f"map_fn, flatmap_fn: got {got}, expected one of them: map_fn returns one "
                "datum per row, flatmap_fn any number"
            )
        self._num_rows, self._batch_size = num_rows, batch_size
        self._map_fn, self._flatmap_fn = map_fn, flatmap_fn
        # By epoch and row, so that repeated requests of a batch are not counted again.
        self._dropped: dict[tuple[int, int], int] = {}

    @property
    def num_dropped(self) -> int:
        """Number of datums dropped so far because they have no trained token."""
        return sum(self._dropped.values())

    def __len__(self) -> int:
        return math.ceil(self._num_rows / self._batch_size)

    def _check_index(self, index: int) -> None:
        if not 0 <= index < len(self):
            raise IndexError(f"batch index: got {index}, expected 0 to {len(self) - 1}")

    def _where(self, number: int) -> str:
        return f"row {number} of the dataset"

    def _to_batch(self, index: int, rows: dict[int, Any], epoch: int = 0) -> list[tinker.Datum]:
        """Returns the trained datums of numbered rows, or all datums if none is trained."""
        kept: list[tinker.Datum] = []
        untrained: list[tinker.Datum] = []
        for number, row in rows.items():
            try:
                if self._flatmap_fn is not None:
                    data = self._flatmap_fn(row)
                else:
                    data = [self._map_fn(row)] if self._map_fn is not None else []
            except ConfigurationError:  # of a setting, so the row is not the reason
                raise
            except TinkerCookbookError as error:
                raise DataError(f"{self._where(number)}: {error}") from error
            except Exception as error:  # of the user's function
                problem = f"{type(error).__name__}: {error}{where_raised(error)}"
                raise DataError(f"{self._where(number)}: {problem}") from error
            # A datum without a trained token has no gradient, but would count in the mean.
            trained = [datum for datum in data if count_loss_tokens(datum)]
            kept += trained
            untrained += data
            if len(trained) == len(data):
                continue
            # Log only the first dropped rows; further ones are only counted.
            if not self._dropped:
                logger.warning(
                    "%s (%d tokens after max_length) has an example without a token to train "
                    "on; it is dropped. Either max_length truncates before the answer, or "
                    "train_on_what selects none of its messages. Further ones are only counted "
                    "(num_dropped).",
                    self._where(number),
                    max(datum.model_input.length for datum in data) + 1,
                )
            self._dropped[epoch, number] = len(data) - len(trained)
        if not untrained:
            raise EmptyBatchError(
                f"batch {index}: got {len(rows)} rows without a datum, expected at least one "
                "datum; raise max_length or batch_size, or remove these rows"
            )
        # Loops recognise a batch without a trained token by its weights, and skip it.
        return kept or untrained


class SupervisedDatasetFromHFDataset(_RowDataset):
    """Batches of rows, in the rows' order until ``set_epoch`` shuffles them.

    Give ``map_fn`` (row to datum) or ``flatmap_fn`` (row to datums). ``batch_size`` counts rows;
    the last, smaller batch is kept. A datum without a trained token (for example after truncation
    to ``max_length``) is dropped and counted in ``num_dropped``, once for all epochs. A batch in
    which no datum has a trained token keeps all of them; loops skip it (``trained_batch``).
    """

    def __init__(
        self,
        hf_dataset: Rows,
        batch_size: int,
        map_fn: MapFn | None = None,
        flatmap_fn: FlatmapFn | None = None,
    ) -> None:
        super().__init__(len(hf_dataset), batch_size, map_fn, flatmap_fn)
        self.hf_dataset = hf_dataset
        # Rows of tables have invented nulls, which would be rendered in tools and calls.
        self._rows = without_arrow_nulls(hf_dataset)
        self._order = np.arange(len(hf_dataset))

    def set_epoch(self, seed: int = 0) -> None:
        """Shuffles the rows; the order depends only on ``seed``."""
        self._order = np.random.default_rng(seed).permutation(self._num_rows)

    def data_sources(self) -> dict[str, Any]:
        """Returns the rows."""
        return {"": self.hf_dataset}

    def _where(self, number: int) -> str:
        place = place_of(self.hf_dataset, number)
        return f"{place} of the dataset" if place.startswith("row ") else place

    def get_batch(self, index: int) -> list[tinker.Datum]:
        """Returns the trained datums of the batch, or all datums if none is trained."""
        self._check_index(index)
        numbers = self._order[index * self._batch_size : (index + 1) * self._batch_size].tolist()
        return self._to_batch(index, {number: self._rows[number] for number in numbers})


class StreamingSupervisedDatasetFromHFDataset(_RowDataset):
    """Batches of a stream that can only be read forwards.

    ``length`` is the number of rows of an epoch. The stream is shuffled within a window of
    ``buffer_size`` rows by the epoch's seed (0 until ``set_epoch``). To resume in the middle,
    request that batch: the rows before it are read and skipped, not rendered.
    """

    def __init__(
        self,
        hf_dataset: datasets.IterableDataset,
        batch_size: int,
        length: int,
        map_fn: MapFn | None = None,
        flatmap_fn: FlatmapFn | None = None,
        buffer_size: int = 10_000,
    ) -> None:
        if not callable(getattr(hf_dataset, "shuffle", None)):
            raise ConfigurationError(
                f"hf_dataset: got {type(hf_dataset).__name__}, expected a datasets.IterableDataset "
                "(load_dataset(…, streaming=True)); rows in memory go into "
                "SupervisedDatasetFromHFDataset"
            )
        super().__init__(length, batch_size, map_fn, flatmap_fn)
        self._stream, self._buffer_size = stream_without_nulls(hf_dataset), buffer_size
        self.set_epoch(0)

    def set_epoch(self, seed: int = 0) -> None:
        """Restarts the stream, shuffled by ``seed``."""
        shuffled = self._stream.shuffle(seed=seed, buffer_size=self._buffer_size)
        self._iterator: Iterator[Any] = iter(shuffled)
        self._rows_read = 0
        self._seed = seed
        self._last: tuple[int, list[tinker.Datum]] | None = None

    def data_sources(self) -> dict[str, Any]:
        """Returns the first rows of the stream, since it is not read as a whole before training."""
        return {"first rows": list(self._stream.take(_STREAM_RECORDED))}

    def get_batch(self, index: int) -> list[tinker.Datum]:
        """Returns the batch at ``index``, which must not be before the last returned one."""
        self._check_index(index)
        # The stream cannot go back, so the last batch is cached.
        if self._last is not None and self._last[0] == index:
            return self._last[1]
        start = index * self._batch_size
        if start < self._rows_read:
            raise ConfigurationError(
                f"batch index: got {index}, but the stream has passed it and can only be read "
                "forwards; call set_epoch to restart it"
            )
        rows: dict[int, Any] = {}
        # The last batch may be smaller than the others.
        for number in range(self._rows_read, min(start + self._batch_size, self._num_rows)):
            try:
                row = next(self._iterator)
            except StopIteration:
                raise DataValidationError(
                    f"length: got {self._num_rows}, but the stream ended after {number} rows; set "
                    f"length={number}"
                ) from None
            self._rows_read += 1
            # Skip the rows before the batch.
            if number >= start:
                rows[number] = row
        self._last = (index, self._to_batch(index, rows, self._seed))
        return self._last[1]
