"""Chat page at ``/``: three files that need no key, since the page has a field for it.

The page calls the OpenAI API of this server with the key that the user enters.
"""

from __future__ import annotations

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


for _path in FILES:
    router.add_api_route(_path, _file, methods=["GET", "HEAD"], response_model=None)
