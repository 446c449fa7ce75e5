"""Traces where a run spends its time: spans as metrics, as a chart, and as a trace file.

Three ways to look at the same spans:

- ``with trace_iteration(step) as window`` collects the spans of one iteration;
  ``window.get_timing_metrics()`` gives ``time/NAME``
- ``save_gantt_chart_html`` writes a chart of a window as one self-contained page; the page of
  ``tinker_cookbook.view`` has the charts of all steps
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
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from tinker_cookbook.leaves import load_leaf
from tinker_cookbook.run.jsonl import append_row
from tinker_cookbook.run.loggers import RunStore

__all__ = [
    "EventType",
    "IterationWindow",
    "ScopeContext",
    "SpanRecord",
    "TraceCollector",
    "TraceEvent",
    "convert_jsonl_to_json_main",
    "get_scope_context",
    "save_gantt_chart_html",
    "scope",
    "scope_span",
    "scope_span_sync",
    "trace_context",
    "trace_init",
    "trace_iteration",
    "trace_shutdown",
    "update_scope_context",
]


class EventType(StrEnum):
    """Kinds of trace events."""

    BEGIN = "B"
    END = "E"
    METADATA = "M"


@dataclass
class TraceEvent:
    """One event of a trace file, in the Chrome trace event format."""

    name: str
    ph: EventType
    pid: int
    """Group of tracks."""
    tid: int
    """Track."""
    ts: float
    """Microseconds."""
    args: dict[str, Any] = field(default_factory=dict)
    cat: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the event as JSON values."""
        return {name: value for name, value in vars(self).items() if value is not None}


class TraceCollector:
    """Writes trace events to a file.

    In the format a "process" is a group of tracks and a "thread" is a track. Here a group is a
    thread of this process, and a track is an asyncio task on it, or its code outside of any.

    Args:
        flush_interval_sec: Of the official cookbook. It is not used: each event is written at once.
        output_file: The file; events are appended, so a resumed run continues it.
    """

    def __init__(
        self, flush_interval_sec: float = 1.0, output_file: str = "trace_events.jsonl"
    ) -> None:
        # A buffer of one line, so that a killed process has written all of its events.
        self._file = Path(output_file).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._lock = threading.Lock()
        # Small numbers: viewers do not group well by the large ids of the operating system.
        self._groups: dict[int, int] = {}
        self._tracks: dict[tuple[int, str], int] = {}

    def shutdown(self) -> None:
        """Closes the file; later events are dropped."""
        with self._lock:
            self._file.close()

    def add(
        self,
        phase: EventType,
        name: str,
        track: str,
        thread: threading.Thread,
        at: float,
        args: dict[str, Any],
    ) -> None:
        """Adds the start or the end of a span.

        ``at`` is in seconds of ``time.perf_counter``; ``args`` are attributes of the span.
        """
        with self._lock:
            # A thread may outlive the trace.
            if self._file.closed:
                return
            # The names of groups and tracks are events too, which come before their first span.
            group = self._groups.get(thread.ident or 0)
            if group is None:
                group = self._groups[thread.ident or 0] = len(self._groups)
                self._name("process_name", group, 0, f"{thread.name} Thread")
            number = self._tracks.get((group, track))
            if number is None:
                number = self._tracks[group, track] = len(self._tracks) + 1
                self._name("thread_name", group, number, track)
            attributes = {"track": track, "thread": thread.name, **args}
            self._write(TraceEvent(name, phase, group, number, at * 1e6, attributes, "async"))

    def _name(self, kind: str, group: int, track: int, name: str) -> None:
        self._write(TraceEvent(kind, EventType.METADATA, group, track, 0, {"name": name}))

    def _write(self, event: TraceEvent) -> None:
        # Attributes may be anything; what JSON does not know is written as text.
        self._file.write(json.dumps(event.to_dict(), default=str) + "\n")


