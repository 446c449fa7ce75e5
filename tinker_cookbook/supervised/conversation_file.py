"""Conversations from a JSONL file: one ``{"messages": [...]}`` a line, with ``"tools"`` or not.

Rows are read one by one as JSON. Nothing unifies them into columns, so some rows may have tool
calls, structured content or ``trainable`` flags and others not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import chz
import numpy as np

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
    normalize_messages,
    select_trained,
)
from tinker_cookbook.renderers.core.roles import check_roles
from tinker_cookbook.supervised.chat_dataset import chat_dataset
from tinker_cookbook.supervised.foreign_files import check_is_json_lines, wrong_keys
from tinker_cookbook.supervised.local_rows import json_lines
from tinker_cookbook.supervised.tool_rows import tools_of_row, with_tools
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset

logger = logging.getLogger(__name__)

_Row = TypeVar("_Row")

EXPECTED = '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'

_MESSAGE_KEYS = frozenset(Message.__annotations__) | {"reasoning_content"}

# Keys of other formats that change what is trained: reading on without them would be wrong.
_UNREADABLE_MESSAGE_KEYS = {
    "weight": '"trainable": true or false, with train_on_what=customized',
    "function_call": '"tool_calls": [{"function": {"name": "…", "arguments": "…"}}]',
}


def read_conversations(
    path: str | Path,
    train_on_what: TrainOnWhat | str = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    renderer: Callable[[], Renderer] | None = None,
) -> list[list[Message]]:
    """Returns a JSONL file's conversations (also ``.jsonl.gz``), checked, without blank lines.

    Args:
        path: The file.
        train_on_what: Which messages are to be trained on.
        renderer: Gives the chat format that declares the ``tools`` of rows; called only where
            there are some.

    Raises:
        DataFormatError: A line is not JSON or not a conversation, ``train_on_what`` selects
            nothing in it, or it has tools that the chat format cannot declare. Names file and line.
        DataValidationError: The file is missing, unreadable or empty.
    """
    check_is_json_lines(path)
    file = Path(path).expanduser()
    reader = _Reader(TrainOnWhat(train_on_what), renderer)
    rows = [
        reader.conversation(row, where) for where, row in json_lines(file, f"lines like {EXPECTED}")
    ]
    if not rows:
        raise DataValidationError(f"{file}: the file is empty; expected lines like {EXPECTED}")
    if reader.unread_keys:
        logger.warning(
            "%s: message keys that are not read: %s", file, ", ".join(sorted(reader.unread_keys))
        )
    return rows


def read_conversation(path: str | Path, index: int) -> tuple[list[Message], list[ToolSpec], str]:
    """The conversation at ``index``, counted from 0 over lines that are not blank, the tools that
    stand next to it, and FILE:LINE.

    Lines behind it are not looked at, and it may have nothing to train on. Raises as
    ``read_conversations`` does, and DataValidationError for an index that the file does not have.
    """
    check_is_json_lines(path)
    file = Path(path).expanduser()
    reader, count = _Reader(TrainOnWhat.ALL_TOKENS), 0
    for where, row in json_lines(file, f"lines like {EXPECTED}"):
        if count == index:
            return *reader.parts(row, where), where
        count += 1
    expected = f"0 to {count - 1}" if count else f"lines like {EXPECTED}"
    raise DataValidationError(
        f"index: got {index}, but {file} has {count} conversations; expected {expected}"
    )


class _Reader:
    """Converts rows to conversations and collects the message keys that it ignores."""

    def __init__(
        self, train_on_what: TrainOnWhat, renderer: Callable[[], Renderer] | None = None
    ) -> None:
        self._train_on_what, self._renderer = train_on_what, renderer
        self.unread_keys: set[str] = set()

    def conversation(self, row: Any, where: str) -> list[Message]:
        messages = self.messages(row, where)
        try:
            trained = select_trained(messages, self._train_on_what)
        except RendererError as error:
            raise DataFormatError(f"{where}: {error}") from error
        if not any(trained):
            roles = ", ".join(message["role"] for message in messages)
            raise DataFormatError(
                f"{where}: got messages of roles {roles}, of which train_on_what="
                f"{self._train_on_what.value} selects none; expected at least one to train on"
            )
        return messages

    def messages(self, row: Any, where: str) -> list[Message]:
        """The row's messages, tools declared among them, whether or not one can be trained on."""
        messages, tools = self.parts(row, where)
        if not tools:
            return messages
        if self._renderer is None:
            raise DataFormatError(
                f"{where}: got 'tools', which each chat format declares in its own way; expected a "
                "renderer to read them with, or the declaration as messages: what "
                "renderer.create_conversation_prefix_with_tools(tools) returns"
            )
        try:
            return with_tools(messages, tools, self._renderer())
        except RendererError as error:
            raise DataFormatError(f"{where}: tools: {error}") from error

    def parts(self, row: Any, where: str) -> tuple[list[Message], list[ToolSpec]]:
        """The row's messages and, apart from them, its tools."""
        raw = self._raw_messages(row, where)
        try:
            messages = normalize_messages(raw)
            check_roles(messages)
            return messages, tools_of_row(row)
        except RendererError as error:
            raise DataFormatError(f"{where}: {error}") from error

    def _raw_messages(self, row: Any, where: str) -> list[Any]:
        messages = row.get("messages") if isinstance(row, Mapping) else None
        if not isinstance(messages, list) or not messages:
            raise DataFormatError(f"{where}: not a conversation: {_what_is_wrong(row, where)}")
        for i, message in enumerate(messages):
            if isinstance(message, Mapping) and not message.keys() <= _MESSAGE_KEYS:
                self._check_unknown(message, f"{where}: messages[{i}]")
        return messages

    def _check_unknown(self, message: Mapping[str, Any], where: str) -> None:
        # Null is how column formats write "absent".
        unknown = {key for key, value in message.items() if value is not None} - _MESSAGE_KEYS
        for key in sorted(unknown & _UNREADABLE_MESSAGE_KEYS.keys()):
            raise DataFormatError(f"{where}: got {key!r}, expected {_UNREADABLE_MESSAGE_KEYS[key]}")
        self.unread_keys |= unknown


