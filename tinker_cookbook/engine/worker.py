"""Worker thread of the engine: runs operations in order, and sampling steps between them.

Operations (training passes, steps, loading, saving) of one lane run in the order of submission.
Lanes alternate after each operation, so a run with a long queue does not delay others. Operations
that come next in their lanes may be computed together (``Joinable``). Sampling is not an operation:
between operations, and at the pauses of long ones, the running batches get as much time as the
operations took, and all the time while no operation is queued.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

_EXIT_SECONDS = 5.0
"""Seconds that the exit of the process waits for a sampling step or an interrupted operation."""


@dataclass(frozen=True)
class Joinable:
    """Makes an operation computable together with others that have an equal ``key``.

    ``together`` receives the ``part`` of each operation. When an operation is complete, it yields
    its index and its result or exception.
    """

    key: object
    part: Any
    together: Callable[[Sequence[Any]], Iterable[tuple[int, Any]]]


@dataclass(frozen=True)
class _Operation:
    work: Callable[[], Any]
    future: Future[Any]
    joinable: Joinable | None


class Worker:
    """Runs operations and, between them, ``sample``: one sampling step.

    ``sample`` returns whether it had work; ``start`` runs first in the thread, ``end`` last.
    """

    def __init__(
        self, start: Callable[[], None], sample: Callable[[], bool], end: Callable[[], None]
    ) -> None:
        self._start, self._sample, self._end = start, sample, end
        self._lanes: dict[Hashable, deque[_Operation]] = {}  # lanes with work, the next one first
        self._wake = threading.Condition()
        self._woken = self._closed = False
        self._pause_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        _workers.add(self)

    def submit(
        self, work: Callable[[], Any], lane: Hashable = None, joinable: Joinable | None = None
    ) -> Future[Any]:
        """Queues an operation at the end of its lane; returns immediately."""
        future: Future[Any] = Future()
        with self._wake:
            self._require_open()
            waiting = self._lanes.setdefault(lane, deque())
            waiting.append(_Operation(work, future, joinable))
            self._wake.notify()
        return future

    def wake(self) -> None:
        """Wakes the thread for new sampling requests."""
        with self._wake:
            self._require_open()
            self._woken = True
            self._wake.notify()

    def pause(self) -> None:
        """Yields to sampling; long operations call it between their parts."""
        # Only an operation on this thread can share its time.
        if threading.current_thread() is not self._thread or self._pause_began is None:
            return
        # Sample as long as the operation ran since the last pause, so that sampling gets half the
        # time.
        self._sample_for(time.monotonic() - self._pause_began)
        self._pause_began = time.monotonic()

    def close(self, wait: bool = True) -> None:
        """Drops queued operations; with ``wait`` waits for the running one."""
        with self._wake:
            self._closed = True
            dropped, self._lanes = self._lanes, {}
            self._wake.notify()
        for operation in itertools.chain(*dropped.values()):
            operation.future.cancel()
        # Callbacks of futures run on the worker and may close it; a thread cannot join itself.
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()

    def join(self, seconds: float) -> None:
        """Waits until the thread has ended, at most ``seconds`` seconds."""
        self._thread.join(seconds)

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed; connect again for a new one")

    def _run(self) -> None:
        self._start()
        idle = True
        while True:
            with self._wake:
                # Wait only if the last sampling step found nothing to do.
                while idle and not (self._lanes or self._woken or self._closed):
                    self._wake.wait()
                if self._closed:
                    break
                self._woken = False
                operations = self._take_next() if self._lanes else []
            # Without operations, sampling gets all the time; otherwise they share it.
            if not operations:
                idle = not self._sample()
            else:
                self._operate(operations)
                idle = False
        self._end()  # on this thread, which owns the running batches

    def _take_next(self) -> list[_Operation]:
        """Removes the next lane's first operation, and first ones of other lanes that join it."""
        lane, *others = self._lanes
        out = [self._take_first(lane)]
        if (joinable := out[0].joinable) is not None:
            for other in others:
                head = self._lanes[other][0].joinable
                if head is not None and head.key == joinable.key:
                    out.append(self._take_first(other))
        return out

    def _take_first(self, lane: Hashable) -> _Operation:
        # The lane then goes to the end of the order, so that lanes alternate.
        waiting = self._lanes.pop(lane)
        operation = waiting.popleft()
        if waiting:
            self._lanes[lane] = waiting
        return operation

    def finish_operations(self) -> None:
        """Waits until all submitted operations are complete."""
        with self._wake:
            if self._closed:
                return
            lanes = list(self._lanes)
        # Lanes keep their order: when an operation at the end has run, all before it are complete.
        for last in [self.submit(lambda: None, lane) for lane in (None, *lanes)]:
            last.result()

    def _operate(self, operations: list[_Operation]) -> None:
        # From here on, the futures cannot be cancelled, because later operations depend on these.
        operations = [one for one in operations if one.future.set_running_or_notify_cancel()]
        if not operations:
            return
        self._pause_began = time.monotonic()
        if len(operations) == 1:
            _compute(operations[0])
        else:
            _compute_together(operations)
        del operations  # their results and errors may keep tensors alive
        # Sample for as long as the last part of the operation took.
        self._sample_for(time.monotonic() - self._pause_began)
        self._pause_began = None

    def _sample_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._closed and self._sample() and time.monotonic() < until:
            pass


def _compute(operation: _Operation) -> None:
    work, future = operation.work, operation.future
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
        del error, work, future, operation  # a traceback would keep tensors alive
    else:
        future.set_result(result)


def _compute_together(operations: Sequence[_Operation]) -> None:
    found = [one.joinable for one in operations if one.joinable is not None]
    left = {number: one.future for number, one in enumerate(operations)}
    try:
        for number, result in found[0].together([one.part for one in found]):
            future = left.pop(number)
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)
    except BaseException as error:
        for future in left.values():
            future.set_exception(error)


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def finish_operations() -> None:
    """Completes queued operations at exit, for scripts that end right after submitting a save.

    The threads must end before the interpreter, because torch aborts the process if it is stopped
    inside one of its functions.
    """
    # Close all workers before joining the first, so that their threads end concurrently.
    for worker in list(_workers):
        worker.finish_operations()
        worker.close(wait=False)
    for worker in list(_workers):
        worker.join(_EXIT_SECONDS)
