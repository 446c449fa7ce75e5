"""One line and one count for each HTTP request: the access log, and the metrics of requests.

A line is a JSON object without texts, ids and keys.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from logging.handlers import RotatingFileHandler
from pathlib import Path

from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.server import openai
from tinker_cookbook.server.bodies import Json
from tinker_cookbook.server.metrics import HTTP_REQUESTS, HTTP_SECONDS
from tinker_cookbook.server.requests import Usage

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_FILE_BYTES, _OLD_FILES = 64 << 20, 3
_WRITE_SECONDS, _MOST_LINES = 0.5, 100_000
_NO_USAGE = Usage()


class AccessLog:
    """Writes lines from a thread, so that no request waits for a disk or a pipe.

    ``target``: ``auto`` (the file ``default``), ``stdout``, ``none`` or a file. A file is renamed
    at 64 MiB, and three old ones are kept. Raises ConfigurationError.
    """

    def __init__(self, target: str, default: Path) -> None:
        self._lines: list[Json] = []
        self._writing: asyncio.Future[None] | None = None
        self._handler: logging.Handler | None = None
        try:
            if target == "stdout":
                self._handler = logging.StreamHandler(sys.stdout)
            elif target != "none":
                path = default if target == "auto" else Path(target).expanduser()
                path.parent.mkdir(parents=True, exist_ok=True)
                self._handler = RotatingFileHandler(
                    path, maxBytes=_FILE_BYTES, backupCount=_OLD_FILES
                )
        except OSError as error:
            raise ConfigurationError(
                f"access_log: {error.filename}: cannot be written ({error.strerror}); give another "
                "file, stdout or none"
            ) from error
        if self._handler is not None:
            # A full disk must not fill the other log with tracebacks.
            self._handler.handleError = lambda record: None

    def add(self, line: Json) -> None:
        """Adds a line, which is written within a second. Called on the event loop."""
        # Without the limit, a pipe that nothing reads would fill the memory.
        if self._handler is None or len(self._lines) >= _MOST_LINES:
            return
        self._lines.append(line)
        if len(self._lines) == 1:
            asyncio.get_running_loop().call_later(_WRITE_SECONDS, self._start_writing)

    def close(self) -> None:
        """Writes the rest."""
        self._write(self._lines)

    def _start_writing(self) -> None:
        loop = asyncio.get_running_loop()
        if self._writing is not None and not self._writing.done():
            loop.call_later(_WRITE_SECONDS, self._start_writing)  # one thread at a time
            return
        lines, self._lines = self._lines, []
        self._writing = loop.run_in_executor(None, self._write, lines)

    def _write(self, lines: Sequence[Json]) -> None:
        if lines and self._handler is not None:
            text = "\n".join(map(json.dumps, lines))
            self._handler.handle(logging.makeLogRecord({"msg": text}))


class RequestLog:
    """ASGI middleware that counts and times each request, and writes its line to the access log.

    It is the outermost one, so that it sees refused requests too.
    """

    def __init__(self, app: ASGIApp, log: AccessLog | None) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, start = 0, time.perf_counter()

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        finally:
            # Without a response, the client has disconnected (499, as in nginx).
            self._record(scope, status or 499, time.perf_counter() - start)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        noted = scope.get("state", {})
        owner, usage = getattr(noted.get("owner"), "name", ""), noted.get("usage") or _NO_USAGE
        # An unknown method or path would be a new label for each call of anyone.
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = _route_of(scope)
        HTTP_REQUESTS.labels(method, route, status, owner).inc()
        HTTP_SECONDS.labels(route).observe(seconds)
        if self._log is not None:
            line = {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "owner": owner or None,
                "client": (scope.get("client") or [None])[0],
                "method": method,
                "route": route,
                "status": status,
                "ms": round(1000 * seconds, 1),
                "model": usage.model,
                "tokens_in": usage.tokens_in,
                "tokens_out": usage.tokens_out,
            }
            self._log.add(line)


_NO_USAGE = Usage()
_compiled = cache(compile_path)


def _route_of(scope: Scope) -> str:
    """Returns the template of the route, such as ``/api/v1/samplers/{sampler_id}``."""
    route, path = scope.get("route"), scope["path"]
    if route is None:
        return _template_of(scope, path)
    # A router that is included under a prefix knows only its own part of the path.
    own = route.path_format.format(**scope.get("path_params", {}))
    return path.removesuffix(own) + route.path if path.endswith(own) else route.path


def _template_of(scope: Scope, path: str) -> str:
    """Returns the template of a request that was refused before routing."""
    alias = next((one for one in openai.ALIASES if path.startswith(f"{one}/")), None)
    known = path if alias is None else openai.PREFIX + path.removeprefix(alias)
    for template in scope["app"].openapi()["paths"]:
        if _compiled(template)[0].match(known):
            return template if alias is None else alias + template.removeprefix(openai.PREFIX)
    return "unknown"
