"""What a run spends its time on: spans of code, as metrics, as a chart, and as a trace file.

Three ways to look at the same spans:

- ``with trace_iteration(step) as window`` collects those of one iteration;
  ``window.get_timing_metrics()`` gives ``time/NAME``
- ``save_gantt_chart_html`` draws a window as one self-contained page
- after ``trace_init`` each span also goes to a JSONL file in the Chrome trace event format, for
  https://ui.perfetto.dev (``python -m tinker_cookbook.utils.trace IN.jsonl OUT.json`` makes the
  JSON array that chrome://tracing reads)

Spans come from functions decorated with ``scope`` and from ``scope_span`` blocks. Outside of an
iteration and without ``trace_init`` both cost two look-ups and record nothing.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tinker_cookbook.utils.trace_file import TraceFile
from tinker_cookbook.utils.trace_window import IterationWindow, SpanRecord, save_gantt_chart_html

__all__ = [
    "IterationWindow",
    "ScopeContext",
    "SpanRecord",
    "convert_jsonl_to_json_main",
    "get_scope_context",
    "save_gantt_chart_html",
    "scope",
    "scope_span",
    "scope_span_sync",
    "trace_init",
    "trace_iteration",
    "trace_shutdown",
    "update_scope_context",
]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class ScopeContext:
    """What a traced function attaches to its span; the trace file has it in the span's ``args``."""

    attributes: dict[str, Any] = field(default_factory=dict)


_context: ContextVar[ScopeContext | None] = ContextVar("trace_scope", default=None)
_window: ContextVar[IterationWindow | None] = ContextVar("trace_window", default=None)
_file: TraceFile | None = None


def trace_init(flush_interval_sec: float = 1.0, output_file: str = "trace_events.jsonl") -> None:
    """Writes spans to a file from here on, in this process; the file is added to.

    Args:
        flush_interval_sec: Longest time that a span waits in memory.
        output_file: Where to.

    Raises:
        OSError: The file cannot be written.
    """
    global _file
    trace_shutdown()
    _file = TraceFile(output_file, flush_interval_sec)


def trace_shutdown() -> None:
    """Writes what waits and closes the file; without one nothing happens."""
    global _file
    done, _file = _file, None
    if done is not None:
        done.close()


@contextmanager
def trace_iteration(step: int) -> Iterator[IterationWindow]:
    """Collects the spans of the block, those of tasks that it starts included.

    Args:
        step: Number of the iteration, for the reader of the code.
    """
    window = IterationWindow()
    token = _window.set(window)
    started = time.perf_counter()
    try:
        yield window
    finally:
        window.finish(time.perf_counter() - started)
        _window.reset(token)


@contextmanager
def scope_span_sync(name: str) -> Iterator[None]:
    """Records the block as a span."""
    file, window = _file, _window.get()
    if file is None and window is None:
        yield
        return
    attached = ScopeContext()
    token = _context.set(attached)
    track, started = _track(), time.perf_counter()
    if file is not None:
        file.begin(name, track, threading.current_thread(), started)
    try:
        yield
    finally:
        ended = time.perf_counter()
        _context.reset(token)
        if file is not None:
            file.end(name, track, threading.current_thread(), ended, attached.attributes)
        if window is not None:
            window.record_span(name, started, ended)


@asynccontextmanager
async def scope_span(name: str) -> AsyncIterator[None]:
    """As :func:`scope_span_sync`, for ``async with``."""
    with scope_span_sync(name):
        yield


def scope(func: F) -> F:
    """Decorates a function, plain or ``async``: each call is a span of its name."""
    if inspect.iscoroutinefunction(func):

        @functools.wraps(func)
        async def traced_async(*args: Any, **kwargs: Any) -> Any:
            with scope_span_sync(func.__name__):
                return await func(*args, **kwargs)

        return traced_async  # type: ignore[return-value]

    @functools.wraps(func)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with scope_span_sync(func.__name__):
            return func(*args, **kwargs)

    return traced  # type: ignore[return-value]


def get_scope_context() -> ScopeContext:
    """The context of the innermost span; where nothing is recorded, one that is thrown away."""
    return _context.get() or ScopeContext()


def update_scope_context(values: dict[str, Any]) -> None:
    """Attaches values to the innermost span."""
    get_scope_context().attributes.update(values)


def _track() -> str:
    """Spans of one asyncio task are nested in each other, those of two tasks overlap: so each task
    has a track of its own, and so has code outside of any."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        task = None
    return task.get_name() if task is not None else f"sync:{threading.current_thread().name}"


def convert_jsonl_to_json_main() -> None:
    """The command: reads a file of events, one a line, and writes them as one JSON array."""
    if len(sys.argv) != 3:
        sys.exit("usage: python -m tinker_cookbook.utils.trace EVENTS.jsonl OUT.json")
    lines = Path(sys.argv[1]).read_text("utf-8").splitlines()
    Path(sys.argv[2]).write_text(json.dumps([json.loads(line) for line in lines]), "utf-8")
    print(f"{sys.argv[2]} can be opened in https://ui.perfetto.dev or chrome://tracing")


if __name__ == "__main__":
    convert_jsonl_to_json_main()
