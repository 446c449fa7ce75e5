"""Access to the server: the API key, the log of requests, idle connections, and dependencies.

FastAPI reads and parses a body before it calls a route's dependencies. A key check in a dependency
is too late: anyone could make the server read and parse a body of any size. So an ASGI
middleware checks the key first. Routes read bodies by ``bodies.read_body``, which bounds them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from ipaddress import ip_address
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, HTTPException, Request, Response
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tinker_cookbook.server import page
from tinker_cookbook.server.keys import TOKEN_PREFIX, ApiUser, KeyFile
from tinker_cookbook.server.state import ServerState

# A client that sends nothing for this long within a request is disconnected.
IDLE_SECONDS = 20.0
# Maximum size of request line and headers. More than uvloop reads at once, since a body may follow.
MAX_HEAD_BYTES = 512 << 10

# Pages that contain nothing secret; the chat page has a field for the key.
OPEN_PATHS = frozenset({"/healthz", "/api/v1/healthz", "/docs", "/openapi.json", *page.FILES})
# Paths with a signature instead of a key; the route checks the signature.
SIGNED_PREFIX = "/api/v1/files/"


class AccessMiddleware:
    """ASGI middleware that answers 401 before a body is read, ends bodies that stop arriving,
    answers errors that have no handler, and records each request.

    Routes find the owner in ``request.state.owner``. ``refuse`` creates the response from an error
    and the request's path. ``record`` gets the scope, the status and the seconds of each request.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyFile,
        refuse: Callable[[Exception, str], Response],
        record: Callable[[Scope, int, float], None],
    ) -> None:
        self._app, self._keys, self._refuse, self._record = app, keys, refuse, record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, start = Request(scope), time.perf_counter()
        path, status = request.url.path, 0
        ended = timed_out = False

        async def timed_receive() -> Message:
            nonlocal ended, timed_out
            if ended:  # after the body only a disconnect can follow
                return await receive()
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    message = await receive()
            except TimeoutError:
                timed_out = True
                problem = f"body: no data for {IDLE_SECONDS:g} s before its end; send it again"
                raise HTTPException(408, problem) from None
            ended = not message.get("more_body", False)
            return message

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # After the response to an incomplete body, the connection cannot be reused.
                if timed_out:
                    MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        try:
            if path not in OPEN_PATHS and not path.startswith(SIGNED_PREFIX):
                key = key_of(request)
                request.state.owner = self._keys.owner_of(key)
                if request.state.owner is None:
                    raise unauthorized(key)
            await self._app(scope, timed_receive, noting_send)
        except Exception as error:
            # uvicorn closes the connection of an error that reaches it, without telling the client,
            # whose next request on it then fails.
            if status:
                raise
            await self._refuse(error, path)(scope, receive, noting_send)
        finally:
            # Without a response, the client has disconnected (499, as in nginx).
            self._record(scope, status or 499, time.perf_counter() - start)


def key_of(request: Request) -> str:
    """Returns the key in ``X-API-Key`` or ``Authorization: Bearer``; empty if there is none."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    bearer = value.strip() if scheme.lower() == "bearer" else ""
    return request.headers.get("x-api-key") or bearer


def unauthorized(key: str) -> HTTPException:
    """Returns the 401 for a missing or unknown key."""
    # If its token has expired, a client requests a new one and repeats the request.
    expired = {"WWW-Authenticate": 'Bearer error="invalid_token"'}
    return HTTPException(
        401,
        "TINKER_API_KEY: "
        + ("none was sent" if not key else "the key is not one of this server's")
        + "; the server prints the path of its keys at its start",
        expired if key.startswith(TOKEN_PREFIX) else None,
    )


# The dependencies are async without waiting, because FastAPI runs plain functions in a thread.


async def state_of(request: Request) -> ServerState:
    """Returns the server's state."""
    return request.app.state.server


async def owner_of(request: Request) -> ApiUser:
    """Returns the owner found by the middleware."""
    return request.state.owner


StateDep = Annotated[ServerState, Depends(state_of)]
ApiUserDep = Annotated[ApiUser, Depends(owner_of)]


def is_same_machine(request: Request) -> bool:
    """Returns whether the client runs on this machine; False for requests through a proxy."""
    if any(name in request.headers for name in ("forwarded", "x-forwarded-for", "via")):
        return False
    try:
        return request.client is not None and ip_address(request.client.host).is_loopback
    except ValueError:
        return False


class BoundedHeadProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with a limit of ``MAX_HEAD_BYTES`` for the head of a request."""

    _head: int | None = 0
    """Bytes of the head so far; None after its end."""

    def data_received(self, data: bytes) -> None:
        """Parses received data."""
        if self._head is not None:
            self._head += len(data)
            if self._head > MAX_HEAD_BYTES:
                self.send_400_response("The head of the request is too large.")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Called at the start of a request's head."""
        self._head = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Called at the end of a request's head."""
        self._head = None
        super().on_headers_complete()


class IdleConnections:
    """Monitor that closes connections without a request in progress for ``IDLE_SECONDS``.

    uvicorn has a time limit between requests, but none before the first: a client that sends
    nothing, or an incomplete head, would occupy a file descriptor forever.

    ``cycle`` of a uvicorn connection is its latest request.
    """

    def __init__(self, server: uvicorn.Server) -> None:
        self._server = server
        self._idle: dict[Any, tuple[Any, float]] = {}

    async def check_forever(self) -> None:
        """Checks the connections at intervals until it is cancelled."""
        while True:
            await asyncio.sleep(IDLE_SECONDS / 10)
            self.check(asyncio.get_running_loop().time())

    def check(self, now: float) -> None:
        """Checks the connections at ``now``, in seconds of the event loop's clock."""
        idle = {}
        for connection in list(self._server.server_state.connections):
            request = getattr(connection, "cycle", None)
            if request is not None and not request.response_complete:
                continue  # long polls and streams have no time limit
            # A new request since the last check means that the connection is in use.
            last, since = self._idle.get(connection, (request, now))
            since = since if last is request else now
            idle[connection] = request, since
            if now - since >= IDLE_SECONDS and connection.transport is not None:
                connection.transport.close()
        self._idle = idle
