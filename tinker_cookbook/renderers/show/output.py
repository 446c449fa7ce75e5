"""Output of a view on a terminal or as an HTML page.

The terminal output is readable without colour: the bar before a trained token is heavy. The page
has no scripts and loads nothing. The style sheet draws the signs for white space, so that copied
text is the text of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rich.cells import cell_len
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
    TokenRow,
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
_MARKS = {True: ("✓ ", "green"), False: ("✗ ", "bold red")}
_LABEL_WIDTH = 12
_LEAD = 8  # tokens shown before those that differ from the example before


def print_view(view: View, console: Console, max_tokens: int) -> None:
    """Prints the findings and each example, with its middle cut out beyond ``max_tokens``."""
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
    """Returns the token's characters or their signs, split after each line break."""
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
    """Returns how many tokens equal those of the previous example, 0 if they are few."""
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


_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c1e21; --dim: #6a7079; --line: #d5d9de;
  --context: #f3f4f6; --trained: #d3f0d9; --trained-line: #1f8a3b; --down: #fbd9d7;
  --control: #4c3bb5; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --back: #14161a; --text: #e3e6ea; --dim: #9aa2ad;
  --line: #3a4048; --context: #22262c; --trained: #173d22; --trained-line: #5fce7c;
  --down: #51201d; --control: #b9acff; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 2rem auto; max-width: 68rem; padding: 0 1rem; background: var(--back);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; vertical-align: top; padding: .3rem 1rem .3rem 0; white-space: nowrap;
  color: var(--dim); font-weight: 600; width: 7rem; }
td { padding: .3rem 0; overflow-wrap: anywhere; white-space: pre-wrap; }
tr + tr { border-top: 1px solid var(--line); }
.good::before { content: "✓ "; color: var(--trained-line); font-weight: bold; }
.bad::before { content: "✗ "; color: var(--bad); font-weight: bold; }
.row { display: flex; gap: .6rem; margin-top: .3rem; align-items: baseline; }
.row > b { flex: 0 0 4.5rem; font-weight: 500; color: var(--dim); }
pre { font: 13.5px/2 ui-monospace, "SF Mono", Consolas, "DejaVu Sans Mono", monospace; margin: 0;
  white-space: pre-wrap; overflow-wrap: anywhere; }
pre.example { border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem; }
.t { background: var(--context); border-left: 1px solid var(--dim); padding: .15em 0;
  unicode-bidi: isolate; }
.t.w { background: var(--trained); border-bottom: 2px solid var(--trained-line); }
.t.d { background: var(--down); border-bottom: 2px solid var(--bad); }
.t.c { color: var(--control); font-weight: 700; }
.t:hover { outline: 2px solid var(--control); }
.t i { font-style: normal; }
.t i::before, .t.e::before { content: attr(data-s); color: var(--dim); font-weight: 400; }
.t i.s::before { position: absolute; }
.flat i.n { font-size: 0; white-space: normal; } .flat i.n::before { font-size: 13.5px; }
.legend { color: var(--dim); }
.legend .t { color: var(--text); } .legend .t.c { color: var(--control); }
"""
_HTML_CLASSES = {True: "good", False: "bad", None: ""}


def page(view: View, title: str) -> str:
    """Returns the HTML page of a view."""
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(readable(title))}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"<h1>{escape(readable(title))}</h1>",
        _html_facts(view.facts),
        *(_html_example(example) for example in view.examples),
        _HTML_LEGEND,
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def token_spans(tokens: Sequence[ShownToken]) -> str:
    """Returns a span for each token, with its id and weight as title; their text is the tokens'."""
    return "".join(_span(token, place) for place, token in enumerate(tokens))


def _span(token: ShownToken, place: int | None = None) -> str:
    classes = ["t"]
    if token.trained:
        classes.append("w" if token.weight > 0 else "d")
    if token.control:
        classes.append("c")
    sign = ""
    if not token.text:
        classes.append("e")
        sign = f' data-s="{UNFINISHED}"'
    where = "" if place is None else f"token {place}, "
    name = "no id" if token.id is None else f"id {token.id}"
    title = f"{where}{name}, weight {token.weight:g}: {token.text!r}"
    body = "".join(_character(character, sign) for character, sign in signs(token.text))
    return f'<span class="{" ".join(classes)}" title="{_quoted(title)}"{sign}>{body}</span>'


def _character(character: str, sign: str) -> str:
    if not sign:
        return escape(character)
    # A browser reads a bare carriage return as a line break.
    text = "&#13;" if character == "\r" else escape(character)
    if character == "\n":
        return f'<i class="n" data-s="{sign}">{text}</i>'
    if character.isspace():
        return f'<i class="s" data-s="{sign}">{text}</i>'
    return f'<i data-s="{_quoted(sign.removesuffix(character))}">{text}</i>'


def _quoted(text: str) -> str:
    return escape(text, quote=True)


def _html_facts(facts: Sequence[Fact]) -> str:
    rows = [
        f'<tr><th scope="row">{escape(fact.label)}</th><td>'
        f'<span class="{_HTML_CLASSES[fact.good]}">'
        f"{escape(readable(fact.text))}</span>{''.join(map(_html_row, fact.rows))}</td></tr>"
        for fact in facts
    ]
    return "<table>\n" + "\n".join(rows) + "\n</table>"


def _html_row(row: TokenRow) -> str:
    label = f"<b>{escape(row.label)}</b>" if row.label else ""
    before, after = "… " if row.cut_before else "", " …" if row.cut_after else ""
    spans = "".join(map(_span, row.tokens)) or "(the end)"
    return f'<div class="row">{label}<pre class="flat">{before}{spans}{after}</pre></div>'


def _html_example(example: ExampleView) -> str:
    return (
        f"<h2>{escape(example.title)}</h2>\n"
        f'<pre class="example">{token_spans(example.tokens)}</pre>\n{_html_facts(example.facts)}'
    )


_HTML_LEGEND = (
    '<p class="legend"><span class="t">context</span> <span class="t w">trained</span> '
    '<span class="t c">&lt;|control token|&gt;</span> · space, ⏎ line break, '
    f"{UNFINISHED} part of a character that a later token completes; "
    "point at a token for its id and weight.</p>"
)