def _what_is_wrong(row: Any, where: str) -> str:
    if not isinstance(row, Mapping):
        return f"got a JSON {type(row).__name__}, expected an object like {EXPECTED}"
    if "messages" not in row:
        return wrong_keys(row, EXPECTED, where)
    got = "an empty list" if row["messages"] == [] else type(row["messages"]).__name__
    return f"messages: got {got}, expected a list that is not empty, as in {EXPECTED}"


def prompts_of(conversations: Iterable[list[Message]], n: int) -> list[list[Message]]:
    """The first ``n`` conversations, each up to its last answer; those without a prompt are left
    out."""
    prompts: list[list[Message]] = []
    for messages in conversations:
        if len(prompts) >= n:
            break
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=0)
        if last > 0:
            prompts.append(messages[:last])
    return prompts


@chz.chz
class FromConversationFileBuilder(ChatDatasetBuilder):
    """Training and test data from JSONL files.

    The test data are those of ``test_file_path``, or ``test_size`` conversations drawn from
    ``file_path`` by ``shuffle_seed``; without either there are none.
    """

    file_path: str = chz.field(doc="JSONL file of conversations")
    test_file_path: str | None = chz.field(default=None, doc="JSONL file of held-out ones")
    test_size: int = chz.field(default=0, doc="Else: conversations to hold out of file_path")
    shuffle_seed: int = chz.field(default=0, doc="Seed of the split by test_size")

    @property
    def setting_names(self) -> tuple[str, str]:
        """Names of the two file settings on the command line of recipes."""
        return "dataset_path", "test_path"

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Reads, checks and splits the conversations."""
        self.common_config.check()
        train, test = self._split
        train_set = chat_dataset(self, train, self.common_config.batch_size)
        if not test:
            return train_set, None
        return train_set, chat_dataset(self, test, min(self.common_config.batch_size, len(test)))

    def held_out_prompts(self, n: int) -> list[list[Message]]:
        """The first ``n`` held-out conversations, each up to its last answer."""
        return prompts_of(self._split[1], n)

    @cached_property
    def _split(self) -> tuple[list[list[Message]], list[list[Message]]]:
        """The conversations to train on and those held out, read once."""
        if self.test_file_path is not None and self.test_size:
            raise ConfigurationError(
                f"test_size: got {self.test_size} beside test_file_path={self.test_file_path}, "
                "expected one of them: both name the held-out part"
            )
        key, test_key = self.setting_names
        rows = self._read(self.file_path, key)
        if self.test_file_path is not None:
            return rows, self._read(self.test_file_path, test_key)
        return split_rows(rows, self.test_size, self.shuffle_seed, self.file_path)

    def _read(self, path: str, key: str) -> list[list[Message]]:
        """The conversations of a file; errors begin with the setting that names it."""
        with naming(key):
            return read_conversations(path, self.train_on_what, lambda: self.renderer)


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Puts the name of the setting before the message of an error in the data that it names."""
    try:
        yield
    except DataError as error:
        raise type(error)(f"{key}: {error}") from error


def split_rows(
    rows: Sequence[_Row], test_size: int, shuffle_seed: int, name: str, noun: str = "conversations"
) -> tuple[list[_Row], list[_Row]]:
    """Draws ``test_size`` rows to hold out; both parts keep the order of the rows."""
    if not 0 <= test_size < len(rows):
        raise ConfigurationError(
            f"test_size: got {test_size}, expected 0 to {len(rows) - 1}, since {name} has "
            f"{len(rows)} {noun} and one at least must be left to train on"
        )
    held_out = np.zeros(len(rows), dtype=bool)
    held_out[np.random.default_rng(shuffle_seed).permutation(len(rows))[:test_size]] = True
    train = [row for row, out in zip(rows, held_out, strict=True) if not out]
    return train, [row for row, out in zip(rows, held_out, strict=True) if out]
