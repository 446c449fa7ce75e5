"""Datasets of rows: each row becomes datums, in seeded batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataError,
    DataValidationError,
    TinkerCookbookError,
)
from tinker_cookbook.renderers import Message, Renderer, TrainOnWhat
from tinker_cookbook.supervised.common import (
    Reduction,
    count_loss_tokens,
    data_from_examples,
    datum_from_model_input_weights,
)
from tinker_cookbook.supervised.types import EmptyBatchError, SupervisedDataset

if TYPE_CHECKING:
    import datasets
    import tinker

logger = logging.getLogger(__name__)

Conversation: TypeAlias = Sequence[Message] | Sequence[Mapping[str, Any]]
MapFn: TypeAlias = "Callable[[Any], tinker.Datum]"
FlatmapFn: TypeAlias = "Callable[[Any], list[tinker.Datum]]"


class Rows(Protocol):
    """Rows with indices, such as a ``datasets.Dataset`` or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def conversation_to_datum(
    conversation: Conversation,
    renderer: Renderer,
    max_length: int | None,
    train_on_what: TrainOnWhat = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    reduction: Reduction = "mean",
) -> tinker.Datum:
    """Returns the whole conversation as one datum.

    ``conversation_to_data`` explains when a conversation needs several.
    """
    model_input, weights = renderer.build_supervised_example(conversation, train_on_what)
    return datum_from_model_input_weights(model_input, weights, max_length, reduction)


def conversation_to_data(
    conversation: Conversation,
    renderer: Renderer,
    max_length: int | None,
    train_on_what: TrainOnWhat = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    reduction: Reduction = "mean",
) -> list[tinker.Datum]:
    """Returns one datum for each distinct prompt of the conversation.

    A renderer whose history differs from what was sampled (it strips earlier thinking, say) needs
    several, so that every answer is trained behind the prompt that inference would give it; others
    need one. ``reduction="mean"`` weighs the conversation, not each of its datums, with 1.
    ``max_length`` cuts each of them: one may be left without a token to train on.
    """
    examples = renderer.build_merged_examples(conversation, train_on_what)
    return data_from_examples(examples, max_length, reduction)


def trained_batch(dataset: SupervisedDataset, index: int) -> list[tinker.Datum]:
    """Returns the batch at ``index``; empty if none of its datums has a trained token.

    Loops and evaluators take batches by this function, so that they pass over such a batch.
    """
    try:
        data = dataset.get_batch(index)
    except EmptyBatchError:
        return []
    # Datums of other losses have no weights: all of their targets are trained.
    trained = ("weights" not in d.loss_fn_inputs or count_loss_tokens(d) for d in data)
    return data if any(trained) else []


