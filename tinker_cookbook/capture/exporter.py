"""Takes records from the program and gives them to a sink in batches, on a thread of its own."""

from __future__ import annotations

import atexit
import json
import logging
import os
import posixpath
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

logger = logging.getLogger(__name__)

CaptureRecord = dict[str, Any]
"""JSON values; ``kind`` is ``sample``, ``train_op`` or a name of the user's."""


class CaptureSink(Protocol):
    """Where records go."""

    def export(self, records: Sequence[CaptureRecord], timeout: float | None = None) -> None:
        """Stores a batch of at least one record, if possible within ``timeout`` seconds; raises if
        it fails."""
        ...


class JsonlFileSink:
    """Appends records to ``PREFIX/capture/KIND.jsonl`` in a storage of the package ``stores``."""

    def __init__(self, storage: Any, prefix: str = "") -> None:
        self._storage, self._prefix = storage, prefix

    def export(self, records: Sequence[CaptureRecord], timeout: float | None = None) -> None:
        """Appends the records of each kind in one write; ``timeout`` has no effect."""
        lines: dict[str, str] = {}
        for record in records:
            kind = str(record.get("kind", "unknown"))
            lines[kind] = lines.get(kind, "") + json.dumps(record, default=str) + "\n"
        for kind, text in lines.items():
            path = posixpath.join(self._prefix.strip("/"), "capture", f"{kind}.jsonl")
            self._storage.append(path, text.encode())


class CaptureExporter:
    """A bounded queue of records, and a thread that gives them to ``sink``.

    It neither blocks nor fails the program that is recorded. What is lost is counted: ``dropped``
    records (the queue was full, or the exporter shut down), ``export_failures`` (batches that the
    sink refused) and ``callback_failures`` (calls whose result could not be read). ``shutdown``
    logs the counts; it also runs when the program exits.

    A forked child has a queue of its own, which starts empty: the parent exports its records.

    Args:
        sink: Where the records go.
        max_queue_size: Records that may wait; later ones are dropped.
        max_batch_size: Most records of one export.
        flush_interval_sec: Longest time that a record waits for others.
        export_timeout_sec: ``timeout`` of each export.
    """

    def __init__(
        self,
        sink: CaptureSink,
        *,
        max_queue_size: int = 4096,
        max_batch_size: int = 256,
        flush_interval_sec: float = 1.0,
        export_timeout_sec: float = 10.0,
    ) -> None:
        self._sink = sink
        self._max_queue_size = max_queue_size
        self._max_batch_size = max_batch_size
        self._flush_interval_sec = flush_interval_sec
        self._export_timeout_sec = export_timeout_sec
        self._closed = False
        self._start()
        _exporters.add(self)
        atexit.register(self.shutdown)

    def _start(self) -> None:
        """Sets the counts to zero and starts the thread; again in a forked child."""
        self.dropped = self.export_failures = self.callback_failures = 0
        self._queue: deque[CaptureRecord] = deque()
        # Its lock is reentrant: the garbage collector may end a call, which adds a record, at any
        # point of this class.
        self._changed = threading.Condition()
        self._in_flight = 0  # records that the sink is storing
        self._finished = 0  # records that it has stored or refused
        self._flushes = 0  # callers that wait for an immediate export
        self._pending = 0
        self._is_failing = False
        if not self._closed:
            self._flusher = threading.Thread(target=self._work, name="capture", daemon=True)
            self._flusher.start()

    def enqueue(self, record: CaptureRecord) -> None:
        """Adds a record; returns immediately and never raises."""
        with self._changed:
            if self._closed or len(self._queue) >= self._max_queue_size:
                self.dropped += 1
                return
            self._queue.append(record)
            # The first record starts the interval, a full batch ends it.
            if len(self._queue) in (1, self._max_batch_size):
                self._changed.notify_all()

    def track_pending(self) -> None:
        """Counts a call whose record is not in the queue yet."""
        with self._changed:
            self._pending += 1

    def pending_done(self) -> None:
        """Ends a call counted by ``track_pending``."""
        with self._changed:
            self._pending -= 1
            self._changed.notify_all()

    def wait_pending(self, timeout: float | None = None) -> bool:
        """Waits for all counted calls; returns whether they ended within ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending <= 0, timeout)

    def force_flush(self, timeout: float | None = None) -> bool:
        """Waits until the sink has the records that were added before.

        Returns:
            Whether it stored them within ``timeout`` seconds; after a timeout the thread goes on.
        """
        with self._changed:
            failures = self.export_failures
            last = self._finished + self._in_flight + len(self._queue)
            self._flushes += 1
            self._changed.notify_all()
            try:
                done = self._changed.wait_for(lambda: self._finished >= last, timeout)
            finally:
                self._flushes -= 1
            return done and self.export_failures == failures

    def shutdown(self, timeout: float = 5.0) -> None:
        """Exports what waits, for at most ``timeout`` seconds. A second call does nothing."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._flusher.join(timeout)
        atexit.unregister(self.shutdown)
        left = self._in_flight + len(self._queue)
        if left or self.dropped or self.export_failures or self.callback_failures:
            logger.warning(
                "capture: not everything was recorded: %d records dropped, %d export failures, "
                "%d callback failures, %d records not exported within %g s",
                *(self.dropped, self.export_failures, self.callback_failures, left, timeout),
            )

    def _work(self) -> None:
        while batch := self._next_batch():
            self._export(batch)
            with self._changed:
                self._finished += len(batch)
                self._in_flight = 0
                self._changed.notify_all()

    def _next_batch(self) -> list[CaptureRecord]:
        """Waits for a batch; empty after the last one."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            self._changed.wait_for(
                lambda: len(self._queue) >= self._max_batch_size or self._flushes or self._closed,
                self._flush_interval_sec,
            )
            count = min(len(self._queue), self._max_batch_size)
            self._in_flight = count
            return [self._queue.popleft() for _ in range(count)]

    def _export(self, batch: list[CaptureRecord]) -> None:
        try:
            self._sink.export(batch, timeout=self._export_timeout_sec)
            self._is_failing = False
        except Exception as error:
            self.export_failures += 1
            # Once for a series of failures; ``shutdown`` has their number.
            if not self._is_failing:
                logger.warning("capture: export failed, records are lost", exc_info=error)
            self._is_failing = True


_exporters: weakref.WeakSet[CaptureExporter] = weakref.WeakSet()


def _restart_in_child() -> None:
    # A forked process has no other thread, and a lock may be held by one that is gone.
    for exporter in list(_exporters):
        exporter._start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restart_in_child)
