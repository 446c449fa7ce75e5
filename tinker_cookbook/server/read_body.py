"""How routes read bodies: within bounds of size, number and depth, and without holding others up.

Parsing JSON holds Python's lock from beginning to end, in a thread too. What makes it slow is not
the bytes but the lists and objects, so their number has a bound, which is counted in the bytes
before they are parsed.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
import torch
from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from tinker_cookbook.engine.devices import free_memory_bytes
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.server.errors import NoRoom, TooLarge, too_large

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

SMALL_BYTES = 1 << 16
"""A body up to this size is parsed sooner than it is handed to a thread."""
CONTROL_BYTES = 1 << 20
"""Largest body of a request that carries no tokens: ids, names, settings, metadata."""
CONTROL_CONTAINERS = 20_000
DATA_CONTAINERS = 200_000
"""Most lists and objects of a body without and with tokens. A datum has about ten."""
DEEPEST = 100
"""Most lists and objects within each other, where what is in them is kept and sent back."""

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


class JsonRoute(APIRoute):
    """A route whose JSON body FastAPI parses: small, since it is parsed on the event loop."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler over a request that bounds its own body."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


class _JsonRequest(Request):
    """Says in words what is wrong with a body; FastAPI replaces all but ``HTTPException``."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            limit = min(CONTROL_BYTES, self.app.state.max_request_bytes)
            try:
                self._body = await body_of(self, limit)
            except TooLarge:
                raise HTTPException(
                    413, f"body: got more than {limit >> 10} KiB, the most for this address"
                ) from None
        return self._body

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            try:
                check_containers(body, CONTROL_CONTAINERS)
                self._json = json.loads(body)
                _check_depth(self._json)
            except json.JSONDecodeError:  # FastAPI has a sentence for these
                raise
            except RecursionError:
                raise HTTPException(
                    400, f"body: lists and objects are nested more than {DEEPEST} deep"
                ) from None
            except (DataValidationError, UnicodeDecodeError) as error:
                raise HTTPException(400, f"body: {error}".replace("body: body:", "body:")) from None
        return self._json


async def read_model(request: Request, model: type[M]) -> M:
    """A body with tokens as ``model``; ``RequestValidationError`` (422) for one without its form.

    Large ones are parsed in a thread, and from the bytes, which takes a third of the time of
    parsing first and checking then.
    """
    body = await body_of(request, request.app.state.max_request_bytes)
    try:
        return await parsed(body, lambda: model.model_validate_json(body))
    except ValidationError as error:
        problems = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise RequestValidationError(problems) from error


async def parsed(body: bytes, parse: Callable[[], T]) -> T:
    """``parse()`` of a JSON body with tokens, in a thread where it is large.

    Raises ``DataValidationError`` for more lists and objects than such a body has.
    """
    if len(body) <= SMALL_BYTES:
        return parse()

    def work() -> T:
        check_containers(body, DATA_CONTAINERS)
        return parse()

    return await asyncio.to_thread(work)


def check_containers(body: bytes, most: int) -> None:
    """Raises ``DataValidationError`` for JSON of more than ``most`` lists and objects."""
    if len(body) <= most:
        return
    count = body.count(b"[") + body.count(b"{")
    if count > most:  # brackets in texts do not count; looking for texts takes longer
        bare = _STRING.sub(b"", body)
        count = bare.count(b"[") + bare.count(b"{")
    if count > most:
        raise DataValidationError(
            f"body: got {count} lists and objects, expected at most {most} in one request"
        )


def _check_depth(value: Any) -> None:
    """Raises ``RecursionError`` for what is deeper than ``DEEPEST``; takes no recursion itself."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise RecursionError
        inner = [
            one.values() if isinstance(one, dict) else one
            for one in level
            if isinstance(one, (dict, list))
        ]
        level = [one for part in inner for one in part]


_TIMES = 6
"""What reading a body takes at most, in its own size: the pieces, the whole, a message, arrays."""
_HEAD_BYTES = 1024
"""What is kept of a body that there is no memory for."""


async def body_of(request: Request, limit: int) -> bytes:
    """The body, read piece by piece and given up where it grows beyond ``limit`` bytes.

    Raises ``NoRoom`` for one that the memory has no room for, read to its end all the same: who is
    answered before may send it again and again.
    """
    told = request.headers.get("content-length", "")
    pieces, size = [], int(told) if told.isdecimal() else 0
    no_room = _why_no_room(_TIMES * size) if CONTROL_BYTES < size <= limit else ""
    if size <= limit:
        size = 0
        async for piece in request.stream():
            size += len(piece)
            if size > limit:
                break
            if not no_room or not pieces:
                pieces.append(piece)
    if size > limit:
        raise too_large(limit)
    if no_room:
        raise NoRoom(no_room, bytes(pieces[0][:_HEAD_BYTES]))
    return b"".join(pieces)


def _why_no_room(size: int) -> str:
    """Why so much memory cannot be had; asked for in one piece, before others find none left."""
    needed = f"reading the request takes up to {size >> 20} MiB"
    free = free_memory_bytes(torch.device("cpu"))
    if size > free:
        return f"{needed}, and {free >> 20} are free"
    try:
        np.empty(size, dtype=np.uint8)  # only the allocator knows the limits of the process
    except MemoryError:
        return f"{needed}, which this process may not have"
    return ""
