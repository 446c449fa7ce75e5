"""The page: one HTML file with its style and script, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from html import escape
from pathlib import Path

_FOLDER = Path(__file__).parent
# One script, in this order; draw.js runs last because it starts the page.
_SCRIPTS = (
    "base", "charts", "runs", "curves", "tokens", "episodes", "compare", "examples", "evaluations",
    "timing", "tree", "draw",
)  # fmt: skip

_INNER = r"`(?:\\.|[^`\\])*`"
_TEMPLATE = rf"`(?:\\.|\$\{{(?:\{{[^{{}}`]*\}}|[^`{{}}]|{_INNER})*\}}|\$(?!\{{)|[^`\\$])*`"
_TEXT_OR_SPACE = re.compile(
    rf'("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|{_TEMPLATE})|(?<!:) +//[^\n]*'
    r"|(?<![-+ ]) *([-+]) *(?![-+ ])| *([=(){}\[\],;:?<>&|*!]) *"
)
"""A text, which stays (group 1); a comment; or a sign whose spaces are not needed."""


def head_html(title: str, *sheets: str, base: str | None = None) -> str:
    """Returns the content of ``<head>``: the title and the style, which ``sheets`` extend; ``base``
    replaces that of the page."""
    style = "\n".join([(_FOLDER / "view.css").read_text() if base is None else base, *sheets])
    # "</style" would end the element early, and the rest would be shown.
    style = style.replace("</", "<\\/")
    return (
        '<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n"
    )


def document(head: str, body: str, lang: str = "en") -> str:
    """Returns an HTML file; ``body`` has its tag."""
    return f'<!doctype html>\n<html lang="{lang}">\n<head>\n{head}</head>\n{body}</html>\n'


@functools.cache
def page_html(embedded: str = "", start: str = "") -> tuple[str, str]:
    """Returns the page and its content security policy; ``embedded`` are elements with data, and
    ``start`` is the view at the start, as in the address.

    The policy lets only this script run, so that text of an episode can never be code.
    """
    style = (_FOLDER / "view.css").read_text()
    script = "\n".join((_FOLDER / f"{name}.js").read_text() for name in _SCRIPTS)
    # A report is sent by mail, so comments and spaces stay out; texts and line ends remain.
    script = re.sub(r"(?m)^ *(//.*|/?\*.*)?\n|^ +", "", script)
    script = _TEXT_OR_SPACE.sub(lambda found: found[1] or found[2] or found[3] or "", script)
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (style, script)
    ]
    policy = (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n{head_html("Runs")}'
    body = (
        f'<body>\n<div id="page" data-start="{escape(start)}"></div>\n'
        f"{embedded}<script>{script}</script>\n</body>\n"
    )
    return document(head, body), policy
