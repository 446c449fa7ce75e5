"""One line and one count for each HTTP request: the access log, and the metrics of requests.

A line is a JSON object without texts, ids and keys.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sys
from datetime import UTC, datetime
from logging.handlers import QueueListener, RotatingFileHandler
from pathlib import Path

from starlette.types import Scope

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.server.metrics import HTTP_REQUESTS, HTTP_SECONDS
from tinker_cookbook.server.requests import Usage

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_FILE_BYTES, _OLD_FILES = 64 << 20, 3
# Without the limit, a pipe that nothing reads would fill the memory.
_MOST_LINES = 100_000
_NO_USAGE = Usage()


class RequestLog:
    """Counts and times requests, and writes their lines from a thread: no request waits for a disk.

    ``target``: ``auto`` (the file ``default``), ``stdout``, ``none`` or a file. A file is renamed
    at 64 MiB, and three old ones are kept. Raises ConfigurationError.
    """

    def __init__(self, target: str, default: Path) -> None:
        self._lines: queue.Queue[logging.LogRecord] = queue.Queue(_MOST_LINES)
        self._writer: QueueListener | None = None
        handler: logging.Handler = logging.StreamHandler(sys.stdout)
        if target == "none":
            return
        if target != "stdout":
            path = default if target == "auto" else Path(target).expanduser()
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                handler = RotatingFileHandler(path, maxBytes=_FILE_BYTES, backupCount=_OLD_FILES)
            except OSError as error:
                raise ConfigurationError(
                    f"access_log: {error.filename}: cannot be written ({error.strerror}); give "
                    "another file, stdout or none"
                ) from error
        # A full disk must not fill the other log with tracebacks.
        handler.handleError = lambda record: None
        self._writer = QueueListener(self._lines, handler)
        self._writer.start()

    def add(self, scope: Scope, status: int, seconds: float) -> None:
        """Records a request that has ended."""
        noted = scope.get("state", {})
        owner, usage = getattr(noted.get("owner"), "name", ""), noted.get("usage") or _NO_USAGE
        # An unknown method or path would be a new label for each call of anyone.
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = _route_of(scope)
        HTTP_REQUESTS.labels(method, route, status, owner).inc()
        HTTP_SECONDS.labels(route).observe(seconds)
        if self._writer is None:
            return
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
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(logging.makeLogRecord({"msg": json.dumps(line)}))

    def close(self) -> None:
        """Writes the rest."""
        if self._writer is not None:
            self._writer.stop()


def _route_of(scope: Scope) -> str:
    """Returns the template of the route, such as ``/api/v1/samplers/{sampler_id}``.

    ``unknown`` for a path without a route, and for a request that was refused before routing.
    """
    route, path = scope.get("route"), scope["path"]
    if route is None:
        return "unknown"
    # A router that is included under a prefix knows only its own part of the path.
    own = route.path_format.format(**scope.get("path_params", {}))
    return path.removesuffix(own) + route.path if path.endswith(own) else route.path
