"""Spans as Chrome trace events in a JSONL file, written by a thread of its own."""

from __future__ import annotations

import atexit
import json
import threading
from pathlib import Path
from typing import Any


class TraceFile:
    """An open trace file; events are handed to a background thread, which writes them.

    In the format a "process" is a group of tracks and a "thread" is a track. Here a group is a
    thread of this process, and a track is an asyncio task on it, or its code outside of any.

    Args:
        path: The file, which is added to: a continued run goes on in it.
        interval: Longest time in seconds that an event waits in memory.
    """

    def __init__(self, path: str, interval: float) -> None:
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._lock = threading.Lock()
        self._waiting: list[dict[str, Any]] = []
        # Small numbers: viewers group badly by the large ones of the operating system.
        self._groups: dict[int, int] = {}
        self._tracks: dict[tuple[int, str], int] = {}
        self._closed = threading.Event()
        self._interval = interval
        self._writer = threading.Thread(target=self._write_on, name="trace-writer", daemon=True)
        self._writer.start()
        atexit.register(self.close)

    def begin(self, name: str, track: str, thread: threading.Thread, at: float) -> None:
        """A span begins; ``at`` is in seconds of ``time.perf_counter``."""
        self._add("B", name, track, thread, at, {})

    def end(
        self, name: str, track: str, thread: threading.Thread, at: float, args: dict[str, Any]
    ) -> None:
        """The span ends; ``args`` is what its code attached to it."""
        self._add("E", name, track, thread, at, args)

    def close(self) -> None:
        """Writes what waits. A second call does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._writer.join(timeout=5.0)
        self._flush()
        self._file.close()
        atexit.unregister(self.close)

    def _add(
        self,
        phase: str,
        name: str,
        track: str,
        thread: threading.Thread,
        at: float,
        args: dict[str, Any],
    ) -> None:
        with self._lock:
            group = self._groups.get(thread.ident or 0)
            if group is None:
                group = self._groups[thread.ident or 0] = len(self._groups)
                self._name("process_name", group, 0, f"{thread.name} Thread")
            number = self._tracks.get((group, track))
            if number is None:
                number = self._tracks[group, track] = len(self._tracks) + 1
                self._name("thread_name", group, number, track)
            self._waiting.append(
                {
                    "name": name,
                    "cat": "async",
                    "ph": phase,
                    "pid": group,
                    "tid": number,
                    "ts": at * 1e6,  # the format counts microseconds
                    "args": {"track": track, "thread": thread.name, **args},
                }
            )

    def _name(self, kind: str, group: int, track: int, name: str) -> None:
        event = {"name": kind, "ph": "M", "pid": group, "tid": track, "ts": 0}
        self._waiting.append({**event, "args": {"name": name}})

    def _write_on(self) -> None:
        while not self._closed.wait(self._interval):
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            events, self._waiting = self._waiting, []
        # Attributes may be anything; what JSON does not know is written as text.
        self._file.writelines(json.dumps(event, default=str) + "\n" for event in events)
        self._file.flush()
