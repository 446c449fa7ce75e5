"""The page: one HTML file with its style and script, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path

_FOLDER = Path(__file__).parent
# One script, in this order; draw.js runs last because it starts the page.
_SCRIPTS = ("base", "charts", "runs", "episodes", "examples", "draw")


@functools.cache
def page_html(embedded: str = "") -> tuple[str, str]:
    """Returns the page and its content security policy; ``embedded`` are elements with data.

    The policy lets only this script run, so that text of an episode can never be code.
    """
    style = (_FOLDER / "view.css").read_text()
    script = "\n".join((_FOLDER / f"{name}.js").read_text() for name in _SCRIPTS)
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (style, script)
    ]
    policy = (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    html = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>Runs</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<div id="page"></div>\n{embedded}<script>{script}</script>\n</body>\n</html>\n'
    )
    return html, policy
