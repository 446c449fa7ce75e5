"""Conversations as training data: rows with messages and tools, and files of them.

A row has one of the ``layouts``, usually ``{"messages": [...]}``, optionally with ``"tools"``.
Lines of JSON are not unified into columns, so they may differ in tool calls, structured content and
``trainable`` flags.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import chz
import numpy as np
import numpy.typing as npt

from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataError,
    DataFormatError,
    DataValidationError,
    RendererError,
)
from tinker_cookbook.renderers import (
    Message,
    Renderer,
    ToolSpec,
    TrainOnWhat,
    get_text_content,
    normalize_messages,
    select_trained,
)
from tinker_cookbook.renderers.core.checks import check_roles
from tinker_cookbook.supervised.json_files import file_rows
from tinker_cookbook.supervised.layouts import LABEL, ColumnsTaken, is_unwanted
from tinker_cookbook.supervised.row_datasets import (
    Rows,
    SupervisedDatasetFromHFDataset,
    conversation_to_data,
)
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset
from tinker_cookbook.utils.terminal import print_line

if TYPE_CHECKING:
    import tinker

logger = logging.getLogger(__name__)

_Row = TypeVar("_Row")

_TOOL = '{"type": "function", "function": {"name": "…", "description": "…", "parameters": {…}}}'
EXPECTED = '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'

_MESSAGE_KEYS = frozenset(Message.__annotations__) | {"reasoning_content"}

# Keys of other formats that change what is trained, so they must not be ignored.
_UNREADABLE_MESSAGE_KEYS = {
    "weight": '"trainable": true or false, with train_on_what=customized',
    "function_call": '"tool_calls": [{"function": {"name": "…", "arguments": "…"}}]',
}


class ChatDataset(SupervisedDatasetFromHFDataset):
    """Batches of conversations, rendered with the builder's settings."""

    def __init__(
        self, builder: ChatDatasetBuilder, rows: Rows, batch_size: int, message_field: str | None
    ) -> None:
        super().__init__(rows, batch_size, flatmap_fn=self._to_data)
        self.builder, self._message_field = builder, message_field

    def messages(self, row: Any) -> list[Message]:
        """Returns a row's messages for rendering, with its tools declared."""
        # Rows of conversation files were checked when they were read.
        if self._message_field is None:
            return row
        if self._message_field not in row:
            raise DataFormatError(
                f"message_field: got {self._message_field!r}, expected one of the row's fields: "
                f"{', '.join(row)}"
            )
        messages = checked_messages(row[self._message_field])
        return with_tools(messages, tools_of_row(row), self.builder.renderer)

    def _to_data(self, row: Any) -> list[tinker.Datum]:
        # The tokenizer is loaded only here, so that rows can be counted without it.
        builder = self.builder
        max_length = builder.common_config.max_length
        messages = self.messages(row)
        return conversation_to_data(messages, builder.renderer, max_length, builder.train_on_what)


def chat_dataset(
    builder: ChatDatasetBuilder, rows: Rows, batch_size: int, message_field: str | None = None
) -> ChatDataset:
    """Returns batches of ``rows``: conversations, or objects with a conversation in
    ``message_field``."""
    return ChatDataset(builder, rows, batch_size, message_field)


def checked_messages(messages: Any) -> list[Message]:
    """Returns normalised messages; raises RendererError for a role that no chat format has."""
    normal = normalize_messages(messages)
    check_roles(normal)
    return normal


def tools_of_row(row: Mapping[str, Any]) -> list[ToolSpec]:
    """Returns the tools in a row's key ``tools``, a list or its JSON text; else RendererError."""
    tools = row.get("tools")
    # The older OpenAI key would otherwise be ignored.
    if row.get("functions"):
        raise RendererError(f"got 'functions', expected 'tools': a list of {_TOOL}")
    if isinstance(tools, str):  # a column of JSON text, because rows have tools of different shapes
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise RendererError(
                f"tools: got a text that is not JSON ({error}), expected a list of {_TOOL}"
            ) from error
    # Null and an empty list both mean that the row has no tools.
    if tools and not isinstance(tools, Sequence):
        raise RendererError(f"tools: got {type(tools).__name__}, expected a list of {_TOOL}")
    specs: list[ToolSpec] = []
    for i, tool in enumerate(tools or []):
        # OpenAI's nested form and the bare declaration are both accepted.
        body = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(body, Mapping) or not isinstance(body.get("name"), str):
            raise RendererError(f"tools[{i}]: got {tool!r}, expected {_TOOL}")
        if tool.get("type", "function") != "function":
            raise RendererError(
                f"tools[{i}].type: got {tool['type']!r}, expected 'function'; chat formats declare "
                "no other kind of tool"
            )
        spec = ToolSpec(
            name=body["name"],
            description=body.get("description") or "",
            parameters=body.get("parameters") or {"type": "object", "properties": {}},
        )
        specs.append(spec)
    return specs


