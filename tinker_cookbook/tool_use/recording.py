"""Record of tool results, so that a resumed run gets the same ones.

A run that was killed repeats the rollouts since its last checkpoint, with the same samples. A tool
that reads the clock, a web page or a server would then return something else, and the run would end
with different weights. So the results of tools with ``record=True`` are appended to
``log_path/tool_results.jsonl`` with the position of their call (batch, group, member, attempt,
call), and a call at the same position with the same arguments returns the recorded result without
running.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import DataError, DataFormatError
from tinker_cookbook.renderers import Message, ToolCall
from tinker_cookbook.rl.rollouts.place import current_place
from tinker_cookbook.run.jsonl import append_row
from tinker_cookbook.run.paths import local_path
from tinker_cookbook.tool_use.execution import settings_of
from tinker_cookbook.tool_use.types import Tool, ToolResult

logger = logging.getLogger(__name__)

FILE_NAME = "tool_results.jsonl"


class ToolJournal:
    """Recorded results of one run, by the position of their call; stored in the file only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        # Position of a call in the run -> offset of its line in the file.
        self._lines: dict[str, tuple[int, int]] = {}
        self._read_to = 0

    def find(self, place: str, call: ToolCall) -> ToolResult | None:
        """Returns the recorded result of this call at this position, if there is one."""
        with self._lock:
            self._read_new_lines()
            found = self._lines.get(place)
            if found is None:
                return None
            with self.path.open("rb") as file:
                file.seek(found[0])
                row = json.loads(file.read(found[1]))
        # With other settings, the model may make a different call at the same position.
        if (row["tool"], row["arguments"]) != (call.function.name, call.function.arguments):
            return None
        return _result_of(row["result"])

    def add(self, place: str, call: ToolCall, result: ToolResult) -> None:
        """Appends a result; raises ``TrainingError`` if the file cannot be written.

        Metadata that JSON cannot store are replaced by their ``repr``. A message with such content,
        such as an image object, is not recorded.
        """
        row: dict[str, Any] = {
            "place": place,
            "tool": call.function.name,
            "arguments": call.function.arguments,
            "result": {
                "messages": result.messages,
                "should_stop": result.should_stop,
                "metrics": result.metrics,
                "metadata": json.loads(json.dumps(result.metadata, default=repr)),
            },
        }
        with self._lock:
            try:
                append_row(self.path, row)
            except DataFormatError as error:
                logger.warning("a result of tool %s was not recorded: %s", row["tool"], error)

    def _read_new_lines(self) -> None:
        """Reads lines appended by this process or another process of the run."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < self._read_to:  # the folder was deleted and made again
            self._lines, self._read_to = {}, 0
        if size <= self._read_to:
            return
        with self.path.open("rb") as file:
            file.seek(self._read_to)
            for line in file:
                # A killed process may leave an incomplete last line; it is not a result.
                if line.endswith(b"\n"):
                    self._index(line)
                    self._read_to += len(line)

    def _index(self, line: bytes) -> None:
        try:
            place = json.loads(line)["place"]
        except (ValueError, KeyError, TypeError):
            return  # an incomplete line, continued by a later process
        self._lines[place] = (self._read_to, len(line))


def _result_of(row: Mapping[str, Any]) -> ToolResult:
    messages = [Message(**message) for message in row["messages"]]
    return ToolResult(messages, row["should_stop"], row["metrics"], row["metadata"])


_replayed: ContextVar[tuple[Sequence[Sequence[Mapping[str, Any]]] | None] | None] = ContextVar(
    "replayed_tool_calls", default=None
)


@contextmanager
def replayed_calls(calls: Sequence[Sequence[Mapping[str, Any]]] | None) -> Iterator[None]:
    """Sets the results of tools in replayed episodes: the recorded calls of each member of the
    group (``ToolEpisode.rows``), or ``None``: the tools run."""
    token = _replayed.set((calls,))
    try:
        yield
    finally:
        _replayed.reset(token)


def _replayed_result(calls: Sequence[Mapping[str, Any]], index: int, call: ToolCall) -> ToolResult:
    """Returns the recorded result; raises ``DataError`` if this call was not recorded."""
    made = call.function.name, call.function.arguments
    if index >= len(calls):
        raise DataError(
            f"tool {made[0]}: the result of call {index} ({made[1]}) was not recorded, since the "
            f"recorded episode has {len(calls)} calls; tools=live runs it"
        )
    row = calls[index]
    if made != (row["name"], row["arguments"]):
        raise DataError(
            f"tool {made[0]}: call {index} has the arguments {made[1]}, but the recorded one is "
            f"{row['name']}({row['arguments']}); tools=live runs it"
        )
    return _result_of(row)


_journals: dict[str, ToolJournal] = {}


def journal_of(log_path: str) -> ToolJournal:
    """Returns the journal of a run."""
    if log_path not in _journals:
        _journals[log_path] = ToolJournal(local_path(log_path) / FILE_NAME)
    return _journals[log_path]


async def recorded(
    tool: Tool | None, index: int, call: ToolCall, run: Callable[[], Awaitable[ToolResult]]
) -> ToolResult:
    """Returns the recorded result of call ``index`` of the current episode, or runs and records it.

    Outside a training run, and for tools that are not recorded, the call is only run. An
    unavailable tool is not recorded: a resumed run tries it again. In a replay the results are
    those of ``replayed_calls``.
    """
    place = current_place()
    if (replayed := _replayed.get()) is not None and place is not None:
        (calls,) = replayed
        if calls is None:
            return await run()
        # The position ends with the member of the group, and its attempt.
        return _replayed_result(calls[int(place.position[3])], index, call)
    if tool is None or place is None or not settings_of(tool).record:
        return await run()
    journal = journal_of(place.log_path)
    key = "/".join(str(part) for part in (*place.position, index))
    # In a thread, because a disk may be slow.
    found = await asyncio.to_thread(journal.find, key, call)
    if found is None:
        found = await run()
        if found.error_type != "unavailable":
            await asyncio.to_thread(journal.add, key, call, found)
    return found
