"""Writes the spans of a run, according to its settings; see ``utils.trace``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tinker_cookbook.run.jsonl import trim_rows
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
    """Writes the spans of each iteration as a line of ``timing_spans.jsonl``.

    With ``enable_trace`` every span is also written to ``trace_events.jsonl``. Every
    ``span_chart_every`` steps the chart of the iteration is written to
    ``iteration_NNNNNN/timing_gantt.html``, as in the official cookbook.
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
        # A resumed run or a fork writes these steps again.
        trim_rows(self._folder / SPANS_FILE, lambda row: row["step"] < step)
        # One window for the run: tasks that last longer than an iteration keep that in which they
        # started.
        self._window = self._stack.enter_context(trace_iteration(step))

    def next(self, step: int) -> None:
        """Ends iteration ``step`` and writes the spans that have ended since the call before."""
        if self._window is None:
            return
        done = IterationWindow()
        done.merge_spans(self._window.take_spans())
        done.write_spans_jsonl(self._folder / SPANS_FILE, step)
        if self._chart_every > 0 and step % self._chart_every == 0:
            folder = self._folder / f"iteration_{step:06d}"
            folder.mkdir(exist_ok=True)
            save_gantt_chart_html(done, step, folder / CHART_FILE)

    def close(self) -> None:
        """Ends the recording; spans of an unfinished iteration are only in the trace file."""
        self._window = None
        self._stack.close()
        if self._enabled:
            trace_shutdown()
