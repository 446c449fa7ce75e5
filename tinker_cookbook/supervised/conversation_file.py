"""Conversations as training data: rows with messages and tools, and files of them.

A row has one of the ``layouts``, usually ``{"messages": [...]}``, optionally with ``"tools"``.
Lines of JSON are not unified into columns, so they may differ in tool calls, structured content and
``trainable`` flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, cast

import chz
import numpy as np
import numpy.typing as npt

from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataError,
    DataFormatError,
    DataValidationError,
)
from tinker_cookbook.renderers import (
    Message,
    Renderer,
    ToolSpec,
    TrainOnWhat,
    select_trained,
)
from tinker_cookbook.supervised.arrow_rows import without_arrow_nulls
from tinker_cookbook.supervised.conversation_row import (
    EXPECTED,
    data_error,
    read_row,
    with_tools,
)
from tinker_cookbook.supervised.json_files import file_rows
from tinker_cookbook.supervised.layouts import LABEL, ColumnsTaken, is_unwanted
from tinker_cookbook.supervised.row_datasets import (
    PlacedRows,
    Rows,
    SupervisedDatasetFromHFDataset,
    conversation_to_data,
)
from tinker_cookbook.supervised.row_images import has_images
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset
from tinker_cookbook.utils.imports import tinker
from tinker_cookbook.utils.terminal import print_line


class ChatDataset(SupervisedDatasetFromHFDataset):
    """Batches of conversations, or of rows with a conversation in ``message_field``, rendered with
    the builder's settings."""

    def __init__(
        self,
        builder: ChatDatasetBuilder,
        rows: Rows,
        batch_size: int,
        message_field: str | None = None,
    ) -> None:
        super().__init__(rows, batch_size, flatmap_fn=self._to_data)
        self.builder, self._message_field = builder, message_field

    def messages(self, row: Any) -> list[Message]:
        """Returns a row's messages for rendering, with its tools declared; raises DataError."""
        field = self._message_field
        if field is None:
            return row
        if field not in row:
            raise DataFormatError(
                f"message_field: got {field!r}, expected one of the row's fields: {', '.join(row)}"
            )
        messages, tools = read_row(row, "the conversation", field)
        with data_error("the conversation: tools"):
            return with_tools(messages, tools, self.builder.renderer)

    def _to_data(self, row: Any) -> list[tinker.Datum]:
        # The tokenizer is loaded only here, so that rows can be counted without it.
        builder = self.builder
        max_length = builder.common_config.max_length
        messages = self.messages(row)
        return conversation_to_data(messages, builder.renderer, max_length, builder.train_on_what)


def read_conversations(
    path: str | Path,
    train_on_what: TrainOnWhat | str = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    renderer: Callable[[], Renderer] | None = None,
    columns: ColumnsTaken | None = None,
    max_length: int | None = None,
) -> list[list[Message]]:
    """Returns the conversations of a file in any format and layout, checked.

    ``renderer`` is called for rows with ``tools``, to declare them, and for rows with images, which
    are rendered up to ``max_length`` for their errors; ``columns`` records which columns were read.
    Raises DataFormatError with file and line for a row that is not a
    conversation, has another layout than earlier rows, has nothing to train on with
    ``train_on_what``, or has tools that the chat format cannot declare; and DataValidationError for
    a file that is missing, unreadable or empty.
    """
    return list(_read_file(path, train_on_what, renderer, columns, max_length).rows)


