"""Choosing a backend: ``backend=auto|local|tinker|URL``."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from weakref import WeakValueDictionary

from tinker_cookbook._process import openmp_policy_came_too_late
from tinker_cookbook.backends.hosted import check_credentials
from tinker_cookbook.backends.protocols import ServiceClient
from tinker_cookbook.engine.device_names import check_device_name, check_dtype_name
from tinker_cookbook.exceptions import ConfigurationError, nearest

logger = logging.getLogger(__name__)
_NAMES = ("auto", "local", "tinker")

FAREWELL_SECONDS, SHORT_FAREWELL_SECONDS = 30.0, 3.0
"""How long a service may take to hear that all is done; that it failed or was interrupted."""

Target = tuple[str, str | None, str, str, str | None]
"""What a connection leads to: kind, URL, device, dtype and root."""


@dataclass(frozen=True, eq=False)
class Connection:
    """A connected backend: ``service`` to work with, ``kind`` ("local" or "tinker"), and the
    sentences that tell a person what was chosen and why.

    As a context it closes itself, and tells the service how what was done in it ended.
    """

    service: ServiceClient
    kind: str
    reasons: tuple[str, ...]
    target: Target = field(repr=False)

    def describe(self) -> str:
        """Returns the choice in one line."""
        return "; ".join(self.reasons)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close_after(error)

    def close_after(self, error: BaseException | None) -> None:
        """Ends it after work that ``error`` ended, or that succeeded where there is none."""
        if error is None:
            self.close()
        else:
            self.close("interrupted" if is_interruption(error) else "errored", str(error))

    def close(self, status: str = "success", detail: str | None = None) -> None:
        """Ends it; the service is told how the work went: success, errored or interrupted.

        One that cannot be told changes nothing: what was done is done, and saved or not.
        """
        if _open.get(self.target) is self:
            del _open[self.target]
        close = getattr(self.service, "close", None)  # older SDKs have none
        if close is None:
            return
        told = close(status, detail)
        if told is None:
            return
        success = status == "success"
        try:
            told.result(timeout=FAREWELL_SECONDS if success else SHORT_FAREWELL_SECONDS)
        except Exception as error:
            if success:  # else what ended the work is the news, not this
                logger.warning("the server could not be told that all is done: %r", error)


def is_interruption(error: BaseException) -> bool:
    """Returns whether somebody pressed Ctrl-C; inside an event loop it looks like a cancelled
    task."""
    return isinstance(error, (KeyboardInterrupt, asyncio.CancelledError))


_open: WeakValueDictionary[Target, Connection] = WeakValueDictionary()


def open_connection(target: Target) -> Connection | None:
    """Returns the last connection to ``target``, if it is still held by somebody and not closed."""
    return _open.get(target)


def target_of(backend: str, base_url: str | None, device: str, dtype: str) -> Target:
    """Returns what ``connect`` would lead to with these settings."""
    kind, url, _ = check_backend(backend, base_url, device, dtype)
    return kind, url, device, dtype, None


def check_backend(
    backend: str = "auto", base_url: str | None = None, device: str = "auto", dtype: str = "auto"
) -> tuple[str, str | None, str]:
    """Resolves the settings without connecting: (kind, URL or None, reason).

    Contradictions are refused: ``base_url`` with the local engine, ``device`` with a remote one;
    so is a remote backend without a key (BackendError).
    """
    check_device_name(device)
    check_dtype_name(dtype)
    kind, url, reason = _choose(backend, base_url)
    if kind == "tinker":
        for name, value in (("device", device), ("dtype", dtype)):
            if value != "auto":
                raise ConfigurationError(
                    f"{name}={value}: the remote backend decides that itself; leave {name} out or "
                    "set backend=local"
                )
        check_credentials()
    return kind, url, reason


def connect(
    backend: str = "auto",
    *,
    base_url: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    root: Path | None = None,
    user_metadata: dict[str, str] | None = None,
) -> Connection:
    """Connects to a backend.

    ``backend`` is ``local`` (the bundled engine), ``tinker`` (the hosted API), a URL that speaks
    its protocol, or ``auto``: the hosted API where a key or base URL is set in the environment,
    else the local engine. ``base_url`` is the other spelling of a URL. ``device``
    (auto|cuda|mps|cpu), ``dtype`` (auto|float32|bfloat16) and ``root`` (where checkpoints are
    kept) belong to the local engine.
    """
    kind, url, reason = check_backend(backend, base_url, device, dtype)
    if kind == "tinker":
        from tinker_cookbook.backends.hosted import connect_hosted

        hosted = cast(ServiceClient, connect_hosted(url, user_metadata))
        service, reasons = hosted, [reason]
    else:
        service, choices = _connect_local(device, dtype, root, user_metadata)
        reasons = [reason, *choices]
    target = kind, url, device, dtype, None if root is None else str(root)
    connection = _open[target] = Connection(service, kind, tuple(reasons), target)
    return connection


def _connect_local(
    device: str, dtype: str, root: Path | None, user_metadata: dict[str, str] | None
) -> tuple[ServiceClient, list[str]]:
    """Returns the bundled engine, and what it chose."""
    from tinker_cookbook.backends.local import LocalServiceClient
    from tinker_cookbook.engine.checkpoints.store import CheckpointStore
    from tinker_cookbook.engine.engine import Engine

    engine = Engine(device, dtype)
    local = LocalServiceClient(engine, CheckpointStore(root), user_metadata)
    choice = engine.choice
    dtype_name = str(choice.dtype).removeprefix("torch.")
    reasons = [
        f"device: {choice.device}, {choice.device_reason}",
        f"precision: {dtype_name}, {choice.dtype_reason}",
    ]
    if choice.device.type == "cpu" and openmp_policy_came_too_late():
        reasons.append(
            "torch was imported before tinker_cookbook, so its threads spin and small steps are "
            "slow: import tinker_cookbook first, or set OMP_WAIT_POLICY=PASSIVE"
        )
    return cast(ServiceClient, local), reasons


def _choose(backend: str, base_url: str | None) -> tuple[str, str | None, str]:
    if _is_url(backend):
        if base_url is not None and base_url != backend:
            raise ConfigurationError(
                f"backend={backend} and base_url={base_url} name two servers; give one of them"
            )
        backend, base_url = "tinker", backend
    if backend not in _NAMES:
        raise ConfigurationError(
            f"backend: got {backend!r}, expected auto, local, tinker or a URL"
            f"{nearest(backend, _NAMES)}"
        )
    if base_url is not None and not _is_url(base_url):
        raise ConfigurationError(
            f"base_url: got {base_url!r}, expected a URL that starts with http:// or https://"
        )
    if backend == "local":
        if base_url is not None:
            raise ConfigurationError(
                f"backend=local and base_url={base_url} contradict each other; leave one out"
            )
        return "local", None, "backend: the bundled engine, as asked"
    if base_url is not None:
        return "tinker", base_url, f"backend: the server at {base_url}, as asked"
    if backend == "tinker":
        return "tinker", None, "backend: the hosted Tinker API, as asked"
    from tinker_cookbook.backends.hosted import hosted_requested

    if os.environ.get("TINKER_BASE_URL"):
        return "tinker", None, "backend: the server named by TINKER_BASE_URL"
    if hosted_requested():
        return "tinker", None, "backend: the hosted Tinker API, because a key for it is set"
    return "local", None, "backend: the bundled engine, because no TINKER_API_KEY is set"


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))
