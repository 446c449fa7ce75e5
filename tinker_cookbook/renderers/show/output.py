"""Output of a view on a terminal or as an HTML page.

The terminal output is readable without colour: the bar before a trained token is heavy. The page
has no scripts and loads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import jinja2
from rich.console import Console
from rich.text import Text

from tinker_cookbook.display import CONTEXT_STYLE, PUSHED_DOWN_STYLE, TRAINED_STYLE
from tinker_cookbook.renderers.core.rendered import first_difference
from tinker_cookbook.renderers.show.view import (
    LINE_BREAK,
    UNFINISHED,
    ExampleView,
    Fact,
    ShownToken,
    View,
    readable,
    signs,
)

BAR, TRAINED_BAR = "│", "┃"
_LEGEND = (
    (f"{BAR}context", CONTEXT_STYLE),
    (f"{TRAINED_BAR}trained", TRAINED_STYLE),
    (f"{BAR}<|control token|>", f"{CONTEXT_STYLE} bold underline"),
    (f"·space  {LINE_BREAK} line break  {UNFINISHED} part of a character", "dim"),
)
_MARKS = {True: ("✓ ", "green"), False: ("✗ ", "bold red"), None: ("", "")}
_LABEL_WIDTH = 12
_LEAD = 8  # tokens shown before those that differ from the previous example


@cache
def _environment() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"readable": readable, "signs": signs}
    return environment


def page(view: View, title: str) -> str:
    """Returns the HTML page of a view."""
    template = _environment().get_template("page.html.j2")
    return template.render(view=view, title=title, UNFINISHED=UNFINISHED)


def print_view(view: View, console: Console, max_tokens: int) -> None:
    """Prints the findings and each example, with its middle cut out beyond ``max_tokens``."""
    width = max(console.width, 40)
    _print_facts(view.facts, console, width)
    before = None
    for example in view.examples:
        console.print()
        console.print(Text(example.title, style="bold"), soft_wrap=True)
        for line in _example_lines(example, before, width - 2, max_tokens):
            console.print(Text("  ").append_text(line), soft_wrap=True)
        _print_facts(example.facts, console, width)
        # The next example leaves out the beginning that it shares with this one.
        before = example
    legend = Text("  ").join(Text(words, style=style) for words, style in _LEGEND)
    console.print()
    console.print(legend, soft_wrap=True)


def token_lines(tokens: Sequence[ShownToken], width: int, breaks: bool = True) -> list[Text]:
    """Returns tokens as lines of at most ``width`` cells, broken between tokens.

    Without ``breaks``, a line break of the text is shown only as its sign.
    """
    lines, used = [Text()], 0
    for token in tokens:
        colour = TRAINED_STYLE if token.trained else CONTEXT_STYLE
        # Training lowers the probability of a token with a negative weight.
        if token.weight < 0:
            colour = PUSHED_DOWN_STYLE
        style = f"{colour} bold underline" if token.control else colour
        # A token is split after each line break of its text.
        pieces = [Text(TRAINED_BAR if token.trained else BAR, style=colour)]
        for character, sign in signs(token.text) if token.text else [("", UNFINISHED)]:
            pieces[-1].append(sign or character, style=f"{colour} dim" if sign else style)
            if character == "\n":
                pieces.append(Text(style=colour))
        for piece in filter(None, pieces):
            # Lines break between tokens only, so that each token keeps its bar.
            if used and used + piece.cell_len > width:
                lines.append(Text())
                used = 0
            lines[-1].append_text(piece)
            used += piece.cell_len
            if breaks and piece.plain.endswith(LINE_BREAK):
                lines.append(Text())
                used = 0
    return lines if lines[-1].plain or len(lines) == 1 else lines[:-1]


def _example_lines(
    example: ExampleView, before: ExampleView | None, width: int, max_tokens: int
) -> list[Text]:
    """Returns an example without its beginning that equals the previous one, and shortened."""
    lines: list[Text] = []
    tokens = example.tokens
    if before is not None:
        same = first_difference([t.id for t in tokens], [t.id for t in before.tokens])
        trained = next((i for i, token in enumerate(tokens) if token.trained), None)
        # Neither the first difference nor a trained token may be left out.
        ends = (len(tokens), same, trained)
        end = min(position for position in ends if position is not None)
        if end > 2 * _LEAD:
            note = f"… {end - _LEAD:,} tokens as in the example before …"
            lines.append(Text(note, style="dim"))
            tokens = tokens[end - _LEAD :]
    cut = len(tokens) - max_tokens
    if cut <= 0:
        return lines + token_lines(tokens, width)
    start = max_tokens - max_tokens // 2
    # The note counts the trained tokens that are not shown.
    trained = sum(token.trained for token in tokens[start : start + cut])
    note = f"… {cut:,} tokens more, {trained:,} of them trained (max_tokens={max_tokens}) …"
    lines += [*token_lines(tokens[:start], width), Text(note, style="dim")]
    return lines + token_lines(tokens[start + cut :], width)


def _print_facts(facts: Sequence[Fact], console: Console, width: int) -> None:
    width -= _LABEL_WIDTH
    for fact in facts:
        body = Text.assemble(_MARKS[fact.good], readable(fact.text))
        lines = list(body.wrap(console, width, overflow="fold"))
        for row in fact.rows:
            label = f"{row.label:<9}" if row.label else ""
            before, after = "… " if row.cut_before else "  ", " …" if row.cut_after else ""
            shown = [Text("(the end)", style="dim")]
            if row.tokens:
                # 4 cells are for the signs that mark a cut before and after.
                shown = token_lines(row.tokens, width - len(label) - 4, breaks=False)
            indent = Text(" " * (len(label) + len(before)))
            first = Text.assemble((label, "italic"), (before, "dim"), shown[0])
            lines += [first, *(indent.copy().append_text(line) for line in shown[1:])]
            lines[-1].append(after, style="dim")
        for i, line in enumerate(lines):
            label = Text(fact.label if i == 0 else "", style="bold")
            label.pad_right(_LABEL_WIDTH - len(label))
            line.rstrip()
            console.print(label.append_text(line), soft_wrap=True)
