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
from typing import TYPE_CHECKING

import chz
import jwt
from filelock import FileLock

from tinker_cookbook.engine.home import home_dir
from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

if TYPE_CHECKING:
    # Imported where it is needed: to print a key must not take the seconds of loading torch.
    from tinker_cookbook.server.owner_store import OwnerStore

FIRST_OWNER = "local"
KEYS_FILE = "server_keys.json"
ENVIRONMENT = "TINKER_COOKBOOK_SERVER_KEYS"
TOKEN_SECONDS = 12 * 3600
# Every JSON web token starts with this; no key does.
TOKEN_PREFIX = "eyJ"

_KEY_PREFIX = "tml-"  # the SDK requires this prefix
_MIN_CHARACTERS = 16  # after the prefix; a shorter key could be guessed


def user_urn(owner: str) -> str:
    """Returns the protocol's name for an owner."""
    return f"tml:user:{owner}"


def issue_token(owner: str, key: str, issued_at: int) -> str:
    """Returns a token for ``owner``, valid for ``TOKEN_SECONDS``.

    ``key`` signs the token, so the server stores none: tokens survive a restart and end with the
    key.
    """
    claims = {
        "iss": "tinker_cookbook",
        "sub": user_urn(owner),
        "org_id": "tinker_cookbook",
        "email": "",
        "iat": issued_at,
        "exp": issued_at + TOKEN_SECONDS,
    }
    return jwt.encode(claims, key, algorithm="HS256")


def _opens(given: str, owner: str, key: str) -> bool:
    """Returns whether ``given`` is the owner's ``key``, or a valid token that it has signed."""
    if not given.startswith(TOKEN_PREFIX):
        return hmac.compare_digest(given.encode(), key.encode())  # in constant time
    try:
        claims = jwt.decode(given, key, ["HS256"], {"require": ["exp", "sub"]})
    except (jwt.InvalidTokenError, ValueError, RecursionError):
        return False
    return claims["sub"] == user_urn(owner)


@dataclass(frozen=True, eq=False)
class ApiUser:
    """The user that an API key identifies, with a checkpoint store."""

    name: str
    store: OwnerStore


class KeyFile:
    """API keys in a JSON file of mode 600: ``{"OWNER": "tml-KEY", …}``.

    The file is created with the first key. ``root`` is the checkpoint folder of the first owner.
    With ``fixed`` keys, as of ``keys_of_environment``, no file is read or written. Each owner's
    runs may have ``quota_bytes`` on disk; None: no limit.
    """

    def __init__(
        self,
        path: Path,
        root: Path,
        fixed: dict[str, str] | None = None,
        quota_bytes: int | None = None,
    ) -> None:
        self.path, self.root, self.fixed, self.quota_bytes = path, root, fixed, quota_bytes
        self._names: list[str] = []
        self._owners: dict[str, ApiUser] = {}
        self._stamp = self._file_stamp()
        self._set_keys(read_keys(path) if fixed is None and path.exists() else fixed or {})

    def ensure(self, names: list[str]) -> dict[str, str]:
        """Creates a key for each owner without one; returns the new keys by owner."""
        from tinker_cookbook.engine.checkpoints.store import check_name

        # Names become folder names, so validate them before a key is written.
        for name in names:
            check_name(name, "owner")
        self._names = names
        # A complete file may be in a folder that cannot be written, such as a mounted secret.
        if self.fixed is not None or self._keys.keys() >= set(names):
            return {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.path}.lock"):  # two servers may start at the same time
            keys = read_keys(self.path) if self.path.exists() else self._keys
            missing = [name for name in names if name not in keys]
            new = {name: _KEY_PREFIX + secrets.token_urlsafe(32) for name in missing}
            self._set_keys(keys | new)
            if new:
                part = self.path.with_name(f"{self.path.name}.part")
                part.unlink(missing_ok=True)  # of a crash
                # Create the file with mode 600, so that others can never read it, and flush before
                # the rename: a crash leaves either the old keys or the new ones.
                with open(part, "x", opener=partial(os.open, mode=0o600)) as file:
                    json.dump(self._keys, file, indent=2)
                    file.flush()
                    os.fsync(file.fileno())
                part.replace(self.path)
            self._stamp = self._file_stamp()
        return new

    def refresh(self) -> list[str]:
        """Reads a changed file again; returns the owners with a new key and those without one.

        An owner of ``ensure`` without an entry gets a new key. A damaged file raises
        ConfigurationError once, and the keys stay as they were.
        """
        stamp = self._file_stamp()
        # A file that is missing may be in the middle of being replaced.
        if self.fixed is not None or stamp in (None, self._stamp):
            return []
        self._stamp, before = stamp, self._keys
        self._set_keys(read_keys(self.path))
        self.ensure(self._names)
        return sorted({name for name, _ in before.items() ^ self._keys.items()})

    def _file_stamp(self) -> tuple[int, ...] | None:
        with contextlib.suppress(OSError):
            found = self.path.stat()
            return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode
        return None

    def _set_keys(self, keys: dict[str, str]) -> None:
        from tinker_cookbook.server.owner_store import OwnerStore

        # An owner keeps its sessions when its key changes, so the object stays. Those without a
        # key stay too, for requests that run in this moment.
        owners = dict(self._owners)
        for name in keys:
            if name not in owners:
                root = self.root if name == FIRST_OWNER else self.root / "owners" / name
                owners[name] = ApiUser(name, OwnerStore(root, owner=name))
                owners[name].store.quota_bytes = self.quota_bytes
        # Each store also reads checkpoints that other owners have published.
        for owner in owners.values():
            owner.store.others = [owners[name].store for name in keys if name != owner.name]
        # In this order: other threads look for the owners of known keys.
        self._owners, self._keys = owners, keys

    def owner_of(self, key: str) -> ApiUser | None:
        """Returns the owner of a key or token; None if it is invalid."""
        for name, known in self._keys.items():
            if _opens(key, name, known):
                return self._owners[name]
        return None

    def owner(self, name: str) -> ApiUser:
        """Returns the owner with this name."""
        return self._owners[name]

    def token_of(self, owner: ApiUser) -> str:
        """Returns a new token for an owner."""
        return issue_token(owner.name, self._keys[owner.name], int(time.time()))

    @property
    def names(self) -> list[str]:
        """Names of the owners."""
        return list(self._keys)


