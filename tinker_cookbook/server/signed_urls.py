"""Addresses of files that hold for a while and need no key: they are signed by this server."""

from __future__ import annotations

import hmac
import secrets
import time
from datetime import UTC, datetime
from urllib.parse import urlencode

from tinker_cookbook.server.errors import NotThere
from tinker_cookbook.server.keys import KeyFile, Owner

SECONDS = 3600


class SignedUrls:
    """Signs and checks; what was signed is worth nothing after a restart."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def expires(self) -> datetime:
        """When an address that is signed now ends."""
        return datetime.fromtimestamp(int(time.time()) + SECONDS, UTC)

    def sign(self, owner: str, path: str, file: str) -> str:
        """The query that lets anyone fetch one file of a checkpoint."""
        until = int(time.time()) + SECONDS
        signature = self._signature(owner, path, file, until)
        return urlencode({"until": until, "signature": signature})

    def owner_of(
        self, keys: KeyFile, owner: str, path: str, file: str, until: int, signature: str
    ) -> Owner:
        """Whose file it is; raises ``NotThere`` for an address that was not signed, or ended."""
        right = hmac.compare_digest(
            self._signature(owner, path, file, until).encode(), signature.encode()
        )
        if not right or until < time.time():
            raise NotThere("this address was not signed by this server, or has ended; ask again")
        return keys.owner(owner)

    def _signature(self, owner: str, path: str, file: str, until: int) -> str:
        text = "\n".join((owner, path, file, str(until)))
        return hmac.new(self._secret, text.encode(), "sha256").hexdigest()
