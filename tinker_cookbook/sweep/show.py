"""What a person sees while a sweep runs: a live table, or lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.live import Live
from rich.table import Table
from rich.text import Text

from tinker_cookbook.sweep.jobs import Job, State
from tinker_cookbook.utils.terminal import format_seconds, get_console

if TYPE_CHECKING:
    from rich.console import Console

_LINES_EVERY_SECONDS = 30.0
_STYLES: dict[State, str] = {
    "waiting": "dim",
    "running": "cyan",
    "resumed": "cyan",
    "done": "green",
    "failed": "bold red",
}
_FIRST: dict[State, int] = {"failed": 0, "running": 1, "resumed": 1, "waiting": 2, "done": 3}
_ROOM_AROUND_TABLE = 7  # borders, heading, the line below, the cursor's


class SweepDisplay:
    """Shows the runs of a sweep.

    Args:
        jobs: The runs; they are looked at again and again.
        console: By default the shared one on standard output.
    """

    def __init__(self, jobs: Sequence[Job], console: Console | None = None) -> None:
        self._jobs = jobs
        self._console = console or get_console()
        self._live: Live | None = None
        self._said_at = time.monotonic()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, get_renderable=self._table, refresh_per_second=4
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def changed(self, job: Job) -> None:
        """A run has begun or ended."""
        if self._live is None:
            self._say(job)

    def looked(self) -> None:
        """Time has passed."""
        if self._live is None and time.monotonic() - self._said_at >= _LINES_EVERY_SECONDS:
            self._said_at = time.monotonic()
            for job in self._jobs:
                if job.process is not None:
                    self._say(job)

    def _say(self, job: Job) -> None:
        parts = [f"{job.state:8}", job.run.name, *_figures(job)]
        line = "  ".join(part for part in parts if part)
        self._console.print(line, markup=False, soft_wrap=True)

    def _table(self) -> Table:
        return runs_table(self._jobs, self._console.height - _ROOM_AROUND_TABLE)


def runs_table(jobs: Sequence[Job], room: int) -> Table:
    """Returns the runs, at most ``room`` of them; those that need looking at have precedence."""
    room = max(room, 1)
    by_need = sorted(range(len(jobs)), key=lambda index: _FIRST[jobs[index].state])
    shown = sorted(by_need[:room])
    counts = {state: sum(job.state == state for job in jobs) for state in _STYLES}
    caption = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    table = Table(caption=caption, caption_justify="left")
    table.add_column("run", overflow="fold")
    for name in ("state", "step", "metric", "time"):
        table.add_column(name, no_wrap=True, justify="left" if name == "state" else "right")
    for index in shown:
        job = jobs[index]
        state = Text(job.state, style=_STYLES[job.state])
        table.add_row(Text(job.run.name), state, *(Text(part) for part in _figures(job)))
    return table


def _figures(job: Job) -> tuple[str, str, str]:
    """Steps, the last metric, and the time."""
    step = "" if job.watch.step is None else str(job.watch.step)
    if step and job.watch.total is not None:
        step += f"/{job.watch.total}"
    metric = job.watch.metric()
    shown = "" if metric is None else f"{metric[0]} {metric[1]:.4g}"
    return step, shown, format_seconds(job.seconds) if job.seconds else ""
