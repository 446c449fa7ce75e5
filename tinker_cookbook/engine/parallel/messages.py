"""Messages between rank 0 and the other ranks: operations, questions about them, and results.

A message is ``(number of the operation, kind, value)``. They go through sockets and not through
torch.distributed: an idle rank waits without a timeout, and the end of a process is seen at once.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from multiprocessing.connection import Connection
from typing import Any

from tinker_cookbook.exceptions import TrainingError

RESULT, ERROR, QUESTION, ANSWER = "result", "error", "question", "answer"

Answer = Callable[..., Any]
"""``answer(rank, *values)`` of a question that a rank asks during an operation."""


class Channel:
    """A socket whose messages may be sent by several threads and are received by one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, *message: Any) -> None:
        """Sends a message; raises ``OSError`` if the other process has ended."""
        # Not ``Connection.send``: torch makes that share tensors by file handles.
        content = pickle.dumps(message)
        with self._sending:
            self._connection.send_bytes(content)

    def receive(self) -> Any:
        """Returns the next message; raises ``EOFError`` or ``OSError`` after the other's end."""
        return pickle.loads(self._connection.recv_bytes())

    def waits(self, seconds: float) -> bool:
        """Returns whether a message arrives within ``seconds``."""
        return self._connection.poll(seconds)

    def close(self) -> None:
        """Closes the socket."""
        self._connection.close()


class Call:
    """An operation that other ranks run."""

    def __init__(self, ranks: Iterable[int], answer: Answer | None) -> None:
        self._futures: dict[int, Future[Any]] = {rank: Future() for rank in ranks}
        self._answer = answer

    def wait(self) -> dict[int, Any]:
        """Returns the result of each rank; raises the error of the first rank that has one."""
        # All of them, also after an error: the next operation must find every rank idle.
        wait(self._futures.values())
        return {rank: future.result() for rank, future in self._futures.items()}

    def on_error(self, act: Callable[[BaseException], None]) -> None:
        """Calls ``act`` when a rank reports an error."""

        def look(future: Future[Any]) -> None:
            if (error := future.exception()) is not None:
                act(error)

        for future in self._futures.values():
            future.add_done_callback(look)

    def answer(self, rank: int, values: tuple[Any, ...]) -> tuple[str, Any]:
        """Returns kind and value of the answer to a question."""
        assert self._answer is not None
        try:
            return RESULT, self._answer(rank, *values)
        except Exception as error:
            return ERROR, sendable(error)

    def finish(self, rank: int, kind: str, value: Any) -> bool:
        """Records the result or the error of a rank; returns whether all have ended."""
        if kind == ERROR:
            self._futures[rank].set_exception(value)
        else:
            self._futures[rank].set_result(value)
        return all(future.done() for future in self._futures.values())


def sendable(error: BaseException) -> BaseException:
    """Returns ``error``, or a ``TrainingError`` of its text if another process cannot load it."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        return error if str(copy) == str(error) else _in_words(error)
    except Exception:  # a class may fail in any way
        return _in_words(error)


def _in_words(error: BaseException) -> TrainingError:
    return TrainingError(f"{type(error).__name__}: {error}")