def with_tools(
    messages: Sequence[Message], tools: Sequence[ToolSpec], renderer: Renderer
) -> list[Message]:
    """Returns the conversation with ``tools`` declared in the chat format.

    A system message at the beginning becomes part of the declaration. Raises RendererError where
    the chat format does not support tools.
    """
    if not tools:
        return list(messages)
    # The format writes the system prompt together with the tool declarations.
    system = messages[0] if messages and messages[0]["role"] in ("system", "developer") else None
    prompt = "" if system is None else get_text_content(system)
    prefix = renderer.create_conversation_prefix_with_tools(tools, prompt)
    if any("trainable" in message for message in messages):
        # train_on_what=customized needs the key on every message.
        trainable = system.get("trainable", False) if system is not None else False
        for message in prefix:
            message["trainable"] = trainable
    # The prefix contains the system prompt, so the system message is not repeated.
    return [*prefix, *messages[0 if system is None else 1 :]]


def read_conversations(
    path: str | Path,
    train_on_what: TrainOnWhat | str = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    renderer: Callable[[], Renderer] | None = None,
    columns: ColumnsTaken | None = None,
) -> list[list[Message]]:
    """Returns the conversations of a file in any format and layout, checked.

    ``renderer`` is called for rows with ``tools``, to declare them; ``columns`` records
    which columns were read. Raises DataFormatError with file and line for a row that is not a
    conversation, has another layout than earlier rows, has nothing to train on with
    ``train_on_what``, or has tools that the chat format cannot declare; and DataValidationError for
    a file that is missing, unreadable or empty.
    """
    what, file = TrainOnWhat(train_on_what), Path(path).expanduser()
    columns = columns if columns is not None else ColumnsTaken()
    unread_keys: set[str] = set()
    conversations: list[list[Message]] = []
    for where, row in _rows(path):
        if is_unwanted(row):
            columns.num_unwanted += 1
            continue
        messages, tools = _messages_and_tools(row, where, unread_keys, columns)
        # Tools are part of the prompt, so they must not be dropped without an error.
        if tools and renderer is None:
            raise DataFormatError(
                f"{where}: got 'tools', which each chat format declares in its own way; expected a "
                "renderer to declare them with, or the declaration as messages: what "
                "renderer.create_conversation_prefix_with_tools(tools) returns"
            )
        if tools and renderer is not None:
            with _data_error(f"{where}: tools"):
                messages = with_tools(messages, tools, renderer())
        with _data_error(where):
            trained = select_trained(messages, what)
        # Fail here with file and line, because the dataset would only drop and count the row.
        if not any(trained):
            roles = ", ".join(message["role"] for message in messages)
            raise DataFormatError(
                f"{where}: got messages of roles {roles}, of which train_on_what={what.value} "
                "selects none; expected at least one to train on"
            )
        conversations.append(messages)
    if not conversations:
        raise DataValidationError(
            f"{file}: all {columns.num_unwanted} rows have label false; expected some with label "
            "true, which are trained on"
            if columns.num_unwanted
            else f"{file}: the file is empty; expected lines like {EXPECTED}"
        )
    columns.num_rows += len(conversations)
    # One warning per file, not per line.
    if unread_keys:
        keys = ", ".join(sorted(unread_keys))
        logger.warning("%s: message keys that are not read: %s", file, keys)
    return conversations


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
    return *_messages_and_tools(row, where, set(), ColumnsTaken()), where


