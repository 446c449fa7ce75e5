"""Messages between rank 0 and the other ranks: operations, questions about them, and results.

A message is ``(number of the operation, kind, value)``. They use sockets instead of
torch.distributed: an idle rank waits without a timeout, and the end of a process is noticed at
once.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from tinker_cookbook.exceptions import TrainingError

RESULT, ERROR, QUESTION = "result", "error", "question"

FAILING = "failing"
"""An error of a rank that has yet to keep step with the others; ``ERROR`` follows."""

Answer = Callable[..., Any]
"""``answer(rank, *values)`` answers a request that a rank sends during an operation."""


class Channel:
    """A socket. Several threads may send messages; one thread receives them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, *message: Any) -> None:
        """Sends a message; raises ``OSError`` if the other process has ended."""
        # Not ``Connection.send``, which torch patches to share tensors through file handles.
        content = pickle.dumps(message)
        with self._sending:
            self._connection.send_bytes(content)

    def receive(self) -> Any:
        """Returns the next message; raises ``EOFError`` or ``OSError`` once the peer has ended."""
        return pickle.loads(self._connection.recv_bytes())

    def waits(self, seconds: float) -> bool:
        """Returns whether a message arrives within ``seconds``."""
        return self._connection.poll(seconds)


class Call:
    """An operation that other ranks run."""

    def __init__(self, ranks: Iterable[int], answer: Answer | None) -> None:
        self._futures: dict[int, Future[Any]] = {rank: Future() for rank in ranks}
        self._answer = answer
        self._failing: Future[None] = Future()
        """Has the first error of a rank as soon as that is known."""

    def wait(self) -> dict[int, Any]:
        """Returns the result of each rank; raises the error of the first rank that has one."""
        results, errors = self.outcomes()
        if errors:
            raise errors[0]
        return results

    def outcomes(self) -> tuple[dict[int, Any], list[BaseException]]:
        """Returns the results, and the errors of the ranks that failed."""
        # Wait for all ranks, even after an error: the next operation needs every rank idle.
        wait(self._futures.values())
        errors = {rank: future.exception() for rank, future in self._futures.items()}
        results = {rank: self._futures[rank].result() for rank in errors if errors[rank] is None}
        return results, [error for error in errors.values() if error is not None]

    def on_error(self, act: Callable[[Any], None]) -> None:
        """Calls ``act`` with the first error that a rank reports."""
        self._failing.add_done_callback(lambda future: act(future.exception()))

    def failing(self, error: BaseException) -> None:
        """Notes an error of a rank, which may still be running."""
        with suppress(InvalidStateError):  # another rank was first
            self._failing.set_exception(error)

    def answer(self, rank: int, values: tuple[Any, ...]) -> tuple[str, Any]:
        """Answers a rank's request; returns the kind and the value of the answer."""
        assert self._answer is not None
        try:
            return RESULT, self._answer(rank, *values)
        except Exception as error:
            return ERROR, sendable(error)

    def finish(self, rank: int, kind: str, value: Any) -> bool:
        """Records the result or the error of a rank; returns whether all have ended."""
        if kind == ERROR:
            self.failing(value)
            self._futures[rank].set_exception(value)
        else:
            self._futures[rank].set_result(value)
        return all(future.done() for future in self._futures.values())


def sendable(error: BaseException) -> BaseException:
    """Returns ``error``, or a ``TrainingError`` with its text if it cannot be unpickled
    elsewhere."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        return error if str(copy) == str(error) else _as_training_error(error)
    except Exception:  # pickling a user's class may raise anything
        return _as_training_error(error)


def _as_training_error(error: BaseException) -> TrainingError:
    return TrainingError(f"{type(error).__name__}: {error}")