@dataclass(frozen=True)
class SpanRecord:
    """A finished span.

    ``start_time`` and ``end_time`` are seconds of ``time.perf_counter``: exact, and comparable only
    within this process. ``wall_start`` and ``wall_end`` are seconds since the epoch.
    """

    name: str
    start_time: float
    end_time: float
    wall_start: float
    wall_end: float

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end_time - self.start_time


class IterationWindow:
    """Collects spans; may be used by several threads."""

    def __init__(self) -> None:
        # Each use of it is one operation of a list, which other threads cannot divide.
        self.spans: list[SpanRecord] = []
        self._total_time: float | None = None

    def record_span(self, name: str, start_time: float, end_time: float) -> None:
        """Adds a span, with its times in seconds of ``time.perf_counter``."""
        # Read for each span: the wall clock may be adjusted while a run lasts hours.
        offset = time.time() - time.perf_counter()
        span = SpanRecord(name, start_time, end_time, start_time + offset, end_time + offset)
        self.merge_spans([span])

    def merge_spans(self, spans: Sequence[SpanRecord]) -> None:
        """Adds spans that were collected elsewhere, for example in a worker process."""
        self.spans.extend(spans)

    def take_spans(self) -> list[SpanRecord]:
        """Removes the spans that it has collected, and returns them."""
        taken, self.spans = self.spans, []
        return taken

    def finish(self, total_seconds: float) -> None:
        """Sets the duration of the whole iteration."""
        self._total_time = total_seconds

    def aggregate(self) -> dict[str, float]:
        """Returns ``time/NAME`` in seconds; for a name with several spans ``time/NAME:total``,
        ``:count``, ``:mean`` and ``:max``."""
        by_name: dict[str, list[float]] = {}
        for span in [*self.spans]:
            by_name.setdefault(span.name, []).append(span.seconds)
        metrics: dict[str, float] = {}
        for name, seconds in by_name.items():
            if len(seconds) == 1:
                metrics[f"time/{name}"] = seconds[0]
                continue
            metrics[f"time/{name}:total"] = sum(seconds)
            metrics[f"time/{name}:count"] = len(seconds)
            metrics[f"time/{name}:mean"] = sum(seconds) / len(seconds)
            metrics[f"time/{name}:max"] = max(seconds)
        return metrics

    def get_timing_metrics(self) -> dict[str, float]:
        """Returns :meth:`aggregate`, and ``time/total`` once the iteration is finished."""
        total = {} if self._total_time is None else {"time/total": self._total_time}
        return self.aggregate() | total

    def get_span_dicts(self) -> list[dict[str, Any]]:
        """Returns the spans for JSON: ``name``, ``duration``, and ``wall_start`` and
        ``wall_end`` in seconds from the first one's start."""
        spans = [*self.spans]
        first = min((span.wall_start for span in spans), default=0.0)
        return [
            {
                "name": span.name,
                "duration": span.seconds,
                "wall_start": span.wall_start - first,
                "wall_end": span.wall_end - first,
            }
            for span in spans
        ]

    def get_span_records(self) -> list[dict[str, Any]]:
        """Returns the spans for a timeline: ``task``, ``start`` and ``end`` as dates from
        2000-01-01."""
        origin = datetime(2000, 1, 1)
        return [
            {
                "task": span["name"],
                "start": origin + timedelta(seconds=span["wall_start"]),
                "end": origin + timedelta(seconds=span["wall_end"]),
            }
            for span in self.get_span_dicts()
        ]

    def write_spans_jsonl(self, path: Path | str, step: int) -> None:
        """Appends ``{"step": …, "spans": […]}`` to a file, if there are spans."""
        if spans := self.get_span_dicts():
            append_row(path, {"step": step, "spans": spans})

    def save_timing(self, step: int, *, store: RunStore | None) -> None:
        """Writes the spans of a step to the store of the run, if there is one."""
        if store is not None and (spans := self.get_span_dicts()):
            store.write_timing_spans(step, spans)