class SupervisedDatasetFromHFDataset(SupervisedDataset):
    """Batches of rows, in the rows' order until ``set_epoch`` shuffles them.

    Give ``map_fn`` (row to datum) or ``flatmap_fn`` (row to datums). ``batch_size`` counts rows;
    the last, smaller batch is kept. A datum without a single trained token (all cut off by
    ``max_length``, say) has no gradient and would only dilute the batch: it is dropped and counted
    in ``num_dropped``, once for all epochs. A batch in which no datum has a trained token keeps all
    of them; loops skip it (``trained_batch``).
    """

    def __init__(
        self,
        hf_dataset: Rows,
        batch_size: int,
        map_fn: MapFn | None = None,
        flatmap_fn: FlatmapFn | None = None,
    ) -> None:
        _check_batch_size(batch_size, len(hf_dataset))
        self._rows = hf_dataset
        self._batch_size = batch_size
        self._mapper = _Mapper(map_fn, flatmap_fn)
        self._order = np.arange(len(hf_dataset))

    @property
    def hf_dataset(self) -> Rows:
        """The rows in their original order."""
        return self._rows

    @property
    def num_dropped(self) -> int:
        """Number of datums dropped so far because no token of them is trained."""
        return self._mapper.num_dropped

    def set_epoch(self, seed: int = 0) -> None:
        """Shuffles the rows by ``seed`` alone."""
        self._order = np.random.default_rng(seed).permutation(len(self._rows))

    def get_batch(self, index: int) -> list[tinker.Datum]:
        """Returns the trained datums of the batch, or all of them if none is trained.

        Raises EmptyBatchError if the rows have no datum at all.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"batch index: got {index}, expected 0 to {len(self) - 1}")
        numbers = self._order[index * self._batch_size : (index + 1) * self._batch_size].tolist()
        return self._mapper.batch(index, [(number, self._rows[number]) for number in numbers])

    def __len__(self) -> int:
        return -(-len(self._rows) // self._batch_size)


class StreamingSupervisedDatasetFromHFDataset(SupervisedDataset):
    """Batches of a stream, which is read forwards only.

    ``length`` is the number of rows that an epoch takes. The stream is shuffled within a window of
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
        _check_batch_size(batch_size, length)
        self._stream = hf_dataset
        self._batch_size, self._length, self._buffer_size = batch_size, length, buffer_size
        self._mapper = _Mapper(map_fn, flatmap_fn)
        self._last: tuple[int, list[tinker.Datum]] | None = None
        self.set_epoch(0)

    @property
    def num_dropped(self) -> int:
        """Number of datums dropped so far, over all epochs."""
        return self._mapper.num_dropped

    def set_epoch(self, seed: int = 0) -> None:
        """Restarts the stream, shuffled by ``seed``."""
        shuffled = self._stream.shuffle(seed=seed, buffer_size=self._buffer_size)
        self._iterator: Iterator[Any] = iter(shuffled)
        self._rows_read = 0
        self._seed = seed
        self._last = None

    def get_batch(self, index: int) -> list[tinker.Datum]:
        """Returns the batch at ``index``, which must not precede the last one returned."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch index: got {index}, expected 0 to {len(self) - 1}")
        # The stream cannot go back, so the last batch is cached.
        if self._last is not None and self._last[0] == index:
            return self._last[1]
        start = index * self._batch_size
        if start < self._rows_read:
            raise ConfigurationError(
                f"batch index: got {index}, but the stream has passed it and is read forwards "
                "only; call set_epoch to restart it"
            )
        # Skip the rows before the batch.
        self._read(start - self._rows_read)
        rows = self._read(min(self._batch_size, self._length - start))
        numbered = [((self._seed, start + i), row) for i, row in enumerate(rows)]
        self._last = (index, self._mapper.batch(index, numbered))
        return self._last[1]

    def __len__(self) -> int:
        return -(-self._length // self._batch_size)

    def _read(self, count: int) -> list[Any]:
        rows = []
        for _ in range(count):
            try:
                rows.append(next(self._iterator))
            except StopIteration:
                raise DataValidationError(
                    f"length: got {self._length}, but the stream ended after {self._rows_read} "
                    f"rows; set length={self._rows_read}"
                ) from None
            self._rows_read += 1
        return rows


class _Mapper:
    """Converts rows to datums and drops datums without a trained token."""

    def __init__(self, map_fn: MapFn | None, flatmap_fn: FlatmapFn | None) -> None:
        if (map_fn is None) == (flatmap_fn is None):
            got = "neither" if map_fn is None else "both"
            raise ConfigurationError(
                f"map_fn, flatmap_fn: got {got}, expected one of them: map_fn makes one datum of a "
                "row, flatmap_fn any number"
            )
        self._map_fn, self._flatmap_fn = map_fn, flatmap_fn
        self._dropped: dict[Any, int] = {}

    @property
    def num_dropped(self) -> int:
        return sum(self._dropped.values())

    def batch(self, index: int, numbered_rows: list[tuple[Any, Any]]) -> list[tinker.Datum]:
        """Returns the datums of rows; drops are counted by row number."""
        kept: list[tinker.Datum] = []
        untrained: list[tinker.Datum] = []
        for number, row in numbered_rows:
            data = self._to_data(number, row)
            # A datum without a trained token has no gradient, but would count in the mean.
            trained = [datum for datum in data if count_loss_tokens(datum)]
            if len(trained) < len(data):
                self._count_dropped(number, data, len(data) - len(trained))
            kept += trained
            untrained += data
        if not kept and untrained:
            return untrained
        if not kept:
            raise EmptyBatchError(
                f"batch {index}: got {len(numbered_rows)} rows that give no datum, expected at "
                "least one that does; raise max_length or batch_size, or take these rows out of "
                "the data"
            )
        return kept

    def _to_data(self, number: Any, row: Any) -> list[tinker.Datum]:
        try:
            if self._flatmap_fn is not None:
                return self._flatmap_fn(row)
            return [self._map_fn(row)] if self._map_fn is not None else []
        except TinkerCookbookError as error:
            raise DataError(f"row {_name(number)} of the dataset: {error}") from error

    def _count_dropped(self, number: Any, data: list[tinker.Datum], count: int) -> None:
        # Log the first dropped row in full; further ones are only counted.
        if not self._dropped:
            longest = max(datum.model_input.length for datum in data) + 1
            logger.warning(
                "row %s (%d tokens after max_length) has an example without a token to train on; "
                "it is dropped. Either max_length cuts before the answer begins, or train_on_what "
                "selects nothing of it. Further ones are only counted (num_dropped).",
                _name(number),
                longest,
            )
        self._dropped[number] = count


def _name(number: Any) -> str:
    return str(number[1] if isinstance(number, tuple) else number)


def _check_batch_size(batch_size: int, rows: int) -> None:
    if rows < 1:
        raise DataValidationError(
            "the dataset is empty: got 0 rows, expected at least one; check the file and the split"
        )
    if batch_size < 1:
        raise ConfigurationError(f"batch_size: got {batch_size}, expected at least 1")
    if batch_size > rows:
        raise ConfigurationError(
            f"batch_size: got {batch_size}, expected at most {rows}, the number of rows in the "
            f"dataset; set batch_size={rows} or less, or add data"
        )
