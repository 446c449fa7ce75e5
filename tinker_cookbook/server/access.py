"""Access to the server: the API key, limits on bodies and idle connections, and dependencies.

FastAPI reads and parses a body before it calls a route's dependencies. A key check in a dependency
is too late: anyone could make the server read and parse a body of any size. So an ASGI
middleware checks the key first.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import math
from collections.abc import Callable
from ipaddress import ip_address
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, HTTPException, Request, Response
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinker_cookbook.server import page
from tinker_cookbook.server.errors import body_too_large
from tinker_cookbook.server.keys import TOKEN_PREFIX, ApiUser, KeyFile
from tinker_cookbook.server.state import ServerState

# A client that sends nothing for this long within a request is disconnected.
IDLE_SECONDS = 20.0
# Maximum size of request line and headers. More than uvloop reads at once, since a body may follow.
MAX_HEAD_BYTES = 512 << 10

# The chat page contains nothing secret, and has a field for the key.
OPEN_PATHS = frozenset({"/healthz", "/api/v1/healthz", *page.FILES})
# Paths with a signature instead of a key; the route checks the signature.
SIGNED_PREFIX = "/api/v1/files/"
# Routes that bound the body themselves, because they need the first bytes of a refused one.
PASS_PATHS = frozenset({"/api/v1/forward", "/api/v1/forward_backward"})
# Pages for browsers, which prompt for the key if the response names the ``Basic`` scheme.
BROWSER_PATHS = frozenset({"/docs", "/openapi.json"})


class AccessMiddleware:
    """ASGI middleware that answers 401 before a body is read, bounds the body, and answers errors
    that have no handler.

    Routes find the owner in ``request.state.owner``. ``refuse`` creates the response from an error
    and the request's path.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyFile,
        max_bytes: int,
        refuse: Callable[[Exception, str], Response],
    ) -> None:
        self._app, self._keys, self._max_bytes, self._refuse = app, keys, max_bytes, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        path = request.url.path
        # Check the key first, so that a caller without one cannot make the server read a body.
        if path not in OPEN_PATHS and not path.startswith(SIGNED_PREFIX):
            key = key_of(request)
            owner = self._keys.owner_of(key) if key else None
            if owner is None:
                await self._refuse(unauthorized(key, path), path)(scope, receive, send)
                return
            request.state.owner = owner
        max_bytes = math.inf if path in PASS_PATHS else self._max_bytes
        # A body with a too large declared size is refused without reading it.
        declared = request.headers.get("content-length", "")
        # Twenty digits are enough for any size; Python refuses to parse very long numbers.
        if declared.isdecimal() and int(declared[:20]) > max_bytes:
            error = HTTPException(413, str(body_too_large(self._max_bytes)))
            await self._refuse(error, path)(scope, receive, send)
            return
        size, ended, timed_out = 0, False, False

        # Raises HTTPException, since FastAPI turns every other error of a body into a bare 400.
        async def bounded_receive() -> Message:
            nonlocal size, ended, timed_out
            if ended:  # after the body only a disconnect can follow
                return await receive()
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    message = await receive()
            except TimeoutError:
                timed_out = True
                raise HTTPException(
                    408,
                    f"body: no data for {IDLE_SECONDS:g} s before its end; send it again",
                ) from None
            # A body may be larger than its declared size, or declare none.
            ended = not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > max_bytes:
                raise HTTPException(413, str(body_too_large(self._max_bytes)))
            return message

        started = False

        async def closing_send(message: Message) -> None:
            nonlocal started
            started = True
            # After the response to an incomplete body, the connection cannot be reused.
            if timed_out and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        try:
            await self._app(scope, bounded_receive, closing_send)
        except Exception as error:
            # uvicorn closes the connection of an error that reaches it, without telling the client,
            # whose next request on it then fails.
            if started:
                raise
            await self._refuse(error, path)(scope, receive, closing_send)


def key_of(request: Request) -> str:
    """Returns the key in ``X-API-Key`` or ``Authorization: Bearer``; empty if there is none.

    Pages for browsers also accept it as the password of ``Authorization: Basic``. Other paths
    do not, because browsers add such passwords to requests of other sites.
    """
    key = request.headers.get("x-api-key", "")
    if key:
        return key
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic" and request.url.path in BROWSER_PATHS:
        try:
            text = base64.b64decode(value.strip(), validate=True).decode()
        except (binascii.Error, ValueError):
            return ""
        return text.partition(":")[2]
    return ""


def unauthorized(key: str, path: str = "") -> HTTPException:
    """Returns the 401 for a missing or unknown key."""
    challenge = None
    if path in BROWSER_PATHS:
        challenge = {"WWW-Authenticate": 'Basic realm="tinker_cookbook: the key as password"'}
    elif key.startswith(TOKEN_PREFIX):
        # If its token has expired, a client requests a new one and repeats the request.
        challenge = {"WWW-Authenticate": 'Bearer error="invalid_token"'}
    return HTTPException(
        401,
        "TINKER_API_KEY: "
        + ("none was sent" if not key else "the key is not one of this server's")
        + "; the server prints the path of its keys at its start",
        challenge,
    )


# The dependencies are async without waiting, because FastAPI runs plain functions in a thread.


async def state_of(request: Request) -> ServerState:
    """Returns the server's state."""
    return request.app.state.server


async def owner_of(request: Request) -> ApiUser:
    """Returns the owner found by the middleware; raises a 401 if there is none."""
    owner = getattr(request.state, "owner", None)
    if owner is None:
        raise unauthorized(key_of(request))
    return owner


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


try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:  # uvicorn then uses h11, which bounds heads itself
    HTTP_PROTOCOL: type[asyncio.Protocol] | str = "auto"
else:

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

    HTTP_PROTOCOL = BoundedHeadProtocol


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
