"""The ASGI layer in front of all routes: the key comes first, and every body has a bound.

FastAPI reads and parses a body before it calls a route's dependencies. A key that is checked there
is checked too late: anyone could make the server hold and parse a body of any size.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable

from fastapi import HTTPException, Request, Response
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinker_cookbook.server.errors import too_large
from tinker_cookbook.server.keys import KeyFile
from tinker_cookbook.server.tokens import PREFIX

SILENT_SECONDS = 20.0
"""A client that is in the middle of a body and sends nothing for so long is disconnected."""

OPEN_PATHS = frozenset({"/healthz", "/api/v1/healthz"})
SIGNED_PREFIX = "/api/v1/files/"
"""Addresses that carry a signature in place of a key; the route checks it."""
PAGES = frozenset({"/docs", "/openapi.json"})
"""What a person opens in a browser, which asks for the key where the answer says ``Basic``."""

Refuse = Callable[[HTTPException, str], Response]
"""Makes an answer of an error and the path that was asked."""


class Gate:
    """ASGI middleware: answers 401 before a body is read, and stops reading at a limit.

    Args:
        app: The application behind it, which finds the owner in ``request.state.owner``.
        keys: The keys and their owners.
        max_bytes: Largest body of any request.
        refuse: Makes the answer to a request that does not get as far as a route.
    """

    def __init__(self, app: ASGIApp, keys: KeyFile, max_bytes: int, refuse: Refuse) -> None:
        self._app, self._keys, self._max_bytes, self._refuse = app, keys, max_bytes, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        path = request.url.path
        body = _Body(receive, send, self._max_bytes)
        if path not in OPEN_PATHS and not path.startswith(SIGNED_PREFIX):
            key = key_of(request)
            owner = self._keys.owner_of(key) if key else None
            if owner is None:
                await self._refuse(not_allowed(key, path), path)(scope, receive, send)
                return
            request.state.owner = owner
        told = request.headers.get("content-length", "")
        if told.isdecimal() and int(told[:20]) > self._max_bytes:
            error = HTTPException(413, str(too_large(self._max_bytes)))
            await self._refuse(error, path)(scope, receive, send)
            return
        await self._app(scope, body.receive, body.send)


class _Body:
    """The stream of one request's body, with its bound and its time limit."""

    def __init__(self, receive: Receive, send: Send, max_bytes: int) -> None:
        self._receive, self._send, self._max_bytes = receive, send, max_bytes
        self._size = 0
        self._ended = self._silent = False

    async def receive(self) -> Message:
        """The next piece; ``HTTPException`` 413 or 408 in place of one that is not to be had."""
        if self._ended:  # what comes now is the end of the connection, whenever that may be
            return await self._receive()
        try:
            async with asyncio.timeout(SILENT_SECONDS):
                message = await self._receive()
        except TimeoutError:
            self._silent = True
            raise HTTPException(
                408, f"body: nothing came for {SILENT_SECONDS:g} s before its end; send it again"
            ) from None
        self._ended = not message.get("more_body", False)
        self._size += len(message.get("body", b""))
        if self._size > self._max_bytes:
            # HTTPException, since FastAPI turns every other error of a body into a bare 400.
            raise HTTPException(413, str(too_large(self._max_bytes)))
        return message

    async def send(self, message: Message) -> None:
        """Ends the connection behind the answer to a body whose rest never came."""
        if self._silent and message["type"] == "http.response.start":
            MutableHeaders(scope=message)["connection"] = "close"
        await self._send(message)


def key_of(request: Request) -> str:
    """The key in ``X-API-Key`` or ``Authorization: Bearer``; empty where there is none.

    The pages for browsers take it as the password of ``Authorization: Basic`` too. Other addresses
    do not: browsers add such passwords to requests that foreign pages make.
    """
    key = request.headers.get("x-api-key", "")
    if key:
        return key
    scheme, _, rest = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic" and request.url.path in PAGES:
        try:
            text = base64.b64decode(rest.strip(), validate=True).decode()
        except (binascii.Error, ValueError):
            return ""
        return text.partition(":")[2]
    return ""


def not_allowed(key: str, path: str = "") -> HTTPException:
    """The 401 of a request without a key, or with one that this server does not know."""
    challenge = None
    if path in PAGES:
        challenge = {"WWW-Authenticate": 'Basic realm="tinker_cookbook: the key as password"'}
    elif key.startswith(PREFIX):
        # A client whose token ended asks for another and repeats the request.
        challenge = {"WWW-Authenticate": 'Bearer error="invalid_token"'}
    return HTTPException(
        401,
        "TINKER_API_KEY: "
        + ("none was sent" if not key else "the key is not one of this server's")
        + "; at its start the server says where it keeps them",
        challenge,
    )
