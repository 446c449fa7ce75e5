"""Output of a chat: streamed text, columns for several models, and tokens by probability."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tinker_cookbook.chat.answers import Answer, AnswerToken, Show
from tinker_cookbook.renderers import StreamingThinkingDelta
from tinker_cookbook.renderers.core.parsing import ContentDelta

_COLUMN_WIDTH = 36  # a narrower column is hard to read
_REFRESHES_PER_SECOND = 12
_DIM, _LABEL, _NOTE = "dim", "bold cyan", "yellow"

# Lower bounds of the probability, and the styles of tokens above them.
_STYLES = ((0.9, "green"), (0.5, "yellow"), (0.1, "dark_orange"), (0.0, "red"))

# Control characters in an answer could move the cursor or change the terminal's settings. Their
# symbols (U+2400 and following) are shown instead.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def printable(text: str) -> str:
    """Replaces control characters, which a terminal would execute."""
    return text.translate(_PICTURES)


def ending_note(answer: Answer, max_tokens: int) -> str:
    """Returns a note for an answer that the model did not end itself, else an empty text."""
    if answer.ending == "interrupted":
        return "[stopped]"
    if answer.ending == "length":
        count = len(answer.tokens)
        at = f"max_tokens={max_tokens}" if count >= max_tokens else "the end of the context"
        return f"[cut at {at}]"
    return ""


class Screen(ABC):
    """Output of one turn's answers; a context manager that shows them while they are sampled."""

    def __init__(self, console: Console, labels: Sequence[str], max_tokens: int) -> None:
        self.console, self.labels, self._max_tokens = console, labels, max_tokens
        self._thinking = ["" for _ in labels]  # the last piece, if it is thinking

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType
    ) -> None:
        """Ends the output."""

    def show(self, index: int) -> Show:
        """Returns the function that shows pieces of the answer of model ``index``."""

        def show(delta: ContentDelta) -> None:
            # Files get the plain text without thinking, because only colours distinguish thinking.
            plain, safe = not self.console.is_terminal, self.console.file.isatty()
            if isinstance(delta, StreamingThinkingDelta):
                if not plain:
                    self._thinking[index] = delta.thinking
                    self.add(index, Text(printable(delta.thinking), style=_DIM))
                return
            text = delta.text
            if self._thinking[index]:
                text = "\n\n" + text.lstrip("\n")
                self._thinking[index] = ""
            self.add(index, Text(printable(text) if safe else text))

        return show

    def end(self, index: int, answer: Answer) -> None:
        """Shows the end of an answer."""
        if self.console.is_terminal and (note := ending_note(answer, self._max_tokens)):
            self.add(index, Text(f" {note}", style=_NOTE))
        calls = answer.message.get("tool_calls", [])
        unparsed = answer.message.get("unparsed_tool_calls", [])
        texts = [f"{call.function.name}({call.function.arguments})" for call in calls]
        texts += [call.raw_text for call in unparsed]
        for text in texts:
            self.add(index, Text(f"\n[tool call] {printable(text)}", style=_DIM))
        self.ended(index)

    @abstractmethod
    def add(self, index: int, piece: Text) -> None:
        """Shows a piece of an answer."""

    @abstractmethod
    def ended(self, index: int) -> None:
        """Called after the last piece of an answer."""


class StreamScreen(Screen):
    """Prints answers one after the other: the first while it is sampled, then the others."""

    def __init__(self, console: Console, labels: Sequence[str], max_tokens: int) -> None:
        super().__init__(console, labels, max_tokens)
        self._waiting = [Text() for _ in labels]
        self._has_ended = [False] * len(labels)
        self._current = 0

    def __enter__(self) -> Self:
        self._print_label()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType
    ) -> None:
        if error is not None:  # start a new line for its message
            self.console.print()

    def add(self, index: int, piece: Text) -> None:
        """Prints a piece now, or after the answers before it."""
        if index == self._current:
            self._print(piece)
        else:
            self._waiting[index].append_text(piece)

    def ended(self, index: int) -> None:
        """Prints the available pieces of the next answers."""
        self._has_ended[index] = True
        while self._current < len(self.labels) and self._has_ended[self._current]:
            self.console.print()
            self._current += 1
            if self._current < len(self.labels):
                self.console.print()
                self._print_label()
                self._print(self._waiting[self._current])

    def _print_label(self) -> None:
        if len(self.labels) > 1:
            label = self.labels[self._current]
            self.console.print(Text(f"[{label}]", style=_LABEL), soft_wrap=True)

    def _print(self, piece: Text) -> None:
        if self.console.is_terminal:
            # Let the terminal wrap lines: rich does not know the column at which a piece begins.
            self.console.print(piece, end="", soft_wrap=True)
            return
        self.console.file.write(piece.plain)  # rich would replace tabs
        self.console.file.flush()


class ColumnScreen(Screen):
    """Shows answers in columns, with their last lines while they are sampled."""

    def __init__(self, console: Console, labels: Sequence[str], max_tokens: int) -> None:
        super().__init__(console, labels, max_tokens)
        self._texts = [Text() for _ in labels]
        self._live = Live(
            console=console,
            get_renderable=self._tail,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType
    ) -> None:
        # Replace the live display by the complete answers, also after an error.
        self._live.stop()
        if any(self._texts):
            self.console.print(self._table(self._texts))

    def add(self, index: int, piece: Text) -> None:
        """Appends a piece to a column; the display refreshes a few times per second."""
        self._texts[index].append_text(piece)

    def ended(self, index: int) -> None:
        """Does nothing: columns are independent."""

    def _tail(self) -> RenderableType:
        # A live display higher than the terminal could not be replaced.
        height = max(1, self.console.height - 4)
        width = self.column_width(self.console, len(self.labels))
        tails = []
        for text in self._texts:
            lines = text.wrap(self.console, width)
            tails.append(Text("\n").join(lines[-height:]))
        return self._table(tails)

    def _table(self, texts: Sequence[Text]) -> Table:
        width = self.column_width(self.console, len(self.labels))
        table = Table.grid(padding=(0, 2, 0, 0))
        for _ in self.labels:
            table.add_column(width=width, overflow="fold")
        table.add_row(*(Text(f"[{label}]", style=_LABEL) for label in self.labels))
        table.add_row(*texts)
        return table

    @staticmethod
    def column_width(console: Console, count: int) -> int:
        """Returns the width of each of ``count`` columns with two blanks between them."""
        return (console.width - 2 * count) // count

    @classmethod
    def fits(cls, console: Console, count: int) -> bool:
        """Returns whether the terminal is wide enough for ``count`` columns."""
        return console.is_terminal and cls.column_width(console, count) >= _COLUMN_WIDTH


def screen_of(console: Console, labels: Sequence[str], max_tokens: int) -> Screen:
    """Returns columns for several models on a wide terminal, else sequential output."""
    columns = len(labels) > 1 and ColumnScreen.fits(console, len(labels))
    kind = ColumnScreen if columns else StreamScreen
    return kind(console, labels, max_tokens)


def tokens_text(tokens: Sequence[AnswerToken]) -> Text:
    """Returns the tokens of an answer, coloured by their probability.

    The tokens of one character are joined; its probability is their product.
    """
    text = Text()
    for piece, logprob in _whole_characters(tokens):
        text.append(printable(piece), style=_style(logprob))
    return text


def tokens_legend() -> Text:
    """Returns the legend of the colours."""
    legend = Text.assemble(("probability at temperature 1: ", _DIM))
    for bound, style in _STYLES:
        legend.append(f"≥ {bound:g}" if bound else f"< {_STYLES[-2][0]:g}", style=style)
        legend.append("  ")
    return legend


def tokens_table(tokens: Sequence[AnswerToken]) -> Table:
    """Returns a table of the tokens with log-probability and probability."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style=_DIM)
    table.add_column("token")
    table.add_column("logprob", justify="right")
    table.add_column("probability", justify="right")
    for piece, logprob in _whole_characters(tokens):
        style = _style(logprob)
        shown = Text(repr(piece), style=style)
        table.add_row(shown, f"{logprob:.3f}", Text(f"{math.exp(logprob):.3f}", style=style))
    return table


def _whole_characters(tokens: Sequence[AnswerToken]) -> list[tuple[str, float]]:
    """Returns text and log-probability of the shortest token runs that are whole characters."""
    pieces: list[tuple[str, float]] = []
    raw, logprob = b"", 0.0
    for i, token in enumerate(tokens):
        raw, logprob = raw + token.raw, logprob + token.logprob
        try:
            piece = raw.decode()
        except UnicodeDecodeError:
            # A character has at most four bytes, so a longer run cannot become a character.
            if len(raw) < 4 and i + 1 < len(tokens):
                continue
            piece = raw.decode(errors="replace")
        pieces.append((piece, logprob))
        raw, logprob = b"", 0.0
    return pieces


def _style(logprob: float) -> str:
    probability = math.exp(logprob)
    # NaN (a backend without log-probabilities) has no colour.
    return next((style for bound, style in _STYLES if probability >= bound), "")
