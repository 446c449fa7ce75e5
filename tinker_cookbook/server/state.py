"""State of the server: the engine, client sessions, requests in flight and signed URLs."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tinker_cookbook.backends.local import LocalServiceClient
from tinker_cookbook.backends.local_sampling import LocalSamplingClient
from tinker_cookbook.backends.local_training import LocalTrainingClient
from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.exceptions import (
    DataValidationError,
    ModelNotFoundError,
    nearest,
    nearest_sentence,
)
from tinker_cookbook.server.errors import BusyError, NotFoundError, SessionEndedError
from tinker_cookbook.server.image_sources import ImageSources
from tinker_cookbook.server.keys import ApiUser, KeyFile
from tinker_cookbook.server.requests import OrderedDispatcher, PendingRequest

logger = logging.getLogger(__name__)

MAX_IDLE_SAMPLERS = 8
IDLE_SECONDS = 900.0
# Seconds that a fetched result is kept, because the response may have been lost.
RETENTION_SECONDS = 60.0
# Requests whose images are read at the same time. The largest image takes about 1 GiB meanwhile.
_IMAGE_REQUESTS = 2
# Seconds between two looks at the file of keys.
KEY_SECONDS = 2.0
# Seconds between two searches for expired checkpoints.
EXPIRE_SECONDS = 300.0


@dataclass(eq=False)
class Model:
    """Adapter in training."""

    model_id: str
    dispatcher: OrderedDispatcher
    client: LocalTrainingClient | None = None
    """None until the first operation has created it."""
    base_model: str | None = None
    """Name of its base model; None like ``client``."""


@dataclass(eq=False)
class OpenSampler:
    """Sampler of one version of the weights."""

    sampler_id: str
    client: LocalSamplingClient | None
    """None after eviction; a base model or a checkpoint is loaded again at the next request."""
    base_model: str
    model_path: str | None = None
    is_snapshot: bool = False
    inflight_of: str | None = None
    """Id of the model that replaces these weights by later ``inflight`` saves."""
    used_at: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class Session:
    """Models and samplers of one client program."""

    session_id: str
    owner: ApiUser
    service: LocalServiceClient
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    seen_at: float = field(default_factory=time.monotonic)
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, OpenSampler] = field(default_factory=dict)

    def model_id(self, number: int) -> str:
        """Returns the id of a model; the client computes the same id."""
        return f"{self.session_id}:train:{number}"

    def sampler_id(self, number: int) -> str:
        """Returns the id of a sampler; the client computes the same id."""
        return f"{self.session_id}:sample:{number}"

    def evict_idle_samplers(self, now: float) -> None:
        """Frees memory of all samplers except the ``MAX_IDLE_SAMPLERS`` most recent ones.

        At once what the next request computes again, and after ``IDLE_SECONDS`` the weights.
        """
        # Clients cannot close samplers, and a training run creates one at every step.
        loaded = [(one, one.client) for one in self.samplers.values() if one.client is not None]
        loaded.sort(key=lambda pair: pair[0].used_at, reverse=True)
        for sampler, client in loaded[MAX_IDLE_SAMPLERS:]:
            client.release_terms()
            if now - sampler.used_at < IDLE_SECONDS:
                continue
            sampler.client = None
            # A snapshot is not on disk and cannot be loaded again, so its id ends with its
            # weights.
            if sampler.is_snapshot:
                del self.samplers[sampler.sampler_id]


class ServerState:
    """State shared by all requests. Its methods run only on the event loop.

    ``models`` are the base models that requests may use. A session ends after ``session_seconds``
    without a heartbeat. An owner may have ``max_queued_samples`` unfinished samples.
    """

    def __init__(
        self,
        engine: Engine,
        models: Sequence[str],
        keys: KeyFile,
        session_seconds: float,
        max_queued_samples: int,
        images: ImageSources | None = None,
    ) -> None:
        self.engine, self.models, self.keys = engine, tuple(models), keys
        self.images = images or ImageSources()
        self.image_slots = asyncio.Semaphore(_IMAGE_REQUESTS)
        self.requests: dict[str, PendingRequest] = {}
        """By id, until their results are fetched or their session ends."""
        self._max_queued_samples = max_queued_samples
        self._queued_samples: Counter[str] = Counter()  # unfinished, by owner
        self._samples_lock = threading.Lock()
        self.stopping = asyncio.Event()
        self.started_at = time.time()
        self._session_seconds = session_seconds
        self._sessions: dict[str, Session] = {}
        self._url_secret = secrets.token_bytes(32)

    def signature(self, owner: str, path: str, file: str, until: int) -> str:
        """Returns the signature for access to one file of a checkpoint without a key.

        It expires at ``until``, which the route checks, or with the process.
        """
        text = "\n".join((owner, path, file, str(until)))
        return hmac.new(self._url_secret, text.encode(), "sha256").hexdigest()

    def start_session(self, owner: ApiUser, metadata: dict | None, name: str | None) -> Session:
        """Creates a session."""
        session_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        # In the protocol, the metadata of runs are strings.
        text = {key: str(value) for key, value in (metadata or {}).items()}
        service = LocalServiceClient(self.engine, owner.store, text, session_id)
        session = Session(session_id, owner, service, metadata, name)
        self._sessions[session_id] = session
        logger.info("%s: session %s begins%s", owner.name, session_id, f" ({name})" if name else "")
        return session

    def session(self, owner: ApiUser, session_id: str) -> Session:
        """Returns an open session of this owner; raises ``NotFoundError``."""
        session = self._sessions.get(session_id)
        # Another owner's session gives the same error as a missing one.
        if session is None or session.owner is not owner:
            raise SessionEndedError(
                f"session {session_id!r}: not open. It ended, sent no heartbeat for "
                f"{self._session_seconds:g} s, or the server restarted since "
                f"({time.strftime('%H:%M:%S', time.localtime(self.started_at))}). Checkpoints are "
                "kept: connect again and continue with create_training_client_from_state"
            )
        # Every request counts as a heartbeat.
        session.seen_at = time.monotonic()
        return session

    def request(self, owner: ApiUser, request_id: str) -> PendingRequest | None:
        """Returns a request of this owner, or None."""
        pending = self.requests.get(request_id)
        session = self._sessions.get(pending.session_id) if pending is not None else None
        return pending if session is not None and session.owner is owner else None

    def sessions(self, owner: ApiUser | None = None) -> list[Session]:
        """Returns the open sessions, of one owner or of all."""
        return [one for one in self._sessions.values() if owner in (None, one.owner)]

    def model(self, owner: ApiUser, model_id: str) -> tuple[Session, Model]:
        """Returns a model in training and its session; raises ``NotFoundError``."""
        session = self.session(owner, model_id.partition(":")[0])
        model = session.models.get(model_id)
        if model is None:
            raise NotFoundError(
                f"model {model_id!r}: not in this session{nearest(model_id, session.models)}"
            )
        return session, model

    def sampler(self, owner: ApiUser, sampler_id: str) -> tuple[Session, OpenSampler]:
        """Returns a sampler and its session; raises ``NotFoundError``."""
        session = self.session(owner, sampler_id.partition(":")[0])
        sampler = session.samplers.get(sampler_id)
        if sampler is None:
            raise NotFoundError(
                f"sampler {sampler_id!r}: not in this session, or evicted because it was idle for "
                "long; create a new one, or sample from a checkpoint"
            )
        sampler.used_at = time.monotonic()
        return session, sampler

    def require_model(self, name: str, field: str = "base_model") -> str:
        """Returns a base model that is served; raises ``ModelNotFoundError`` for others."""
        # A client must not make the server load arbitrary folders.
        if name not in self.models:
            raise ModelNotFoundError(
                f"{field}: got {name!r}, which this server does not serve"
                f"{nearest_sentence(name, self.models)} It serves {', '.join(self.models)}; its "
                "operator can add others with model_name="
            )
        return name

    def require_model_of(self, owner: ApiUser, path: str) -> str:
        """Returns the base model of a checkpoint if it is served. Does not read weights."""
        run_id = owner.store.get_checkpoint(path).path.run_id
        return self.require_model(owner.store.get_run(run_id).info.base_model)

    def check_samples(self, count: int) -> None:
        """Raises ``DataValidationError`` if one request has more samples than an owner may have."""
        if count > self._max_queued_samples:
            raise DataValidationError(
                f"n: got a request for {count} samples, the limit is {self._max_queued_samples} "
                "(max_queued_samples=); send several requests"
            )

    def acquire_samples(self, owner: str, count: int) -> None:
        """Counts new samples of an owner; raises ``BusyError`` above the limit. Thread-safe."""
        self.check_samples(count)
        with self._samples_lock:
            queued = self._queued_samples[owner]
            if queued + count > self._max_queued_samples:
                raise BusyError(
                    f"{queued} samples are already queued, the limit is "
                    f"{self._max_queued_samples} (max_queued_samples=); try again"
                )
            self._queued_samples[owner] = queued + count

    def release_samples(self, owner: str, count: int) -> None:
        """Ends the count of samples. Thread-safe."""
        with self._samples_lock:
            self._queued_samples[owner] -= count

    def end_session(self, session: Session, reason: str) -> None:
        """Ends a session and frees its models; keeps its checkpoints."""
        self._sessions.pop(session.session_id, None)
        num_runs = len(session.models)
        for model in session.models.values():
            model.dispatcher.close()
        session.models.clear()
        session.samplers.clear()
        # After the models, so that cancelled requests do not start.
        for pending in list(self.requests.values()):
            if pending.session_id == session.session_id:
                del self.requests[pending.request_id]
                pending.cancel()
        freed = f"; {num_runs} runs freed" if num_runs else ""
        name, session_id = session.owner.name, session.session_id
        logger.info("%s: session %s ends (%s)%s", name, session_id, reason, freed)

    async def sweep_forever(self) -> None:
        """Ends sessions without a heartbeat, evicts idle samplers and drops fetched results."""
        # Often enough to exceed a short ``session_seconds`` by at most a quarter.
        pause = min(5.0, self._session_seconds / 4)
        while True:
            due = time.monotonic() + pause
            await asyncio.sleep(pause)
            now = time.monotonic()
            if self.stopping.is_set():  # a stopping server reads no heartbeats
                continue
            # If this wakes up late, the event loop was blocked, and heartbeats are still unread.
            late = now - due if now - due > pause else 0.0
            try:
                self._sweep(now, late)
            except Exception:  # sessions must still end later
                logger.exception("a search for ended sessions failed")

    def _sweep(self, now: float, late: float) -> None:
        for session in list(self._sessions.values()):
            session.seen_at += late
            if now - session.seen_at > self._session_seconds:
                self.end_session(session, f"no heartbeat for {self._session_seconds:g} s")
            else:
                session.evict_idle_samplers(now)
        # A result that is never fetched is kept until its session ends.
        for one in list(self.requests.values()):
            if one.fetched_at is not None and now - one.fetched_at > RETENTION_SECONDS:
                del self.requests[one.request_id]

    async def expire_forever(self) -> None:
        """Deletes the expired checkpoints of all owners every few minutes."""
        while True:
            await asyncio.sleep(EXPIRE_SECONDS)
            for name in self.keys.names:
                try:
                    # In a thread, because a store may have thousands of checkpoints.
                    await asyncio.to_thread(self.keys.owner(name).store.expire)
                except Exception:  # an error such as a full disk must not end the loop
                    logger.exception("%s: expired checkpoints could not be deleted", name)

    async def watch_keys_forever(self) -> None:
        """Reads the file of keys again when it has changed."""
        while True:
            await asyncio.sleep(KEY_SECONDS)
            try:
                changed = await asyncio.to_thread(self.keys.refresh)
            except Exception as error:  # a damaged file must not end the loop
                logger.error("the keys stay as they were: %s", error)
                continue
            if changed:
                logger.info("keys read again; changed: %s", ", ".join(changed))

    def close(self) -> None:
        """Ends all sessions; the running operation finishes."""
        for session in list(self._sessions.values()):
            self.end_session(session, "the server stops")
        self.engine.close()
