"""Choosing a backend: ``backend=auto|local|tinker|URL``."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

from tinker_cookbook import _process
from tinker_cookbook.backends.engine_options import EngineSettings
from tinker_cookbook.backends.hosted import check_credentials, hosted_requested
from tinker_cookbook.backends.protocols import ServiceClient
from tinker_cookbook.engine.device_names import check_device_name, check_dtype_name
from tinker_cookbook.engine.home import home_dir
from tinker_cookbook.engine.sampler_settings import SamplerSettings
from tinker_cookbook.exceptions import ConfigurationError, nearest

logger = logging.getLogger(__name__)
T = TypeVar("T")

_NAMES = ("auto", "local", "tinker")

CLOSE_SECONDS, CLOSE_SECONDS_AFTER_FAILURE = 30.0, 3.0
"""Timeouts of the final status report to a service."""

Target = tuple[str, str | None, str, str, str | None]
"""Kind, URL, device, dtype and root of a connection."""


@dataclass(frozen=True, eq=False)
class Connection:
    """A connected backend: ``service``, its ``kind`` ("local" or "tinker"), and ``reasons``: the
    sentences for the user on what was chosen and why.

    As a context it closes itself, and reports to the service how the work in it ended.
    """

    service: ServiceClient
    kind: str
    reasons: tuple[str, ...]
    target: Target = field(repr=False)

    @property
    def is_hosted_service(self) -> bool:
        """Whether it is the hosted Tinker service, which bills tokens, and no server like it."""
        return self.kind == "tinker" and (self.url is None or "thinkingmachines.ai" in self.url)

    @property
    def url(self) -> str | None:
        """Address of the server; None for the local engine, and for the hosted service's own."""
        return _address(self.kind, self.target[1])

    def describe(self) -> str:
        """Returns the choice in one line."""
        return "; ".join(self.reasons)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close_after(error)

    def close_after(self, error: BaseException | None) -> None:
        """Closes the connection after work that ended with ``error``, or with success."""
        if error is None:
            self.close()
        else:
            self.close("interrupted" if is_interruption(error) else "errored", str(error))

    def close(self, status: str = "success", detail: str | None = None) -> None:
        """Closes the connection and reports ``status``: success, errored or interrupted.

        A service that cannot be reached is no error, because the work is done, and saved or not.
        """
        # A later ``make_once`` must open a new connection instead of using this closed one.
        if _open.get(self.target) is self:
            del _open[self.target]
        close = getattr(self.service, "close", None)  # older SDKs have none
        if close is None or (reported := close(status, detail)) is None:
            return
        success = status == "success"
        try:
            # On this report the server frees the run's weights; without it, only after heartbeats
            # have been missing for a while.
            reported.result(timeout=CLOSE_SECONDS if success else CLOSE_SECONDS_AFTER_FAILURE)
        except Exception as error:
            if success:  # after a failure, the failure is the news
                logger.warning("the final status report did not reach the server: %r", error)


_open: WeakValueDictionary[Target, Connection] = WeakValueDictionary()
"""The last connection to each target that is still in use."""


def is_interruption(error: BaseException) -> bool:
    """Returns whether the user pressed Ctrl-C; in an event loop that cancels the task."""
    return isinstance(error, (KeyboardInterrupt, asyncio.CancelledError))


def check_backend(
    backend: str = "auto", base_url: str | None = None, device: str = "auto", dtype: str = "auto"
) -> tuple[str, str | None, str]:
    """Resolves the settings without connecting: (kind, URL or None, reason).

    Contradictions are refused: ``base_url`` with the local engine, ``device`` with a remote one;
    so is a remote backend without a key (BackendError).
    """
    # Names are checked for every backend, so that a typo fails even where they have no effect.
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
    sampler: SamplerSettings | None = None,
    engine_settings: EngineSettings | None = None,
) -> Connection:
    """Connects to a backend.

    ``backend`` is ``local`` (the bundled engine), ``tinker`` (the hosted API), the URL of a server
    of its protocol (also given as ``base_url``), or ``auto``: the hosted API where a key or base
    URL is set in the environment, else the local engine. ``device`` (auto|cuda|mps|cpu), ``dtype``
    (auto|float32|bfloat16), ``root`` (the folder of checkpoints), ``sampler`` (default: built
    in) and ``engine_settings`` are for the local engine.
    """
    kind, url, reason = check_backend(backend, base_url, device, dtype)
    settings = engine_settings or EngineSettings()
    settings.check(local=kind == "local")
    sampler = sampler or SamplerSettings("builtin")
    sampler.check(local=kind == "local")
    reasons = [reason]
    # Each branch imports what it alone needs: the SDK, or torch and the engine.
    if kind == "tinker":
        from tinker_cookbook.backends.hosted import connect_hosted

        service = cast(ServiceClient, connect_hosted(url, user_metadata))
    else:
        from tinker_cookbook.backends.local import LocalServiceClient
        from tinker_cookbook.engine.checkpoints.store import CheckpointStore
        from tinker_cookbook.engine.engine import Engine
        from tinker_cookbook.engine.processes import join

        join()  # with torchrun, the other processes end here
        engine = Engine(
            device,
            dtype,
            settings.base_dtype,
            settings.replay_router,
            settings.joint_training,
            shard_base=settings.shard_base,
        )
        local = LocalServiceClient(engine, CheckpointStore(root), user_metadata)
        service, choice = cast(ServiceClient, local), engine.choice
        reasons.append(f"device: {choice.device}, {choice.device_reason}")
        dtype_name = str(choice.dtype).removeprefix("torch.")
        reasons.append(f"precision: {dtype_name}, {choice.dtype_reason}")
        if settings.base_dtype != "auto":
            reasons.append(f"base model: {settings.base_dtype}, as requested")
        if engine.processes > 1:
            reasons.append(
                f"processes: {engine.processes} of torchrun; each trains a part of every batch"
                + (" and keeps a part of the base model" if settings.shard_base else "")
            )
        reasons.append(engine.use_sampler(sampler))
        if choice.device.type == "cpu" and _process.openmp_policy_came_too_late():
            reasons.append(
                "torch was imported before tinker_cookbook, so its threads spin and small steps "
                "are slow: import tinker_cookbook first, or set OMP_WAIT_POLICY=PASSIVE"
            )
    # The registry holds it weakly, so that an unused engine and its models can be freed.
    target = _target(kind, url, device, dtype, root)
    connection = _open[target] = Connection(service, kind, tuple(reasons), target)
    return connection


