"""Tokens in a key's place: JWTs that name the owner, signed with the key itself (RFC 7519, HS256).

Clients trade their key for one where the server says so, and read from it who they are. Signed with
the key, a token needs no state: it holds over a restart, and ends with its key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import time
from typing import Any

SECONDS = 12 * 3600
PREFIX = "eyJ"
"""All tokens begin so, and no key does."""

_HEADER = {"alg": "HS256", "typ": "JWT"}
_USER = "tml:user:"


def issue(owner: str, key: str, now: float | None = None) -> str:
    """A token for the owner of ``key``, which holds for ``SECONDS``."""
    begun = int(time.time() if now is None else now)
    claims = {
        "iss": "tinker_cookbook",
        "sub": f"{_USER}{owner}",
        "org_id": "tinker_cookbook",
        "email": "",
        "iat": begun,
        "exp": begun + SECONDS,
    }
    signed = f"{_encode(_HEADER)}.{_encode(claims)}"
    return f"{signed}.{_signature(signed, key)}"


def claimed_owner(token: str) -> str | None:
    """The owner that a token names, whether it is right or not."""
    subject = _claims(token).get("sub")
    return subject.removeprefix(_USER) if isinstance(subject, str) else None


def is_good(token: str, key: str, now: float | None = None) -> bool:
    """Whether ``key`` signed it and it has not ended."""
    signed, _, signature = token.rpartition(".")
    if not hmac.compare_digest(signature.encode(), _signature(signed, key).encode()):
        return False
    end = _claims(token).get("exp")
    return isinstance(end, int) and end > (time.time() if now is None else now)


def user_of(owner: str) -> str:
    """The name that the protocol gives an owner."""
    return f"{_USER}{owner}"


def _claims(token: str) -> dict[str, Any]:
    parts = token.split(".")
    try:
        found = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (IndexError, ValueError, binascii.Error, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _encode(what: dict[str, Any]) -> str:
    return _text(json.dumps(what, separators=(",", ":")).encode())


def _signature(signed: str, key: str) -> str:
    return _text(hmac.new(key.encode(), signed.encode(), hashlib.sha256).digest())


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
