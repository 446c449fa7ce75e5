"""Reading a growing JSONL file: each read returns the rows that were added since the last one."""

from __future__ import annotations

import threading
from typing import Any

from tinker_cookbook.official.stores.storage import Storage, threaded
from tinker_cookbook.run.jsonl import parse_lines


class IncrementalReader:
    """Rows of a JSONL file that a run is writing; thread-safe, can be pickled.

    A last line without its newline is left for the next read. If the last row that was read is not
    in its place, because a continued run replaced rows, the file is read again from the start.

    Args:
        storage: Where the file is.
        path: Its path there.
        max_records: Rows to keep in memory; older ones are dropped.
    """

    def __init__(self, storage: Storage, path: str, max_records: int = 50_000) -> None:
        self._storage, self._path, self._max_records = storage, path, max_records
        self._lock = threading.Lock()
        self._restart()

    def _restart(self) -> None:
        self._offset = self._lines = self._total_read = 0
        self._last_line, self._stamp = b"", (0, 0.0)
        self._records: list[dict[str, Any]] = []
        self._known_keys: set[str] = set()

    @property
    def records(self) -> list[dict[str, Any]]:
        """The latest ``max_records`` rows that were read."""
        with self._lock:
            return list(self._records)

    @property
    def total_read(self) -> int:
        """Number of rows that were read, with those that are no longer in memory."""
        return self._total_read

    @property
    def known_keys(self) -> set[str]:
        """All keys of the rows that were read, without ``step``."""
        with self._lock:
            return set(self._known_keys)

    def read(self) -> list[dict[str, Any]]:
        """Returns the rows since the last call; none if there is no file.

        Raises:
            DataFormatError: A whole line is no JSON object; names file and line.
        """
        with self._lock:
            stat = self._storage.stat(self._path)
            if stat is None or (stat.size, stat.mtime) == self._stamp:
                return []
            if stat.size < self._offset:
                self._restart()
            content = self._storage.read_range(self._path, self._offset - len(self._last_line))
            if content.startswith(self._last_line):
                content = content[len(self._last_line) :]
            else:
                self._restart()
                content = self._storage.read_range(self._path, 0)
            whole = content[: content.rfind(b"\n") + 1]
            name = self._storage.url(self._path)
            rows = [row for _, row in parse_lines(whole, name, first=self._lines + 1)]
            self._stamp = stat.size, stat.mtime
            self._offset += len(whole)
            self._last_line = whole[whole.rfind(b"\n", 0, -1) + 1 :] or self._last_line
            self._lines += whole.count(b"\n")
            self._total_read += len(rows)
            self._records = [*self._records, *rows][-self._max_records :]
            self._known_keys.update(key for row in rows for key in row if key != "step")
            return rows

    aread = threaded("read")

    def has_data(self) -> bool:
        """Returns whether rows were read, or the file is not empty."""
        if self._total_read:
            return True
        stat = self._storage.stat(self._path)
        return stat is not None and stat.size > 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())
