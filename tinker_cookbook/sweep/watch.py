"""How far a run is, read off the end of its ``metrics.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

METRICS = (
    "test/dpo_loss",  # before test/nll, which runs on pairs log too, of the chosen answers alone
    "test/nll",
    "test/env/all/reward/total",
    "train_mean_nll",
    "reward/total",
)
"""What to compare unless the user says: the first that the runs log."""

_TAIL_BYTES = 1 << 16
_LOWER_IS_BETTER = ("nll", "loss", "bpb", "kl", "perplexity", "error")


@dataclass
class Watch:
    """Follows one file; a look that finds it unchanged costs one ``stat``.

    Attributes:
        path: The file; it need not be there yet.
        names: Metrics to look for.
        step: Of the last row.
        total: Steps of the whole run, from the row's ``progress``; ``None`` until it is known.
        latest: The last value of each metric that was seen.
    """

    path: Path
    names: Sequence[str] = METRICS
    step: int | None = None
    total: int | None = None
    latest: dict[str, float] = field(default_factory=dict)
    _seen: tuple[int, int, int] | None = None

    def look(self) -> None:
        """Reads what is new, but never more than the last 64 KiB."""
        try:
            status = self.path.stat()
            seen = (status.st_ino, status.st_size, status.st_mtime_ns)
            if seen == self._seen:
                return
            with self.path.open("rb") as file:
                start = max(0, status.st_size - _TAIL_BYTES)
                file.seek(start)
                lines = file.read().split(b"\n")
        except OSError:
            return
        self._seen = seen
        for row in _rows(lines[1:] if start else lines):
            self._take(row)

    def metric(self) -> tuple[str, float] | None:
        """The first metric there is, and its last value."""
        return next(((name, self.latest[name]) for name in self.names if name in self.latest), None)

    def _take(self, row: dict[str, Any]) -> None:
        step, progress = row.get("step"), row.get("progress")
        if isinstance(step, int):
            self.step = step
            if isinstance(progress, (int, float)) and progress > 0 and step > 0:
                self.total = round(step / progress)
        for name in self.names:
            if isinstance(row.get(name), (int, float)):
                self.latest[name] = row[name]


def lower_is_better(metric: str) -> bool:
    """Returns whether a metric's name says so; rewards, accuracies and what is unknown are to
    rise."""
    words = metric.replace("/", "_").lower().split("_")
    return any(word in words for word in _LOWER_IS_BETTER)


def _rows(lines: list[bytes]) -> list[dict[str, Any]]:
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # empty, or just being written
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows
