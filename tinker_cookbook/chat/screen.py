"""Output of a chat: streamed text, columns for several models, and tokens by probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


class Screen:
    """Output of one turn's answers; a context manager that shows them while they are sampled.

    One answer is printed as it arrives. Several are shown in columns on a wide terminal, with their
    last lines while they are sampled; else they are printed one after the other at the end.
    """

    def __init__(self, console: Console, labels: Sequence[str], max_tokens: int) -> None:
        self._console, self._labels, self._max_tokens = console, labels, max_tokens
        self._thinking = ["" for _ in labels]  # the last piece, if it is thinking
        self._texts = [Text() for _ in labels]
        # Two blanks between the columns.
        self._width = (console.width - 2 * len(labels)) // len(labels)
        self._live: Live | None = None
        if len(labels) > 1 and console.is_terminal and self._width >= _COLUMN_WIDTH:
            self._live = Live(
                console=console,
                get_renderable=self._tail,
                refresh_per_second=_REFRESHES_PER_SECOND,
                transient=True,
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        # Complete answers, also after an error, whose message starts in a new line.
        if self._live is not None:
            self._live.stop()
            self._console.print(self._table(self._texts))
        elif len(self._labels) == 1:
            self._console.print()
        else:
            for i, (label, text) in enumerate(zip(self._labels, self._texts, strict=True)):
                self._print(Text(f"\n[{label}]\n"[i == 0 :], style=_LABEL) + text + Text("\n"))

    def show(self, index: int) -> Show:
        """Returns the function that shows pieces of the answer of model ``index``."""

        def show(delta: ContentDelta) -> None:
            # Files get the plain text without thinking, because only colours distinguish thinking.
            plain, safe = not self._console.is_terminal, self._console.file.isatty()
            if isinstance(delta, StreamingThinkingDelta):
                if not plain:
                    self._thinking[index] = delta.thinking
                    self._add(index, Text(printable(delta.thinking), style=_DIM))
                return
            text = delta.text
            if self._thinking[index]:
                text = "\n\n" + text.lstrip("\n")
                self._thinking[index] = ""
            self._add(index, Text(printable(text) if safe else text))

        return show

    def end(self, index: int, answer: Answer) -> None:
        """Shows the end of an answer."""
        if self._console.is_terminal and (note := ending_note(answer, self._max_tokens)):
            self._add(index, Text(f" {note}", style=_NOTE))
        calls = answer.message.get("tool_calls", [])
        texts = [f"{call.function.name}({call.function.arguments})" for call in calls]
        texts += [call.raw_text for call in answer.message.get("unparsed_tool_calls", [])]
        for text in texts:
            self._add(index, Text(f"\n[tool call] {printable(text)}", style=_DIM))

    def _add(self, index: int, piece: Text) -> None:
        if len(self._labels) == 1:
            self._print(piece)
        self._texts[index].append_text(piece)

    def _print(self, piece: Text) -> None:
        if self._console.is_terminal:
            # Let the terminal wrap lines: rich does not know the column at which a piece begins.
            self._console.print(piece, end="", soft_wrap=True)
            return
        self._console.file.write(piece.plain)  # rich would replace tabs
        self._console.file.flush()

    def _tail(self) -> RenderableType:
        # A live display higher than the terminal could not be replaced.
        height = max(1, self._console.height - 4)
        lines = (text.wrap(self._console, self._width) for text in self._texts)
        return self._table([Text("\n").join(wrapped[-height:]) for wrapped in lines])

    def _table(self, texts: Sequence[Text]) -> Table:
        table = Table.grid(padding=(0, 2, 0, 0))
        for _ in self._labels:
            table.add_column(width=self._width, overflow="fold")
        table.add_row(*(Text(f"[{label}]", style=_LABEL) for label in self._labels))
        table.add_row(*texts)
        return table


def tokens_table(tokens: Sequence[AnswerToken]) -> Table:
    """Returns a table of the tokens with log-probability and probability, coloured by it.

    The tokens of one character are joined; its probability is their product.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style=_DIM)
    table.add_column("token")
    table.add_column("logprob", justify="right")
    table.add_column("probability", justify="right")
    for piece, logprob in _whole_characters(tokens):
        probability = math.exp(logprob)
        # NaN (a backend without log-probabilities) has no colour.
        style = next((style for bound, style in _STYLES if probability >= bound), "")
        table.add_row(repr(piece), f"{logprob:.3f}", f"{probability:.3f}", style=style)
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
