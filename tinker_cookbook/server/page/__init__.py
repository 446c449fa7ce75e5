"""Pages for browsers: the chat page at ``/``, and the list of all paths at ``/docs``.

The three files of the chat page need no key, since the page has a field for it. The page calls the
OpenAI API of this server with the key that the user enters. No page loads code from elsewhere.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from fastapi import APIRouter, Request, Response

FILES = {"/": "chat.html", "/chat.css": "chat.css", "/chat.js": "chat.js"}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_FOLDER = Path(__file__).parent

_HEADERS = {
    # The page has no inline code and connects only to this server, so that text of a model or a
    # checkpoint's name cannot run code or send the key elsewhere.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # A cached page of an older version would call this server.
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


async def _file(request: Request) -> Response:
    path = _FOLDER / FILES[request.url.path]
    media = f"{_TYPES[path.suffix]}; charset=utf-8"
    return Response(path.read_bytes(), media_type=media, headers=_HEADERS)


@router.get("/docs")
async def list_paths(request: Request) -> Response:
    """Lists the paths of the OpenAPI document with what they do."""
    rows = "".join(
        f"<dt>{method.upper()} {escape(path)}</dt>"
        f"<dd>{escape(operation.get('description', ''))}</dd>"
        for path, methods in request.app.openapi()["paths"].items()
        for method, operation in methods.items()
    )
    text = (
        "<!doctype html><html lang='en'><title>tinker_cookbook server</title>"
        "<h1>Paths of this server</h1><p>The OpenAI API (<code>/oai/api/v1</code>) is also at "
        "<code>/v1</code>. The bodies are in <a href='/openapi.json'>openapi.json</a>.</p>"
        f"<dl>{rows}</dl></html>"
    )
    return Response(text, media_type="text/html; charset=utf-8", headers=_HEADERS)


for _path in FILES:
    router.add_api_route(_path, _file, methods=["GET", "HEAD"], response_model=None)
