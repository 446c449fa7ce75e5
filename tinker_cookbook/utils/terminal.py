"""Terminal output: the shared rich console, progress display, coloured tokens."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, Self

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.utils.activity import activity
from tinker_cookbook.utils.activity import format_seconds as format_seconds
from tinker_cookbook.utils.notebooks import CellLine, in_notebook

if TYPE_CHECKING:
    from rich.console import RenderableType


class SharedConsole(Console):
    """A console that knows when something was printed last."""

    printed_at = 0.0
    """Time of ``time.monotonic``."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints, as every console does."""
        self.printed_at = time.monotonic()
        super().print(*objects, **options)


@cache
def get_console() -> SharedConsole:
    """Returns the console on standard output; it follows changes of ``sys.stdout``."""
    # A notebook gets plain text, which it joins to one output: rich's HTML would be an output for
    # each line, and a notebook does not move the cursor.
    terminal = False if in_notebook() else None
    return SharedConsole(
        soft_wrap=False, highlight=False, emoji=False, force_jupyter=False, force_terminal=terminal
    )


def print_line(text: str) -> None:
    """Prints a line as it is, without wrapping."""
    get_console().print(text, markup=False, highlight=False, soft_wrap=True)


def is_terminal() -> bool:
    """Returns whether standard output is a terminal."""
    return get_console().is_terminal


_WINDOW = 20
_WIDEST_BAR, _NARROWEST_BAR = 40, 8
_REFRESHES_PER_SECOND = 4


class Pace:
    """Speed over the last 20 updates: a slow first step or an evaluation soon drops out."""

    def __init__(self, now: float, step: int) -> None:
        self._seen: deque[tuple[float, int, int]] = deque([(now, step, 0)], maxlen=_WINDOW + 1)

    def update(self, now: float, step: int, tokens: int = 0) -> None:
        """Records that ``step`` updates are done, the last one with ``tokens`` tokens."""
        self._seen.append((now, step, self._seen[-1][2] + tokens))

    def describe(self, total_steps: int) -> list[str]:
        """Returns tokens/s and the time left, as far as they are known."""
        # From the oldest of the window to the newest: single slow steps are averaged out.
        (then, first_step, first_tokens), (now, step, tokens) = self._seen[0], self._seen[-1]
        seconds = now - then
        parts: list[str] = []
        if seconds > 0 and tokens > first_tokens:
            parts.append(f"{(tokens - first_tokens) / seconds:,.0f} tok/s")
        if seconds > 0 and step > first_step:
            left = (total_steps - step) * seconds / (step - first_step)
            parts.append(f"ETA {format_seconds(left)}")
        return parts


