"""Takes the scope of :func:`tinker_cookbook.capture.scope.capture` into threads.

A new thread, and a task of a thread pool, otherwise starts without one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tinker_cookbook.capture.scope import current_scope, replace_scope

_originals: dict[type, Callable[..., Any]] = {}


def instrument_threads() -> None:
    """Makes ``threading.Thread.start`` and ``ThreadPoolExecutor.submit`` keep the caller's scope.

    ``loop.run_in_executor`` uses the latter. A second call does nothing.
    """
    if not _originals:
        for owner, (name, keeping) in _METHODS.items():
            _originals[owner] = getattr(owner, name)
            setattr(owner, name, keeping(_originals[owner]))


def threads_instrumented() -> bool:
    """Returns whether :func:`instrument_threads` is in effect."""
    return bool(_originals)


def uninstrument_threads() -> None:
    """Undoes :func:`instrument_threads`, if it is in effect."""
    while _originals:
        owner, original = _originals.popitem()
        setattr(owner, _METHODS[owner][0], original)


def _keeping_start(original: Callable[[threading.Thread], None]) -> Callable[..., None]:
    @functools.wraps(original)
    def start(self: threading.Thread) -> None:
        scope, run = current_scope(), self.run

        def run_in_scope() -> None:
            vars(self).pop("run", None)  # the thread would refer to itself
            with replace_scope(scope):
                run()

        # On the object, so that it also covers subclasses with a ``run`` of their own.
        self.run = run_in_scope
        try:
            original(self)
        except BaseException:
            vars(self).pop("run", None)
            raise

    return start


def _keeping_submit(original: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    @functools.wraps(original)
    def submit(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        scope = current_scope()

        def run_in_scope(*args: Any, **kwargs: Any) -> Any:
            with replace_scope(scope):
                return fn(*args, **kwargs)

        # A thread of the pool outlives this task, so it starts without the task's scope.
        with replace_scope({}):
            return original(self, run_in_scope, *args, **kwargs)

    return submit


_METHODS: dict[type, tuple[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    threading.Thread: ("start", _keeping_start),
    ThreadPoolExecutor: ("submit", _keeping_submit),
}