def read_keys(path: Path) -> dict[str, str]:
    """Returns the keys in a file by owner; raises ConfigurationError."""
    from tinker_cookbook.engine.checkpoints.store import check_name

    # Others may already have read the keys in such a file, so none of them is accepted.
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigurationError(
            f"{path}: got mode {mode:o}, expected 600: others on this machine can read the keys. "
            f"Run `chmod 600 {path}`, or delete it for new keys"
        )
    try:
        keys = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigurationError(f"{path}: is no JSON ({error}); correct or delete it") from error
    if not isinstance(keys, dict):
        raise ConfigurationError(f'{path}: expected an object of "OWNER": "tml-…"')
    _check_keys(keys, str(path))
    for name in keys:
        check_name(name, f"{path}: owner")
    return keys


def keys_of_environment() -> dict[str, str] | None:
    """Returns the keys in ``TINKER_COOKBOOK_SERVER_KEYS`` (``OWNER=KEY,…``); None if it is not set.

    Raises ConfigurationError, whose message has no key.
    """
    parts = [part.strip() for part in os.environ.get(ENVIRONMENT, "").split(",") if part.strip()]
    keys = {name: key for name, _, key in (part.partition("=") for part in parts)}
    if len(keys) < len(parts):
        raise ConfigurationError(f"{ENVIRONMENT}: an owner is there twice, expected one key each")
    _check_keys(keys, ENVIRONMENT)
    return keys or None


def _check_keys(keys: dict[str, str], where: str) -> None:
    """Raises ConfigurationError for a key that can be guessed, or that two owners have."""
    for number, key in enumerate(keys.values(), 1):
        if not isinstance(key, str) or not key.startswith(_KEY_PREFIX):
            problem = f"does not begin with {_KEY_PREFIX}"
        elif len(key) < len(_KEY_PREFIX) + _MIN_CHARACTERS:
            problem = f"has fewer than {_MIN_CHARACTERS} characters after {_KEY_PREFIX}"
        elif list(keys.values()).count(key) > 1:
            problem = "is that of two owners"
        else:
            continue
        # The entries may be wrongly divided, so even a name could be a key.
        raise ConfigurationError(f"{where}: the key of entry {number} {problem}")


@chz.chz
class ShowConfig:
    """Which key is shown."""

    owner: str = chz.field(default="local", doc="Owner of the key")
    key_file: str | None = chz.field(
        default=None, doc="File of the API keys; default: server_keys.json in TINKER_COOKBOOK_HOME"
    )


def show(config: ShowConfig) -> None:
    """Prints an owner's key: ``export TINKER_API_KEY=$(python -m tinker_cookbook.server.keys)``."""
    path = Path(config.key_file or home_dir() / KEYS_FILE).expanduser()
    if not path.exists():
        raise ConfigurationError(f"key_file: {path} does not exist; the first start creates it")
    keys = read_keys(path)
    if config.owner not in keys:
        raise ConfigurationError(
            f"owner: got {config.owner!r}, expected one of {', '.join(keys)}"
            f"{nearest(config.owner, keys)}"
        )
    print(keys[config.owner])


if __name__ == "__main__":
    run_entrypoint(show)
