"""API keys, their owners, and JSON web tokens that clients get for a key.

The first owner owns the checkpoints of runs on this machine. Every other owner has a
subfolder. A request writes only to its owner's folder, and reads other folders only if their owners
have published the checkpoint.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import stat
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jwt
from filelock import FileLock

from tinker_cookbook.engine.checkpoints.owner_store import OwnerStore
from tinker_cookbook.engine.checkpoints.store import check_name
from tinker_cookbook.exceptions import ConfigurationError

FIRST_OWNER = "local"
TOKEN_SECONDS = 12 * 3600
# Every JSON web token starts with this; no key does.
TOKEN_PREFIX = "eyJ"

_KEY_PREFIX = "tml-"  # the SDK requires this prefix
_USER_PREFIX = "tml:user:"


def issue_token(owner: str, key: str, now: float | None = None) -> str:
    """Returns a token for ``owner``, valid for ``TOKEN_SECONDS``.

    ``key`` signs the token, so the server stores none: tokens survive a restart and end with the
    key.
    """
    issued_at = int(time.time() if now is None else now)
    claims = {
        "iss": "tinker_cookbook",
        "sub": user_urn(owner),
        "org_id": "tinker_cookbook",
        "email": "",
        "iat": issued_at,
        "exp": issued_at + TOKEN_SECONDS,
    }
    return jwt.encode(claims, key, algorithm="HS256")


def unverified_owner(token: str) -> str | None:
    """Returns the owner named in a token, without verifying the signature."""
    try:
        subject = jwt.decode(token, options={"verify_signature": False}).get("sub")
    except (jwt.InvalidTokenError, ValueError, RecursionError):
        return None
    return subject.removeprefix(_USER_PREFIX) if isinstance(subject, str) else None


def is_valid_token(token: str, key: str, now: float | None = None) -> bool:
    """Returns whether ``key`` signed the token and it has not expired."""
    try:
        # Check the expiry here: PyJWT cannot compare with a given ``now``.
        claims = jwt.decode(
            token, key, ["HS256"], {"verify_exp": False, "verify_iat": False, "require": ["exp"]}
        )
    except (jwt.InvalidTokenError, ValueError, RecursionError):
        return False
    expires = claims["exp"]
    return isinstance(expires, int) and expires > (time.time() if now is None else now)


def user_urn(owner: str) -> str:
    """Returns the protocol's name for an owner."""
    return f"{_USER_PREFIX}{owner}"


@dataclass(frozen=True, eq=False)
class Owner:
    """Owner of an API key, with a checkpoint store."""

    name: str
    store: OwnerStore


class KeyFile:
    """API keys in a JSON file of mode 600: ``{"OWNER": "tml-KEY", …}``.

    The file is created with the first key. ``root`` is the checkpoint folder of the first owner.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self._root = path, root
        self._set_keys(self._read() if path.exists() else {})

    def ensure(self, names: list[str]) -> dict[str, str]:
        """Creates a key for each owner without one; returns the new keys by owner."""
        # Names become folder names, so validate them before a key is written.
        for name in names:
            check_name(name, "owner")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.path}.lock"):  # two servers may start at the same time
            # Read again under the lock: another server may have written keys.
            keys = self._read() if self.path.exists() else self._keys
            missing = [name for name in names if name not in keys]
            new = {name: _KEY_PREFIX + secrets.token_urlsafe(32) for name in missing}
            self._set_keys(keys | new)
            if new:
                part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
                # A crashed process with the same id may have left the file, and mode "x" would
                # fail.
                part.unlink(missing_ok=True)
                # Create the file with mode 600, so that others can never read it.
                with open(part, "x", opener=partial(os.open, mode=0o600)) as file:
                    json.dump(self._keys, file, indent=2)
                    file.flush()
                    os.fsync(file.fileno())
                # Flush before the rename: a crash leaves either the old keys or the new ones.
                part.replace(self.path)
        with contextlib.suppress(FileNotFoundError):
            (self._root / "owners").chmod(0o700)  # older servers created it readable for others
        return new

    def _set_keys(self, keys: dict[str, str]) -> None:
        self._keys, self._owners = keys, dict[str, Owner]()
        for name in keys:
            root = self._root if name == FIRST_OWNER else self._root / "owners" / name
            self._owners[name] = Owner(name, OwnerStore(root, owner=name))
        # Each store also reads checkpoints that other owners have published.
        for owner in self._owners.values():
            owner.store.others = [o.store for o in self._owners.values() if o is not owner]

    def owner_of(self, key: str) -> Owner | None:
        """Returns the owner of a key or token; None if it is invalid."""
        if key.startswith(TOKEN_PREFIX):
            # A token names its owner; the owner's key verifies it.
            name = unverified_owner(key)
            known = self._keys.get(name or "")
            return self._owners[name] if name and known and is_valid_token(key, known) else None
        owner = None
        # Compare all keys in constant time, so that the duration reveals nothing.
        for name, known in self._keys.items():
            if hmac.compare_digest(known.encode(), key.encode()):
                owner = self._owners[name]
        return owner

    def owner(self, name: str) -> Owner:
        """Returns the owner with this name."""
        return self._owners[name]

    def token_of(self, owner: Owner) -> str:
        """Returns a new token for an owner."""
        return issue_token(owner.name, self._keys[owner.name])

    @property
    def names(self) -> list[str]:
        """Names of the owners."""
        return list(self._keys)

    def _read(self) -> dict[str, str]:
        # Others may already have read the keys in such a file, so none of them is accepted.
        mode = stat.S_IMODE(self.path.stat().st_mode)
        if mode & 0o077:
            raise ConfigurationError(
                f"{self.path}: got mode {mode:o}, expected 600: others on this machine can read "
                f"the keys. Run `chmod 600 {self.path}`, or delete it for new keys"
            )
        try:
            keys = json.loads(self.path.read_bytes())
            if not isinstance(keys, dict) or not all(
                isinstance(key, str) and key.startswith(_KEY_PREFIX) for key in keys.values()
            ):
                raise ValueError('expected an object of "OWNER": "tml-…"')
        except ValueError as error:
            raise ConfigurationError(
                f"{self.path}: cannot be read as a file of keys ({error}). Delete it for new keys"
            ) from error
        for name in keys:
            check_name(name, f"{self.path}: owner")
        return keys