class ProgressDisplay:
    """A progress bar with a status and more lines below; without a terminal, one line per update.

    Args:
        total_steps: Updates of the whole run.
        initial_step: Updates done before (on resume).
        description: What is running.
        console: By default the shared one on standard output.
        min_interval_s: Without a terminal: seconds between two lines. The first and the last step
            always get one.
        clock: Seconds, monotonic.
        lines: Returns the lines below the bar, called a few times a second; default: what the run
            does at this moment. Lines wider than the terminal are cut.
    """

    def __init__(
        self,
        total_steps: int,
        initial_step: int = 0,
        description: str = "training",
        console: Console | None = None,
        min_interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        lines: Callable[[], Sequence[Text]] | None = None,
    ) -> None:
        self.total_steps = total_steps
        self.console = console or get_console()
        self.clock = clock
        self._description = description
        self._interval = min_interval_s
        self._lines = lines or self._activity_lines
        self._step = initial_step
        self._status = f"step {initial_step}/{total_steps}"
        self._printed_at: float | None = None
        self._live: Live | None = None
        self._cell = CellLine()
        self._activity = activity()

    def start(self) -> None:
        """Shows the bar if there is a terminal."""
        # Stored, because the display renders in a thread of its own.
        self._activity = activity()
        if self.console.is_terminal:
            self._live = Live(
                console=self.console,
                get_renderable=self._render,
                refresh_per_second=_REFRESHES_PER_SECOND,
            )
            self._live.start()
            self._activity.shown += 1

    def stop(self) -> None:
        """Stops updating the bar, which stays visible."""
        live, self._live = self._live, None
        if live is not None:
            self._activity.shown -= 1
            live.stop()

    def update(self, step: int, status: str, details: str = "") -> None:
        """Shows that ``step`` updates are done.

        Args:
            step: Updates done.
            status: Text next to the bar.
            details: Text after the status if there is no terminal (and therefore no lines below).
        """
        self._step, self._status = step, status
        # The live display renders by itself a few times a second.
        if self._live is not None:
            return
        if in_notebook():
            self._cell.show(f"{self._description}: {status}  {details}".rstrip())
            return
        now, line = self.clock(), f"{status}  {details}".rstrip()
        # A file with a line for each of many short steps would be hard to read.
        waited = self._printed_at is None or now - self._printed_at >= self._interval
        if waited or step >= self.total_steps:
            self._printed_at = now
            self.console.print(f"{self._description}: {line}", markup=False, soft_wrap=True)

    def _render(self) -> RenderableType:
        width = self.console.width
        # Cells, not characters: wide characters take two columns.
        room = width - cell_len(self._description) - cell_len(self._status) - 2
        bar = ProgressBar(
            total=max(self.total_steps, 1),
            completed=self._step,
            width=max(_NARROWEST_BAR, min(_WIDEST_BAR, room)),
        )
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        grid.add_row(Text(self._description), bar, Text(self._status))
        rows: list[RenderableType] = [grid]
        for line in self._lines():
            line.truncate(width, overflow="ellipsis")
            rows.append(line)
        return Group(*rows)

    def _activity_lines(self) -> Sequence[Text]:
        line = self._activity.line()
        return [Text(line)] if line else []


class TrainingProgress(ProgressDisplay):
    """Shows step, loss, tokens/s and the time left; a context manager."""

    def __enter__(self) -> Self:
        self.restart()
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def restart(self) -> None:
        """Measures the speed from now on, after an evaluation before the first step."""
        self._pace = Pace(self.clock(), self._step)

    def show(self, step: int, loss: float | None = None, tokens: int = 0) -> None:
        """Shows that ``step`` updates are done, with the loss and the tokens of the last one."""
        self._pace.update(self.clock(), step, tokens)
        parts = [f"step {step}/{self.total_steps}"]
        if loss is not None:
            parts.append(f"loss {loss:.4f}")
        self.update(step, "  ".join([*parts, *self._pace.describe(self.total_steps)]))


# Green for trained tokens, yellow for context, red for negative weights.
_COLORS = {1: "\x1b[32m", 0: "\x1b[33m", -1: "\x1b[31m"}
_RESET = "\x1b[0m"


def format_colorized(
    tokens: Sequence[int],
    weights: Sequence[float],
    tokenizer: Tokenizer,
    draw_newline_arrow: bool = False,
) -> str:
    """Returns the text of ``tokens``, green where the weight is above 0, yellow at 0, red below.

    Neighbours of one colour are decoded together, so that characters of several tokens are whole.

    Args:
        tokens: Token ids [T].
        weights: Weights [T].
        tokenizer: Decodes them.
        draw_newline_arrow: Show ``↵`` before each line break.

    Raises:
        ValueError: The lengths differ.
    """
    if len(tokens) != len(weights):
        raise ValueError(
            f"weights: got {len(weights)}, expected {len(tokens)}, one for each of the tokens"
        )
    parts: list[str] = []
    for sign, pairs in groupby(
        zip(tokens, weights, strict=True), key=lambda p: (p[1] > 0) - (p[1] < 0)
    ):
        text = str(tokenizer.decode([token for token, _ in pairs]))
        # Each line gets its own escape codes, since pagers reset colours at line breaks.
        for line in text.splitlines(keepends=True):
            shown = line.replace("\n", "↵\n") if draw_newline_arrow else line
            parts.append(f"{_COLORS[sign]}{shown}{_RESET}")
    return "".join(parts)