def _read_file(
    path: str | Path,
    train_on_what: TrainOnWhat | str,
    renderer: Callable[[], Renderer] | None,
    columns: ColumnsTaken | None,
    max_length: int | None,
) -> PlacedRows:
    """Returns the conversations with their places."""
    what, file = TrainOnWhat(train_on_what), Path(path).expanduser()
    columns = columns if columns is not None else ColumnsTaken()
    conversations: list[list[Message]] = []
    places: list[str] = []
    for where, row in _rows(path):
        if is_unwanted(row):
            columns.num_unwanted += 1
            continue
        messages, tools = read_row(row, where, columns)
        # Tools are part of the prompt, so they must not be dropped without an error.
        if tools and renderer is None:
            raise DataFormatError(
                f"{where}: got 'tools', which each chat format declares in its own way; expected a "
                "renderer to declare them with, or the declaration as messages: what "
                "renderer.create_conversation_prefix_with_tools(tools) returns"
            )
        if tools and renderer is not None:
            with data_error(f"{where}: tools"):
                messages = with_tools(messages, tools, renderer())
        with data_error(where):
            trained = select_trained(messages, what)
        # Fail here with file and line, because the dataset would only drop and count the row.
        if not any(trained):
            roles = ", ".join(message["role"] for message in messages)
            raise DataFormatError(
                f"{where}: got messages of roles {roles}, of which train_on_what={what.value} "
                "selects none; expected at least one to train on"
            )
        # A missing image must not stop a run in the middle of an epoch.
        if renderer is not None and has_images(messages):
            with data_error(where):
                conversation_to_data(messages, renderer(), max_length, what)
        conversations.append(messages)
        places.append(where)
    if not conversations:
        raise DataValidationError(
            f"{file}: all {columns.num_unwanted} rows have label false; expected some with label "
            "true, which are trained on"
            if columns.num_unwanted
            else f"{file}: the file is empty; expected lines like {EXPECTED}"
        )
    columns.num_rows += len(conversations)
    return PlacedRows(conversations, places)


def read_conversation(path: str | Path, index: int) -> tuple[list[Message], list[ToolSpec], str]:
    """Returns the messages, tools and FILE:LINE of the conversation at ``index``, from 0.

    Does not read later lines; the conversation may have nothing to train on. Raises as
    ``read_conversations``, and DataValidationError for an index outside the file.
    """
    # Later lines are not read, so their errors do not matter.
    rows = list(islice(_rows(path), index + 1))
    if len(rows) <= index:
        expected = f"0 to {len(rows) - 1}" if rows else f"lines like {EXPECTED}"
        raise DataValidationError(
            f"index: got {index}, but {Path(path).expanduser()} has {len(rows)} conversations; "
            f"expected {expected}"
        )
    where, row = rows[index]
    return *read_row(row, where, ColumnsTaken()), where


def _rows(path: str | Path) -> Iterator[tuple[str, Any]]:
    # Otherwise a URL would be reported as a missing file.
    if "://" in str(path):
        raise DataValidationError(
            f"got {path}, which is a URL; expected a local file: download it first "
            "(curl -LO …) and give its path"
        )
    return file_rows(Path(path).expanduser(), f"lines like {EXPECTED}")


class ConversationRows:
    """Rows of a table as conversations, parsed when requested.

    For datasets that are too large to convert as a whole. Rows with label false are skipped. Raises
    DataFormatError with ``name`` and the row's number, as ``read_conversations`` does, and
    DataValidationError if all rows have label false.
    """

    def __init__(
        self,
        rows: Rows,
        name: str,
        renderer: Callable[[], Renderer],
        numbers: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self._rows, self._name, self._renderer = without_arrow_nulls(rows), name, renderer
        self._numbers = wanted_rows(rows, name) if numbers is None else numbers
        left_out = len(rows) - len(self._numbers) if numbers is None else 0
        self.columns = ColumnsTaken(num_rows=len(self._numbers), num_unwanted=left_out)
        # The first row determines the layout; an unknown layout fails before anything is loaded,
        # and so do images for a model without.
        if len(self) and has_images(self._read(0)[0]):
            with data_error(self.place(0)):
                renderer().build_supervised_example(self[0])

    def data_sources(self) -> dict[str, Any]:
        """Returns the table."""
        return {"": self._rows}

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int, /) -> list[Message]:
        messages, tools = self._read(index)
        with data_error(f"{self.place(index)}: tools"):
            return with_tools(messages, tools, self._renderer()) if tools else messages

    def place(self, index: int) -> str:
        """Returns the name and number of a row, for messages."""
        return f"{self._name}[{self._numbers[index]}]"

    def take(self, numbers: npt.NDArray[Any]) -> ConversationRows:
        """Returns the rows at these indices, or of this mask."""
        return ConversationRows(self._rows, self._name, self._renderer, self._numbers[numbers])

    def _read(self, index: int) -> tuple[list[Message], list[ToolSpec]]:
        row = self._rows[int(self._numbers[index])]
        return read_row(row, self.place(index), self.columns)


