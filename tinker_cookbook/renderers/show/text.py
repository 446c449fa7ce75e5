"""A view on a terminal: colours by weight, a bar before each token, signs for white space.

Nothing depends on colour alone: the bar before a trained token is heavy, so that a log or a pipe
shows as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.text import Text

from tinker_cookbook.display import CONTEXT_STYLE, PUSHED_DOWN_STYLE, TRAINED_STYLE
from tinker_cookbook.renderers.show.facts import ExampleView, Fact, TokenRow, View
from tinker_cookbook.renderers.show.tokens import (
    LINE_BREAK,
    UNFINISHED,
    ShownToken,
    first_difference,
    readable,
    signs,
)

if TYPE_CHECKING:
    from rich.console import Console

BAR, TRAINED_BAR = "│", "┃"
_LEGEND = (
    (f"{BAR}context", CONTEXT_STYLE),
    (f"{TRAINED_BAR}trained", TRAINED_STYLE),
    (f"{BAR}<|control token|>", f"{CONTEXT_STYLE} bold underline"),
    (f"·space  {LINE_BREAK} line break  {UNFINISHED} part of a character", "dim"),
)
_MARKS = {True: ("✓ ", "green"), False: ("✗ ", "bold red")}
_LABEL_WIDTH = 12
_LEAD = 8  # tokens shown before those that differ from the example before


def print_view(view: View, console: Console, max_tokens: int) -> None:
    """Prints what was found, then each example, of which the middle is cut at ``max_tokens``."""
    width = max(console.width, 40)
    _print_facts(view.facts, console, width)
    for before, example in zip([None, *view.examples], view.examples, strict=False):
        _print_example(example, before, console, width, max_tokens)
    legend = Text("  ").join(Text(words, style=style) for words, style in _LEGEND)
    console.print()
    console.print(legend, soft_wrap=True)


def token_lines(tokens: Sequence[ShownToken], width: int, breaks: bool = True) -> list[Text]:
    """Returns tokens as lines of at most ``width`` cells, broken between tokens.

    Without ``breaks`` a line break of the text shows its sign alone.
    """
    lines, used = [Text()], 0
    for token in tokens:
        style = _style(token)
        bar = TRAINED_BAR if token.trained else BAR
        for i, part in enumerate(_parts(token)):
            piece = Text(bar if i == 0 else "", style=_colour(token))
            for sign, is_sign in part:
                piece.append(sign, style=f"{_colour(token)} dim" if is_sign else style)
            size = cell_len(piece.plain)
            if used and used + size > width:
                lines.append(Text())
                used = 0
            lines[-1].append_text(piece)
            used += size
            if breaks and piece.plain.endswith(LINE_BREAK):
                lines.append(Text())
                used = 0
    return lines if lines[-1].plain or len(lines) == 1 else lines[:-1]


def _parts(token: ShownToken) -> list[list[tuple[str, bool]]]:
    """The token's characters or their signs, cut behind each line break."""
    if not token.text:
        return [[(UNFINISHED, True)]]
    parts: list[list[tuple[str, bool]]] = [[]]
    for character, sign in signs(token.text):
        parts[-1].append((sign or character, bool(sign)))
        if character == "\n":
            parts.append([])
    return parts if parts[-1] else parts[:-1]


def _colour(token: ShownToken) -> str:
    if token.weight < 0:
        return PUSHED_DOWN_STYLE
    return TRAINED_STYLE if token.trained else CONTEXT_STYLE


def _style(token: ShownToken) -> str:
    return f"{_colour(token)} bold underline" if token.control else _colour(token)


def _print_facts(facts: Sequence[Fact], console: Console, width: int) -> None:
    for fact in facts:
        mark, style = _MARKS[fact.good] if fact.good is not None else ("", "")
        body = Text.assemble((mark, style), readable(fact.text))
        lines = list(body.wrap(console, width - _LABEL_WIDTH, overflow="fold"))
        for row in fact.rows:
            lines += _row(row, width - _LABEL_WIDTH)
        for i, line in enumerate(lines):
            label = Text(fact.label if i == 0 else "", style="bold")
            label.pad_right(_LABEL_WIDTH - len(label))
            line.rstrip()
            console.print(label.append_text(line), soft_wrap=True)


def _row(row: TokenRow, width: int) -> list[Text]:
    label = f"{row.label:<9}" if row.label else ""
    before, after = "… " if row.cut_before else "  ", " …" if row.cut_after else ""
    lines = token_lines(row.tokens, width - len(label) - 4, breaks=False)
    if not row.tokens:
        lines = [Text("(the end)", style="dim")]
    first, *others = lines
    first = Text.assemble((label, "italic"), (before, "dim"), first)
    indent = " " * (len(label) + len(before))
    lines = [first, *(Text(indent).append_text(line) for line in others)]
    lines[-1].append(after, style="dim")
    return lines


def _print_example(
    example: ExampleView, before: ExampleView | None, console: Console, width: int, max_tokens: int
) -> None:
    console.print()
    console.print(Text(example.title, style="bold"), soft_wrap=True)
    same = _shared(example, before)
    lines: list[Text] = []
    if same:
        lines.append(Text(f"… {same:,} tokens as in the example before …", style="dim"))
    lines += _cut_lines(example.tokens[same:], width - 2, max_tokens)
    for line in lines:
        console.print(Text("  ").append_text(line), soft_wrap=True)
    _print_facts(example.facts, console, width)


def _shared(example: ExampleView, before: ExampleView | None) -> int:
    """How many tokens of context need no showing again, 0 where they are few."""
    if before is None:
        return 0
    ids = [[token.id for token in view.tokens] for view in (example, before)]
    same = first_difference(*ids)
    trained = next((i for i, token in enumerate(example.tokens) if token.trained), None)
    end = min(place for place in (len(ids[0]), same, trained) if place is not None)
    return end - _LEAD if end > 2 * _LEAD else 0


def _cut_lines(tokens: Sequence[ShownToken], width: int, max_tokens: int) -> list[Text]:
    cut = len(tokens) - max_tokens
    if cut <= 0:
        return token_lines(tokens, width)
    start = max_tokens - max_tokens // 2
    trained = sum(token.trained for token in tokens[start : start + cut])
    note = f"… {cut:,} tokens more, {trained:,} of them trained (max_tokens={max_tokens}) …"
    ends = token_lines(tokens[:start], width), token_lines(tokens[start + cut :], width)
    return [*ends[0], Text(note, style="dim"), *ends[1]]
