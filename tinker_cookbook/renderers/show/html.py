"""A view as an HTML page: one file, without scripts or anything fetched, for light and dark.

The text of the page is the text of the tokens: signs for white space are drawn by the style sheet,
so that what is copied from the page is what the model sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tinker_cookbook.renderers.show.facts import ExampleView, Fact, TokenRow, View
from tinker_cookbook.renderers.show.tokens import UNFINISHED, ShownToken, readable, signs

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
_MARKS = {True: "good", False: "bad", None: ""}


def page(view: View, title: str) -> str:
    """Returns the whole page."""
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(readable(title))}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"<h1>{escape(readable(title))}</h1>",
        _facts(view.facts),
        *(_example(example) for example in view.examples),
        _LEGEND,
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


def _facts(facts: Sequence[Fact]) -> str:
    rows = [
        f'<tr><th scope="row">{escape(fact.label)}</th><td><span class="{_MARKS[fact.good]}">'
        f"{escape(readable(fact.text))}</span>{''.join(map(_row, fact.rows))}</td></tr>"
        for fact in facts
    ]
    return "<table>\n" + "\n".join(rows) + "\n</table>"


def _row(row: TokenRow) -> str:
    label = f"<b>{escape(row.label)}</b>" if row.label else ""
    before, after = "… " if row.cut_before else "", " …" if row.cut_after else ""
    spans = "".join(map(_span, row.tokens)) or "(the end)"
    return f'<div class="row">{label}<pre class="flat">{before}{spans}{after}</pre></div>'


def _example(example: ExampleView) -> str:
    return (
        f"<h2>{escape(example.title)}</h2>\n"
        f'<pre class="example">{token_spans(example.tokens)}</pre>\n{_facts(example.facts)}'
    )


_LEGEND = (
    '<p class="legend"><span class="t">context</span> <span class="t w">trained</span> '
    '<span class="t c">&lt;|control token|&gt;</span> · space, ⏎ line break, '
    f"{UNFINISHED} part of a character that a later token completes; "
    "point at a token for its id and weight.</p>"
)
