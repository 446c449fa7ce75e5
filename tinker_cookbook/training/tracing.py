"""The spans of a run, written as its settings ask; see ``utils.trace``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tinker_cookbook.utils.run_folder.paths import local_path
from tinker_cookbook.utils.trace import (
    IterationWindow,
    save_gantt_chart_html,
    trace_init,
    trace_iteration,
    trace_shutdown,
)

EVENTS_FILE, SPANS_FILE, CHART_FILE = "trace_events.jsonl", "timing_spans.jsonl", "timing_gantt"


class RunTrace:
    """Collects the spans of each iteration between two calls of :meth:`next`.

    With ``enable_trace`` every span goes to ``trace_events.jsonl``. With either setting the spans
    of an iteration become a line of ``timing_spans.jsonl``, and ``span_chart_every`` draws those of
    every so many steps as ``iteration_NNNNNN/timing_gantt.html``. With neither nothing is recorded.

    Args:
        log_path: The run's folder.
        enable_trace: Write the trace file.
        span_chart_every: Steps between charts; 0 is none.
    """

    def __init__(self, log_path: str, enable_trace: bool, span_chart_every: int) -> None:
        self._folder: Path = local_path(log_path)
        self._enabled, self._chart_every = enable_trace, span_chart_every
        self._stack = ExitStack()
        self._window: IterationWindow | None = None

    @property
    def active(self) -> bool:
        """Whether anything is recorded."""
        return self._enabled or self._chart_every > 0

    def start(self, step: int) -> None:
        """The iteration that begins after ``step`` finished ones; the folder is there by now."""
        if not self.active:
            return
        if self._enabled:
            trace_init(output_file=str(self._folder / EVENTS_FILE))
        self._open(step)

    def next(self, step: int) -> None:
        """Iteration number ``step`` is done: writes its spans, and begins the next one."""
        if self._window is None:
            return
        window = self._window
        self._stack.close()
        window.write_spans_jsonl(self._folder / SPANS_FILE, step)
        if self._chart_every > 0 and step % self._chart_every == 0:
            folder = self._folder / f"iteration_{step:06d}"
            folder.mkdir(exist_ok=True)
            save_gantt_chart_html(window, step, folder / f"{CHART_FILE}.html")
        self._open(step + 1)

    def close(self) -> None:
        """Ends the recording; the spans of an unfinished iteration are in the trace file alone."""
        if self._window is not None:
            self._window = None
            self._stack.close()
        if self._enabled:
            trace_shutdown()

    def _open(self, step: int) -> None:
        self._window = self._stack.enter_context(trace_iteration(step))
