"""What every route needs: the host, and whose request it is."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from fastapi import Depends, HTTPException, Query, Request

from tinker_cookbook.engine.devices import free_memory_bytes
from tinker_cookbook.server.errors import NoRoom, TooLarge
from tinker_cookbook.server.host import Host
from tinker_cookbook.server.keys import Owner
from tinker_cookbook.server.tokens import PREFIX

# Async though they wait for nothing: a plain function would be called in a thread, at each request.


async def host_of(request: Request) -> Host:
    """The server's state."""
    return request.app.state.host


async def owner_of(request: Request) -> Owner:
    """The owner of the key in ``X-API-Key`` or ``Authorization: Bearer``; 401 without one."""
    key = request.headers.get("x-api-key") or ""
    if not key:
        scheme, _, rest = request.headers.get("authorization", "").partition(" ")
        key = rest.strip() if scheme.lower() == "bearer" else ""
    owner = request.app.state.host.keys.owner_of(key) if key else None
    if owner is None:
        raise HTTPException(
            401,
            "TINKER_API_KEY: "
            + ("none was sent" if not key else "the key is not one of this server's")
            + "; it printed where its keys are kept when it started",
            # A client whose token ended asks for another and repeats the request.
            {"WWW-Authenticate": 'Bearer error="invalid_token"'}
            if key.startswith(PREFIX)
            else None,
        )
    return owner


TheHost = Annotated[Host, Depends(host_of)]
TheOwner = Annotated[Owner, Depends(owner_of)]

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0)]


_LARGE = 1 << 20
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
    pieces, size = [], int(told) if told.isdigit() else 0
    no_room = _why_no_room(_TIMES * size) if _LARGE < size <= limit else ""
    if size <= limit:
        size = 0
        async for piece in request.stream():
            size += len(piece)
            if size > limit:
                break
            if not no_room or not pieces:
                pieces.append(piece)
    if size > limit:
        raise TooLarge(
            f"body: got more than {limit >> 20} MiB, the most that this server takes at once "
            "(max_request_mb=); send fewer datums a request"
        )
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
        np.empty(size, dtype=np.uint8)  # nobody but the allocator knows the limits of the process
    except MemoryError:
        return f"{needed}, which this process may not have"
    return ""
