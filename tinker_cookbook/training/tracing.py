"""Writes the spans of a run, according to its settings; see ``utils.trace``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tinker_cookbook.run.paths import EVENTS_FILE, SPANS_FILE, local_path
from tinker_cookbook.utils.trace import (
    IterationWindow,
    save_gantt_chart_html,
    trace_init,
    trace_iteration,
    trace_shutdown,
)

CHART_FILE = "timing_gantt.html"


class RunTrace:
    """Collects the spans of each iteration between two calls of :meth:`next`.

    With ``enable_trace``, every span is written to ``trace_events.jsonl``. With either setting, the
    spans of an iteration are written as a line of ``timing_spans.jsonl``, and every
    ``span_chart_every`` steps they are plotted to ``iteration_NNNNNN/timing_gantt.html``. With
    neither, nothing is recorded.
    """

    def __init__(self, log_path: str, enable_trace: bool, span_chart_every: int) -> None:
        self._folder: Path = local_path(log_path)
        self._enabled, self._chart_every = enable_trace, span_chart_every
        self._stack = ExitStack()
        self._window: IterationWindow | None = None

    def start(self, step: int) -> None:
        """Starts iteration ``step``; the run's folder must exist."""
        if self._enabled:
            trace_init(output_file=str(self._folder / EVENTS_FILE))
        if self._enabled or self._chart_every > 0:
            self._window = self._stack.enter_context(trace_iteration(step))

    def next(self, step: int) -> None:
        """Ends iteration ``step``, writes its spans, and starts the next one."""
        if self._window is None:
            return
        window = self._window
        self._stack.close()
        window.write_spans_jsonl(self._folder / SPANS_FILE, step)
        if self._chart_every > 0 and step % self._chart_every == 0:
            folder = self._folder / f"iteration_{step:06d}"
            folder.mkdir(exist_ok=True)
            save_gantt_chart_html(window, step, folder / CHART_FILE)
        self._window = self._stack.enter_context(trace_iteration(step + 1))

    def close(self) -> None:
        """Ends the recording; spans of an unfinished iteration are only in the trace file."""
        self._window = None
        self._stack.close()
        if self._enabled:
            trace_shutdown()
