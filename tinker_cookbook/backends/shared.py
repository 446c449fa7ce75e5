"""Models beside the one in training (judges, answerers), on the backend that the run has open.

The bundled engine keeps a base model once however many adapters are on it, but a second engine
would load it again. What a config makes here is made once for a connection; where no connection
with its settings is open (in another process, or without a run), one is opened, and kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from tinker_cookbook.backends.connect import (
    Connection,
    Target,
    connect,
    open_connection,
    target_of,
)
from tinker_cookbook.backends.protocols import ServiceClient

T = TypeVar("T")


class BackendSettings(Hashable, Protocol):
    """A config that says which backend it wants, as ``connect`` does."""

    @property
    def backend(self) -> str:
        """auto, local, tinker or a URL."""
        ...

    @property
    def base_url(self) -> str | None:
        """URL of a server."""
        ...

    @property
    def device(self) -> str:
        """Of the bundled engine."""
        ...

    @property
    def dtype(self) -> str:
        """Of the bundled engine."""
        ...


def make_once(config: BackendSettings, make: Callable[[ServiceClient], T]) -> T:
    """Returns ``make(service)``, or what an equal config made on the same connection before.

    May be called in any thread; whoever comes while it is being made waits for it.
    """
    with _making:
        connection = _shared(config)
        made = _made.setdefault(connection, {})
        if config not in made:
            made[config] = make(connection.service)
        return made[config]


def _shared(config: BackendSettings) -> Connection:
    target = target_of(config.backend, config.base_url, config.device, config.dtype)
    found = open_connection(target) or _kept.get(target)
    if found is None:
        found = _kept[target] = connect(
            config.backend, base_url=config.base_url, device=config.device, dtype=config.dtype
        )
    return found


_making = threading.Lock()
_made: WeakKeyDictionary[Connection, dict[Hashable, Any]] = WeakKeyDictionary()
_kept: dict[Target, Connection] = {}
