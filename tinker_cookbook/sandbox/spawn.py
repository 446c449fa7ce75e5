"""Starts the processes of sandboxes, which end with this program."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["spawn"]


class _Spawner(threading.Thread):
    """Starts all processes from one thread that lives as long as the program.

    The kernel ends ``--die-with-parent`` processes with the *thread* that started them, so a
    thread of a pool, or of an event loop, would take its sandboxes along.
    """

    def __init__(self) -> None:
        super().__init__(name="sandbox-spawner", daemon=True)
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self.process = os.getpid()
        self.start()

    def run(self) -> None:
        while True:
            function, future = self._work.get()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    def call(self, function: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._work.put((function, future))
        return future.result()


_spawner: _Spawner | None = None
_spawner_lock = threading.Lock()


def spawn(command: list[str], descriptors: list[int], errors: int) -> subprocess.Popen[bytes]:
    """Starts ``command`` with further descriptors, and ``errors`` as its stderr."""
    global _spawner
    with _spawner_lock:
        # A fork has the object, but not its thread.
        if _spawner is None or _spawner.process != os.getpid():
            _spawner = _Spawner()
    return _spawner.call(
        lambda: subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=descriptors,
            env={
                "LANG": "C.UTF-8",
                "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
                "PYTHONHASHSEED": "0",
            },
            start_new_session=True,
        )
    )
