"""What every route needs: the host, and whose request it is."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated

from fastapi import Depends, Query, Request

from tinker_cookbook.server.gate import key_of, not_allowed
from tinker_cookbook.server.keys import Owner
from tinker_cookbook.server.state import ServerState

# Async though they wait for nothing: a plain function would be called in a thread, at each request.


async def host_of(request: Request) -> ServerState:
    """The server's state."""
    return request.app.state.host


async def owner_of(request: Request) -> Owner:
    """The owner of the key that the request came with; 401 without one.

    The gate in front of the routes found it, before the body was read.
    """
    owner = getattr(request.state, "owner", None)
    if owner is None:
        raise not_allowed(key_of(request))
    return owner


def is_same_machine(request: Request) -> bool:
    """Whether the client runs on this machine; not where a proxy says that it speaks for others."""
    if any(name in request.headers for name in ("forwarded", "x-forwarded-for", "via")):
        return False
    try:
        return request.client is not None and ip_address(request.client.host).is_loopback
    except ValueError:
        return False


TheHost = Annotated[ServerState, Depends(host_of)]
TheOwner = Annotated[Owner, Depends(owner_of)]

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0)]
