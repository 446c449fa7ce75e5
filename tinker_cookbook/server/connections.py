"""Connections that do nothing: uvicorn has a time limit between requests, and none before them.

A client that connects and sends nothing, or half of a request's head, would hold its connection, a
file of the process, for good. (A half body is the gate's: there a request has begun.)
"""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn

from tinker_cookbook.server.gate import SILENT_SECONDS

LOOK_SECONDS = 2.0
MOST_HEAD_BYTES = 512 << 10
"""Of a request line and headers; more than uvloop reads at once, since a body may follow."""


def http_protocol() -> type[asyncio.Protocol] | str:
    """What uvicorn is to speak HTTP with: httptools where it is installed, with bounded heads.

    Without httptools uvicorn takes h11, which has a bound of its own.
    """
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "auto"

    class BoundedHead(HttpToolsProtocol):
        """Refuses a head that never ends."""

        _head: int | None = 0
        """Bytes of the head so far; None: the head is complete."""

        def data_received(self, data: bytes) -> None:
            if self._head is not None:
                self._head += len(data)
                if self._head > MOST_HEAD_BYTES:
                    self.send_400_response("The head of the request is too large.")
                    return
            super().data_received(data)

        def on_message_begin(self) -> None:
            self._head = 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._head = None
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._head = 0  # the next request of the connection begins
            super().on_message_complete()

    return BoundedHead


class IdleConnections:
    """Closes connections on which no request has been in progress for ``SILENT_SECONDS``.

    Args:
        server: Its connections are looked through; each has ``cycle``, its latest request.
    """

    def __init__(self, server: uvicorn.Server) -> None:
        self._server = server
        self._idle: dict[Any, tuple[Any, float]] = {}

    async def close_for_good(self) -> None:
        """Looks every ``LOOK_SECONDS``; ends when it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look(asyncio.get_running_loop().time())

    def look(self, now: float) -> None:
        """One look at ``now``, in seconds of the event loop's clock."""
        idle = {}
        for connection in list(self._server.server_state.connections):
            request = getattr(connection, "cycle", None)
            if request is not None and not request.response_complete:
                continue  # long polls and streams take as long as they take
            # Another request since the last look means that the connection is in use.
            last, since = self._idle.get(connection, (request, now))
            since = since if last is request else now
            idle[connection] = request, since
            if now - since >= SILENT_SECONDS and connection.transport is not None:
                connection.transport.close()
        self._idle = idle