def wanted_rows(rows: Rows, name: str) -> npt.NDArray[np.int64]:
    """Returns the numbers of the rows without label false; raises DataValidationError if none."""
    labels: Any = None
    if isinstance(rows, list):
        labels = [isinstance(row, Mapping) and is_unwanted(row) for row in rows]
    elif LABEL in getattr(rows, "column_names", ()):
        # Reading one column is fast; reading whole rows would take minutes.
        labels = [is_unwanted({LABEL: value}) for value in cast(Any, rows)[LABEL]]
    numbers = np.arange(len(rows)) if labels is None else np.flatnonzero(~np.array(labels, bool))
    if len(rows) and not len(numbers):
        raise DataValidationError(
            f"{name}: all {len(rows)} rows have label false; expected some with label true, which "
            "are trained on"
        )
    return numbers


def prompts_of(conversations: Iterable[Sequence[Message]], n: int) -> list[list[Message]]:
    """Returns the last answers' prompts of the first ``n`` conversations that have one."""
    prompts: list[list[Message]] = []
    for messages in conversations:
        if len(prompts) >= n:
            break
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=0)
        # An answer without an earlier message has no prompt.
        if last > 0:
            prompts.append(list(messages[:last]))
    return prompts


@chz.chz
class FromConversationFileBuilder(ChatDatasetBuilder):
    """Training and test data from files of any format and layout (``layouts``).

    The test data are read from ``test_file_path``, or ``test_size`` conversations are held out of
    ``file_path`` by ``shuffle_seed``; without either, there are no test data.
    """

    file_path: str = chz.field(doc="File of conversations: jsonl, json, csv, tsv or parquet")
    test_file_path: str | None = chz.field(default=None, doc="File of held-out conversations")
    test_size: int = chz.field(default=0, doc="Held-out size of file_path (if no test_file_path)")
    shuffle_seed: int = chz.field(default=0, doc="Seed of the split by test_size")

    @property
    def setting_names(self) -> tuple[str, str]:
        """Names of the two file settings in error messages, as on the recipes' command lines."""
        return "dataset_path", "test_path"

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Returns the training set and the test set; reads and checks all conversations."""
        # Check the settings before any file is read.
        self.common_config.check()
        train, test = self._split
        batch_size = self.common_config.batch_size
        # The dataset would reject a held-out part smaller than a batch.
        test_set = ChatDataset(self, test, min(batch_size, len(test))) if len(test) else None
        return ChatDataset(self, train, batch_size), test_set

    def held_out_prompts(self, n: int) -> list[list[Message]]:
        """Returns the prompts of the first ``n`` held-out conversations."""
        test = self._split[1]
        return prompts_of((test[i] for i in range(len(test))), n)

    @cached_property
    def _split(self) -> tuple[Rows, Rows]:
        """Training and held-out conversations, read once."""
        if self.test_file_path is not None and self.test_size:
            raise ConfigurationError(
                f"test_size: got {self.test_size} and test_file_path={self.test_file_path}, "
                "expected one of them: both define the held-out part"
            )
        key, test_key = self.setting_names
        rows = self._read(self.file_path, key)
        if self.test_file_path is not None:
            return rows, self._read(self.test_file_path, test_key)
        return self._hold_out(rows)

    def _hold_out(self, rows: PlacedRows | ConversationRows) -> tuple[Rows, Rows]:
        mask = held_out_mask(len(rows), self.test_size, self.shuffle_seed, self.file_path)
        return rows.take(~mask), rows.take(mask)

    def _read(self, path: str, key: str) -> PlacedRows:
        """Reads a file and prints which columns were used."""
        columns = ColumnsTaken()
        with naming(key):
            rows = _read_file(
                path,
                self.train_on_what,
                lambda: self.renderer,
                columns,
                self.common_config.max_length,
            )
        print_line(f"{key}: {columns.line(path)}")
        return rows


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Adds the name of a setting to errors in its data."""
    try:
        yield
    except DataError as error:
        raise type(error)(f"{key}: {error}") from error


def held_out_mask(
    num_rows: int, test_size: int, shuffle_seed: int, name: str, noun: str = "conversations"
) -> npt.NDArray[np.bool_]:
    """Returns a mask [num_rows] of ``test_size`` random rows, which are held out."""
    if not 0 <= test_size < num_rows:
        raise ConfigurationError(
            f"test_size: got {test_size}, expected 0 to {num_rows - 1}, since {name} has "
            f"{num_rows} {noun} and at least one must be left to train on"
        )
    # A mask keeps the file's order in both parts.
    held_out = np.zeros(num_rows, dtype=bool)
    # The rows depend only on the seed, so a resumed run holds out the same rows.
    held_out[np.random.default_rng(shuffle_seed).permutation(num_rows)[:test_size]] = True
    return held_out