def connect_with(
    settings: Any,
    *,
    sampler: SamplerSettings | None = None,
    user_metadata: dict[str, str] | None = None,
) -> Connection:
    """Connects with the options of a program: ``backend``, ``base_url``, ``device``, ``dtype``, and
    those of ``EngineSettings`` that ``settings`` has. The other arguments are those of
    ``connect``."""
    return connect(
        settings.backend,
        base_url=settings.base_url,
        device=settings.device,
        dtype=settings.dtype,
        user_metadata=user_metadata,
        sampler=sampler,
        engine_settings=EngineSettings.of(settings),
    )


_making = threading.Lock()
_made: WeakKeyDictionary[Connection, dict[Any, Any]] = WeakKeyDictionary()
_kept: dict[Target, Connection] = {}


def make_once(config: Any, make: Callable[[ServiceClient], T]) -> T:
    """Returns ``make(service)``, or what an equal config made on the same connection before.

    For models next to the one in training (judges, answerers). The engine keeps a base model once
    for all its adapters, so they use the open connection of the run; without one (in another
    process) a connection is opened and kept. Any thread may call it.

    Args:
        config: hashable, with the settings ``backend``, ``base_url``, ``device`` and ``dtype``;
            its settings of the engine and the sampler, if it has some, are used where a connection
            is opened.
        make: creates the value from a service client.
    """
    # One at a time, so that two threads with equal configs do not load the model twice.
    with _making:
        kind, url, _ = check_backend(config.backend, config.base_url, config.device, config.dtype)
        target = _target(kind, url, config.device, config.dtype)
        # The run's connection comes first: its engine holds the base model already.
        connection = _open.get(target) or _kept.get(target)
        if connection is None:
            # Judges have no such settings: vLLM would start for minutes for a few answers.
            sampler = SamplerSettings.of(config) if hasattr(config, "sampler") else None
            connection = _kept[target] = connect_with(config, sampler=sampler)
        # Values belong to a connection and are freed with it.
        made = _made.setdefault(connection, {})
        if config not in made:
            made[config] = make(connection.service)
        return made[config]


def server_url(settings: Any) -> str | None:
    """Returns the ``Connection.url`` that a program's options lead to."""
    return _address(*check_backend(settings.backend, settings.base_url)[:2])


def forget_kept(settings: Any) -> None:
    """Drops the connection that ``make_once`` keeps for these options, for one that is broken."""
    kind, url, _ = check_backend(settings.backend, settings.base_url)
    with _making:
        _kept.pop(_target(kind, url, settings.device, settings.dtype), None)


def _address(kind: str, url: str | None) -> str | None:
    return url or os.environ.get("TINKER_BASE_URL") if kind == "tinker" else None


def _target(
    kind: str, url: str | None, device: str, dtype: str, root: Path | None = None
) -> Target:
    # TINKER_COOKBOOK_HOME may change within a program; another root is another connection.
    folder = None if kind == "tinker" else str(root or home_dir())
    return kind, url, device, dtype, folder


def leave_torch_out(backend: str, base_url: str | None = None) -> bool:
    """Prevents the import of torch if the backend is remote; call it before ``connect``.

    The SDK and transformers import torch wherever it is installed, and work without it: a client
    takes 280 MB with it and 75 MB without, and starts sooner. It is for programs that give the SDK
    arrays, not tensors; renderers then give numpy arrays as weights. Nothing changes where torch is
    loaded already or the backend is the local engine.

    Returns:
        Whether torch is left out.
    """
    # The local engine needs torch, so only a remote backend can do without it.
    if check_backend(backend, base_url)[0] == "tinker":
        _process.leave_torch_out()
    return _process.torch_is_left_out()


def _choose(backend: str, base_url: str | None) -> tuple[str, str | None, str]:
    # ``backend=URL`` is a short form of ``backend=tinker base_url=URL``.
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
        return "local", None, "backend: the bundled engine, as requested"
    # Settings take precedence over the environment.
    if base_url is not None:
        return "tinker", base_url, f"backend: the server at {base_url}, as requested"
    if backend == "tinker":
        return "tinker", None, "backend: the hosted Tinker API, as requested"
    if os.environ.get("TINKER_BASE_URL"):
        return "tinker", None, "backend: the server named by TINKER_BASE_URL"
    if hosted_requested():
        return "tinker", None, "backend: the hosted Tinker API, because a key for it is set"
    return "local", None, "backend: the bundled engine, because no TINKER_API_KEY is set"


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))
