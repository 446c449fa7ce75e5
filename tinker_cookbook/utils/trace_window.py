"""The spans of one iteration: their metrics, their rows, their chart."""

from __future__ import annotations

import html
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinker_cookbook.utils.loggers.base import RunStore


@dataclass(frozen=True)
class SpanRecord:
    """A span that is over.

    ``start_time`` and ``end_time`` are seconds of ``time.perf_counter``, exact and of this process
    alone; ``wall_start`` and ``wall_end`` are seconds since the epoch, which spans of other
    processes can be compared with.
    """

    name: str
    start_time: float
    end_time: float
    wall_start: float
    wall_end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_time - self.start_time


class IterationWindow:
    """Collects spans; may be used by several threads."""

    def __init__(self) -> None:
        self.spans: list[SpanRecord] = []
        self._lock = threading.Lock()
        self._total_time: float | None = None

    def record_span(self, name: str, start_time: float, end_time: float) -> None:
        """Adds a span, with its times in seconds of ``time.perf_counter``."""
        offset = time.time() - time.perf_counter()
        span = SpanRecord(name, start_time, end_time, start_time + offset, end_time + offset)
        self.merge_spans([span])

    def merge_spans(self, spans: Sequence[SpanRecord]) -> None:
        """Adds spans that were collected elsewhere, in a worker process say."""
        with self._lock:
            self.spans.extend(spans)

    def finish(self, total_seconds: float) -> None:
        """The iteration is over, and took so long."""
        self._total_time = total_seconds

    def aggregate(self) -> dict[str, float]:
        """``time/NAME`` in seconds; for a name with several spans ``time/NAME:total``,
        ``time/NAME:count``, ``time/NAME:mean`` and ``time/NAME:max``."""
        by_name: dict[str, list[float]] = {}
        for span in self._copy():
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
        """:meth:`aggregate`, and ``time/total`` once the iteration is over."""
        total = {} if self._total_time is None else {"time/total": self._total_time}
        return self.aggregate() | total

    def get_span_dicts(self) -> list[dict[str, Any]]:
        """The spans for JSON: ``name``, ``duration``, and ``wall_start`` and ``wall_end`` in
        seconds from the first one's start."""
        spans = self._copy()
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
        """The spans for a timeline: ``task``, ``start`` and ``end`` as dates from 2000-01-01."""
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
        """Adds a line ``{"step": …, "spans": […]}`` to a file; nothing where there is no span."""
        spans = self.get_span_dicts()
        if spans:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "spans": spans}) + "\n")

    def save_timing(self, step: int, *, store: RunStore | None) -> None:
        """Gives the spans of a step to the store of the run; without one nothing happens."""
        spans = self.get_span_dicts()
        if store is not None and spans:
            store.write_timing_spans(step, spans)

    def _copy(self) -> list[SpanRecord]:
        with self._lock:
            return list(self.spans)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 13px system-ui, sans-serif; margin: 1.5rem; }}
.row {{ display: flex; align-items: center; margin: 1px 0; }}
.name {{ width: 16rem; flex: none; overflow: hidden; text-overflow: ellipsis; }}
.line {{ position: relative; flex: 1; height: 1rem; background: #f3f4f6; }}
.span {{ position: absolute; top: 0; bottom: 0; min-width: 1px; background: #2563eb99; }}
</style></head><body><h1>{title}</h1><p>{total:.3f} s from left to right; hover for seconds.</p>
{rows}
</body></html>
"""


def save_gantt_chart_html(window: IterationWindow, step: int, path: Path | str) -> None:
    """Draws the spans over time, a row for each name, as one page that needs nothing else.

    Nothing is written where there is no span.

    Args:
        window: The iteration.
        step: Its number, for the title.
        path: The HTML file.
    """
    spans = window.get_span_dicts()
    if not spans:
        return
    # At least a microsecond, so that spans without duration divide by something.
    total = max(max(span["wall_end"] for span in spans), 1e-6)
    bars: dict[str, list[str]] = {}
    for span in sorted(spans, key=lambda span: span["wall_start"]):
        left = 100 * span["wall_start"] / total
        width = 100 * (span["wall_end"] - span["wall_start"]) / total
        label = f"{span['wall_start']:.3f} s, for {span['duration']:.3f} s"
        bars.setdefault(span["name"], []).append(
            f'<div class="span" title="{label}" style="left:{left:.3f}%;width:{width:.3f}%"></div>'
        )
    rows = "\n".join(
        f'<div class="row"><div class="name">{html.escape(name)}</div>'
        f'<div class="line">{"".join(parts)}</div></div>'
        for name, parts in bars.items()
    )
    page = _PAGE.format(title=f"Iteration {step}: where the time went", total=total, rows=rows)
    Path(path).write_text(page, encoding="utf-8")
