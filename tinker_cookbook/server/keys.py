"""Who may use the server: keys in a file that only its user may read, each of one owner.

The first owner's checkpoints are those of this machine's own runs; every other owner has a folder
beside them, and no request reaches from one into another.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from tinker_cookbook.engine.checkpoints.paths import check_name
from tinker_cookbook.engine.checkpoints.store import CheckpointStore
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.server import tokens

FIRST_OWNER = "local"
_PREFIX = "tml-"  # without it the SDK sends no request


@dataclass(frozen=True, eq=False)
class Owner:
    """Whose a request is."""

    name: str
    store: CheckpointStore


class KeyFile:
    """``{"OWNER": "tml-KEY", …}``, of mode 600.

    Args:
        path: of the file; made with the first key.
        root: where the first owner's checkpoints lie.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self._root = path, root
        self._keys: dict[str, str] = self._read() if path.exists() else {}
        self._owners = {name: self._owner(name) for name in self._keys}

    def ensure(self, names: list[str]) -> dict[str, str]:
        """Makes a key for each owner who has none; returns the new ones."""
        for name in names:
            check_name(name, "owner")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.path}.lock"):  # two servers may start at once
            if self.path.exists():
                self._keys = self._read()
            made = {
                name: _PREFIX + secrets.token_urlsafe(32)
                for name in names
                if name not in self._keys
            }
            self._keys |= made
            if made:
                self._write()
        self._owners = {name: self._owner(name) for name in self._keys}
        with contextlib.suppress(FileNotFoundError):
            (self._root / "owners").chmod(0o700)  # older servers left it open to others
        return made

    def owner_of(self, key: str) -> Owner | None:
        """The owner of a key or token, in a time that says nothing about the others' keys."""
        if key.startswith(tokens.PREFIX):
            name = tokens.claimed_owner(key)
            known = self._keys.get(name or "")
            return self._owners[name] if name and known and tokens.is_good(key, known) else None
        found = None
        for name, known in self._keys.items():
            if hmac.compare_digest(known.encode(), key.encode()):
                found = self._owners[name]
        return found

    def owner(self, name: str) -> Owner:
        """The owner of this name, who has a key."""
        return self._owners[name]

    def token_of(self, owner: Owner) -> str:
        """A token that stands for the owner's key for a while."""
        return tokens.issue(owner.name, self._keys[owner.name])

    @property
    def names(self) -> list[str]:
        """The owners."""
        return list(self._keys)

    def _owner(self, name: str) -> Owner:
        root = self._root if name == FIRST_OWNER else self._root / "owners" / name
        return Owner(name, CheckpointStore(root, owner=name))

    def _read(self) -> dict[str, str]:
        mode = stat.S_IMODE(self.path.stat().st_mode)
        if mode & 0o077:
            raise ConfigurationError(
                f"{self.path}: got mode {mode:o}, expected 600: others on this machine can read "
                f"the keys. Run `chmod 600 {self.path}`, or delete it for new keys"
            )
        try:
            keys = json.loads(self.path.read_bytes())
            if not isinstance(keys, dict) or not all(
                isinstance(key, str) and key.startswith(_PREFIX) for key in keys.values()
            ):
                raise ValueError('it is no object of "OWNER": "tml-…"')
        except ValueError as error:
            raise ConfigurationError(
                f"{self.path}: cannot be read as a file of keys ({error}). Delete it for new ones"
            ) from error
        for name in keys:
            check_name(name, f"{self.path}: owner")
        return keys

    def _write(self) -> None:
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        part.unlink(missing_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(self._keys, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.path)