def save_gantt_chart_html(window: IterationWindow, step: int, path: Path | str) -> None:
    """Writes a chart of the spans over time, a row for each name, as one self-contained page.

    Nothing is written if there are no spans. ``python -m tinker_cookbook.view`` shows the same
    chart of each step in ``timing_spans.jsonl``.

    Args:
        window: The iteration.
        step: Step number in the title.
        path: The HTML file.
    """
    if spans := window.get_span_dicts():
        load_leaf("view.report", "a chart of the spans").write_chart(step, spans, Path(path))


F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class ScopeContext:
    """Attributes of a span; the trace file has them in the span's ``args``."""

    attributes: dict[str, Any] = field(default_factory=dict)


trace_context: ContextVar[ScopeContext | None] = ContextVar("trace_context", default=None)
"""Context of the innermost span."""
_window: ContextVar[IterationWindow | None] = ContextVar("trace_window", default=None)
_file: TraceCollector | None = None


def trace_init(flush_interval_sec: float = 1.0, output_file: str = "trace_events.jsonl") -> None:
    """Writes the spans of this process to a file from now on; events are appended.

    Raises:
        OSError: The file cannot be written.
    """
    global _file
    # A second call changes the file.
    trace_shutdown()
    _file = TraceCollector(flush_interval_sec, output_file)


def trace_shutdown() -> None:
    """Writes the remaining events and closes the file, if one is open."""
    global _file
    done, _file = _file, None
    if done is not None:
        done.shutdown()


@contextmanager
def trace_iteration(step: int) -> Iterator[IterationWindow]:
    """Collects the spans of the block and of the tasks that it starts; ``step`` is not used."""
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
    # Read once: the end goes to the file that has the start, even if tracing ends in between.
    file, window = _file, _window.get()
    if file is None and window is None:
        yield
        return
    attached = ScopeContext()
    token = trace_context.set(attached)
    track, started = _track(), time.perf_counter()
    if file is not None:
        file.add(EventType.BEGIN, name, track, threading.current_thread(), started, {})
    try:
        yield
    finally:
        ended = time.perf_counter()
        trace_context.reset(token)
        if file is not None:
            file.add(
                EventType.END, name, track, threading.current_thread(), ended, attached.attributes
            )
        if window is not None:
            window.record_span(name, started, ended)


@asynccontextmanager
async def scope_span(name: str) -> AsyncIterator[None]:
    """As :func:`scope_span_sync`, for ``async with``."""
    with scope_span_sync(name):
        yield


def scope(func: F) -> F:
    """Decorates a function, plain or ``async``, so that each call is a span of its name."""
    # A plain wrapper would end the span when the coroutine is created, before it runs.
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
    """Returns the context of the innermost span, or an unused one if nothing is recorded."""
    return trace_context.get() or ScopeContext()


def update_scope_context(values: dict[str, Any]) -> None:
    """Attaches values to the innermost span."""
    get_scope_context().attributes.update(values)


def _track() -> str:
    """Returns the track of the running code.

    Spans of one asyncio task are nested, spans of two tasks may overlap. Each task therefore has
    its own track, as has the code of a thread outside tasks.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        task = None
    return task.get_name() if task is not None else f"sync:{threading.current_thread().name}"


def convert_jsonl_to_json_main() -> None:
    """Command line: converts a file of events, one a line, to one JSON array."""
    if len(sys.argv) != 3:
        sys.exit("usage: python -m tinker_cookbook.utils.trace EVENTS.jsonl OUT.json")
    lines = Path(sys.argv[1]).read_text("utf-8").splitlines()
    Path(sys.argv[2]).write_text(json.dumps([json.loads(line) for line in lines]), "utf-8")
    print(f"{sys.argv[2]} can be opened in https://ui.perfetto.dev or chrome://tracing")


if __name__ == "__main__":
    convert_jsonl_to_json_main()
