"""Who the caller is: tokens in exchange for keys, and what a key is called."""

from __future__ import annotations

import hashlib
from typing import Any

from fastapi import APIRouter, Request

from tinker_cookbook.exceptions import BackendError
from tinker_cookbook.server.access import TheHost, TheOwner
from tinker_cookbook.server.read_body import JsonRoute
from tinker_cookbook.server.tokens import PREFIX

router = APIRouter(prefix="/api/v1/auth", tags=["account"], route_class=JsonRoute)


@router.post("/token")
async def token(request: Request, owner: TheOwner, host: TheHost) -> dict[str, str]:
    """A token that stands for the key for some hours, and says whose it is."""
    if request.headers.get("x-api-key", "").startswith(PREFIX):
        raise BackendError("auth/token: got a token, expected a key: send the one it was made from")
    return {"jwt": host.keys.token_of(owner)}


@router.get("/apikey/me")
async def own_key(owner: TheOwner) -> dict[str, Any]:
    """What ``tinker auth login`` notes beside a key."""
    number = int.from_bytes(hashlib.sha256(owner.name.encode()).digest()[:6])
    return {
        "key_id": number,
        "name": owner.name,
        "note": "of a server of your own",
        "details": {
            "org_details": {"name": "tinker_cookbook"},
            "user_details": {"email": owner.name},
        },
    }
