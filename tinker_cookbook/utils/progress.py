"""How far a run is: a live line on a terminal, now and then a plain one elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, Progress, TaskID, TextColumn

from tinker_cookbook.utils.console import get_console

if TYPE_CHECKING:
    from rich.console import Console

_WINDOW = 20


class TrainingProgress:
    """Shows step, loss, tokens/s and the time left.

    Rates are over the last 20 updates, so that a slow first step (compilation, cold caches) or an
    evaluation in between is forgotten soon.

    Args:
        total_steps: Updates of the whole run.
        initial_step: Updates done before (on resume).
        description: What is running.
        console: By default the shared one on standard output.
        min_interval_s: Where nobody watches: seconds between two lines. The first and the last
            step always get one.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        total_steps: int,
        initial_step: int = 0,
        description: str = "training",
        console: Console | None = None,
        min_interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self._initial = initial_step
        self._description = description
        self._console = console or get_console()
        self._interval = min_interval_s
        self._clock = clock
        self._tokens = 0
        self._seen: deque[tuple[float, int, int]] = deque(maxlen=_WINDOW + 1)
        self._printed_at: float | None = None
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Self:
        self._seen.append((self._clock(), self._initial, 0))
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[status]}"),
                console=self._console,
            )
            self._task = self._bar.add_task(
                self._description,
                total=self.total_steps,
                completed=self._initial,
                status=f"step {self._initial}/{self.total_steps}",
            )
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(self, step: int, loss: float | None = None, tokens: int = 0) -> None:
        """Says that an update is done.

        Args:
            step: Updates done, this one included.
            loss: What to show as the loss.
            tokens: Tokens of this step's batch.
        """
        now = self._clock()
        self._tokens += tokens
        self._seen.append((now, step, self._tokens))
        status = self._status(step, loss)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, status=status)
            return
        waited = self._printed_at is None or now - self._printed_at >= self._interval
        if waited or step >= self.total_steps:
            self._printed_at = now
            self._console.print(f"{self._description}: {status}", markup=False, soft_wrap=True)

    def _status(self, step: int, loss: float | None) -> str:
        parts = [f"step {step}/{self.total_steps}"]
        if loss is not None:
            parts.append(f"loss {loss:.4f}")
        (then, first_step, first_tokens), (now, _, tokens) = self._seen[0], self._seen[-1]
        seconds = now - then
        if seconds > 0:
            if tokens > first_tokens:
                parts.append(f"{(tokens - first_tokens) / seconds:,.0f} tok/s")
            if step > first_step:
                left = (self.total_steps - step) * seconds / (step - first_step)
                parts.append(f"ETA {format_seconds(left)}")
        return "  ".join(parts)


def format_seconds(seconds: float) -> str:
    """``1:02:03``, or ``2:03`` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
