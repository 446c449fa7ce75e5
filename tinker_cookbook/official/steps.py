"""Code that is offered blocking and awaitable has one body.

It is a generator that yields each backend future it waits for, and is sent the result, or thrown
the error.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

from tinker_cookbook.backends.protocols import Future

T = TypeVar("T")


def run_blocking(steps: Generator[Future[Any], Any, T]) -> T:
    """Runs ``steps`` and waits for each future with ``.result()``."""
    try:
        future = next(steps)
        while True:
            try:
                # The error is raised at the ``yield``, so that the steps can handle it.
                value = future.result()
            except Exception as error:
                future = steps.throw(error)
            else:
                future = steps.send(value)
    except StopIteration as stop:
        return stop.value


async def run_async(steps: Generator[Future[Any], Any, T]) -> T:
    """Runs ``steps`` and awaits each future."""
    try:
        future = next(steps)
        while True:
            try:
                value = await future
            except Exception as error:
                future = steps.throw(error)
            else:
                future = steps.send(value)
    except StopIteration as stop:
        return stop.value