def _rows(path: str | Path) -> Iterator[tuple[str, Any]]:
    # Otherwise a URL would be reported as a missing file.
    if "://" in str(path):
        raise DataValidationError(
            f"got {path}, which is a URL; expected a local file: download it first "
            "(curl -LO …) and give its path"
        )
    return file_rows(Path(path).expanduser(), f"lines like {EXPECTED}")


def _messages_and_tools(
    row: Any, where: str, unread_keys: set[str], columns: ColumnsTaken
) -> tuple[list[Message], list[ToolSpec]]:
    """Returns a row's messages and tools; adds ignored message keys to ``unread_keys``."""
    if not isinstance(row, Mapping):
        raise DataFormatError(
            f"{where}: not a conversation: got a JSON {type(row).__name__}, expected an object "
            f"like {EXPECTED}"
        )
    with _data_error(f"{where}: not a conversation"):
        messages = columns.layout_of(row).messages(row)
    for i, message in enumerate(messages):
        # An entry that is not an object is reported by the checks below.
        if isinstance(message, Mapping) and not message.keys() <= _MESSAGE_KEYS:
            # Column formats write null for absent values.
            unknown = {key for key, value in message.items() if value is not None} - _MESSAGE_KEYS
            for key in sorted(unknown & _UNREADABLE_MESSAGE_KEYS.keys()):
                raise DataFormatError(
                    f"{where}: messages[{i}]: got {key!r}, expected {_UNREADABLE_MESSAGE_KEYS[key]}"
                )
            # Other unknown keys do not affect training, so they only cause a warning.
            unread_keys |= unknown
    with _data_error(where):
        return checked_messages(messages), tools_of_row(row)


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
        self._rows, self._name, self._renderer = rows, name, renderer
        self._numbers = _wanted_rows(rows, name) if numbers is None else numbers
        left_out = len(rows) - len(self._numbers) if numbers is None else 0
        self.columns = ColumnsTaken(num_rows=len(self._numbers), num_unwanted=left_out)
        # The first row determines the layout; an unknown layout fails before anything is loaded.
        if len(self):
            self._read(0)

    def data_sources(self) -> dict[str, Any]:
        """Returns the table."""
        return {"": self._rows}

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int, /) -> list[Message]:
        messages, tools = self._read(index)
        with _data_error(f"{self._name}, row {self._numbers[index]}: tools"):
            return with_tools(messages, tools, self._renderer()) if tools else messages

    def take(self, numbers: npt.NDArray[Any]) -> ConversationRows:
        """Returns the rows at these indices, or of this mask."""
        return ConversationRows(self._rows, self._name, self._renderer, self._numbers[numbers])

    def _read(self, index: int) -> tuple[list[Message], list[ToolSpec]]:
        number = int(self._numbers[index])
        where = f"{self._name}, row {number}"
        return _messages_and_tools(self._rows[number], where, set(), self.columns)


def _wanted_rows(rows: Rows, name: str) -> npt.NDArray[np.int64]:
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


@contextmanager
def _data_error(where: str) -> Iterator[None]:
    """Converts a RendererError to a DataFormatError that starts with ``where``."""
    try:
        yield
    except RendererError as error:
        raise DataFormatError(f"{where}: {error}") from error


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
        test_set = chat_dataset(self, test, min(batch_size, len(test))) if len(test) else None
        return chat_dataset(self, train, batch_size), test_set

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
        return split_rows(rows, self.test_size, self.shuffle_seed, self.file_path)

    def _read(self, path: str, key: str) -> list[list[Message]]:
        """Reads a file and prints which columns were used."""
        columns = ColumnsTaken()
        with naming(key):
            rows = read_conversations(path, self.train_on_what, lambda: self.renderer, columns)
        print_line(f"{key}: {columns.line(path)}")
        return rows


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Adds the name of a setting to errors in its data."""
    try:
        yield
    except DataError as error:
        raise type(error)(f"{key}: {error}") from error


def split_rows(
    rows: Sequence[_Row], test_size: int, shuffle_seed: int, name: str, noun: str = "conversations"
) -> tuple[list[_Row], list[_Row]]:
    """Splits rows at random into training rows and ``test_size`` held-out rows, both in order."""
    held_out = held_out_mask(len(rows), test_size, shuffle_seed, name, noun)
    train = [row for row, out in zip(rows, held_out, strict=True) if not out]
    return train, [row for row, out in zip(rows, held_out, strict=True) if out]


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
