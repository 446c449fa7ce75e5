"""The server's state: one engine, the owners' stores, the sessions, and the requests in flight."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tinker_cookbook.backends.local import LocalServiceClient
from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.exceptions import ModelNotFoundError, nearest, nearest_sentence
from tinker_cookbook.server.errors import Gone, NotThere
from tinker_cookbook.server.keys import KeyFile, Owner
from tinker_cookbook.server.pending import RequestRegistry
from tinker_cookbook.server.sample_quota import SampleQuota
from tinker_cookbook.server.sessions import Model, OpenSampler, Session
from tinker_cookbook.server.signed_urls import SignedUrls

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 5.0


class ServerState:
    """Everything that requests share. Its methods are called on the event loop alone.

    Args:
        engine: Does the work of all sessions.
        models: Base models that may be named; no others are loaded for anyone.
        keys: Who may do what.
        session_seconds: A session without a sign of life for so long is over.
        state: A folder for notes on open runs, which tell after a crash what was cut.
        most_samples: Samples that may wait before clients are asked to come again.
    """

    def __init__(
        self,
        engine: Engine,
        models: Sequence[str],
        keys: KeyFile,
        session_seconds: float,
        state: Path,
        most_samples: int,
    ) -> None:
        self.engine, self.models, self.keys = engine, tuple(models), keys
        self.board = RequestRegistry()
        self.links = SignedUrls()
        self.waiting = SampleQuota(most_samples)
        self.stopping = asyncio.Event()
        self.trained_tokens = 0
        self.started_at = time.time()
        self._counting = threading.Lock()
        self._session_seconds = session_seconds
        self._sessions: dict[str, Session] = {}
        self._open_runs = OpenRuns(state / "open_runs.json")
        self.cut = self._open_runs.left_over

    def start_session(self, owner: Owner, metadata: dict | None, name: str | None) -> Session:
        """A new session."""
        session_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        text = {key: str(value) for key, value in (metadata or {}).items()}
        service = LocalServiceClient(self.engine, owner.store, text, session_id)
        session = Session(session_id, owner, service, metadata, name)
        self._sessions[session_id] = session
        logger.info("%s: session %s begins%s", owner.name, session_id, f" ({name})" if name else "")
        return session

    def session(self, owner: Owner, session_id: str) -> Session:
        """An open session of this owner; raises ``NotThere``."""
        session = self._sessions.get(session_id)
        if session is None or session.owner is not owner:
            raise Gone(
                f"session {session_id!r}: not open here. It ended, sent no heartbeat for "
                f"{self._session_seconds:g} s, or the server was started anew since "
                f"({time.strftime('%H:%M:%S', time.localtime(self.started_at))}). Checkpoints are "
                "kept: connect again and go on with create_training_client_from_state"
            )
        session.seen()
        return session

    def sessions(self, owner: Owner | None = None) -> list[Session]:
        """The open sessions, of this owner or of all."""
        return [one for one in self._sessions.values() if owner in (None, one.owner)]

    def model(self, owner: Owner, model_id: str) -> tuple[Session, Model]:
        """A model in training; raises ``NotThere``."""
        session = self.session(owner, model_id.partition(":")[0])
        model = session.models.get(model_id)
        if model is None:
            raise NotThere(
                f"model {model_id!r}: not in this session{nearest(model_id, session.models)}"
            )
        return session, model

    def sampler(self, owner: Owner, sampler_id: str) -> tuple[Session, OpenSampler]:
        """An open sampler; raises ``NotThere``."""
        session = self.session(owner, sampler_id.partition(":")[0])
        sampler = session.samplers.get(sampler_id)
        if sampler is None:
            raise NotThere(
                f"sampler {sampler_id!r}: not in this session, or put away as nobody used it for "
                "long; make a new one, or sample from a checkpoint"
            )
        sampler.used_at = time.monotonic()
        return session, sampler

    def require_model(self, name: str, field: str = "base_model") -> str:
        """A base model that is served; raises ``ModelNotFoundError``, which begins with ``field``,
        for others."""
        if name not in self.models:
            raise ModelNotFoundError(
                f"{field}: got {name!r}, which this server does not serve"
                f"{nearest_sentence(name, self.models)} It serves {', '.join(self.models)}; its "
                "operator adds others by model_name="
            )
        return name

    def require_model_of(self, owner: Owner, path: str) -> str:
        """The base model of a checkpoint, if it is served. Reads no weights; may block."""
        run_id = owner.store.get_checkpoint(path).path.run_id
        return self.require_model(owner.store.get_run(run_id).info.base_model)

    def count(self, trained: int) -> None:
        """Notes tokens that passed through the engine. In any thread."""
        with self._counting:
            self.trained_tokens += trained

    def note_open(self, model_id: str) -> None:
        """A run began."""
        self._open_runs.add(model_id)

    def end_session(self, session: Session, why: str) -> None:
        """Frees all that a session holds; checkpoints stay."""
        self._sessions.pop(session.session_id, None)
        runs = list(session.models)
        session.close()
        self.board.drop_session(session.session_id)
        self._open_runs.remove(runs)
        logger.info(
            "%s: session %s ends (%s)%s",
            session.owner.name,
            session.session_id,
            why,
            f"; {len(runs)} runs leave memory" if runs else "",
        )

    async def sweep_for_good(self) -> None:
        """Ends sessions whose clients are gone, and drops what was fetched."""
        pause = min(SWEEP_SECONDS, self._session_seconds / 4)
        while True:
            until = time.monotonic() + pause
            await asyncio.sleep(pause)
            late = time.monotonic() - until
            if late > pause:
                # The server was held up and read no requests: heartbeats of this time still wait.
                for session in self._sessions.values():
                    session.seen_at += late
            with contextlib.suppress(Exception):
                self.sweep()

    def sweep(self) -> None:
        """One round of it; none where the server stops, which hears no heartbeats any more."""
        if self.stopping.is_set():
            return
        now = time.monotonic()
        for session in list(self._sessions.values()):
            if now - session.seen_at > self._session_seconds:
                self.end_session(session, f"no heartbeat for {self._session_seconds:g} s")
            else:
                session.put_away(now)
        self.board.sweep(now)

    def close(self) -> None:
        """Ends all sessions, finishing the operation in hand."""
        for session in list(self._sessions.values()):
            self.end_session(session, "the server stops")
        self.engine.close()


class OpenRuns:
    """The runs in memory, noted in a file; what stands there at a start was cut by a crash."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._runs: list[str] = []
        try:
            self.left_over: list[str] = [str(run) for run in json.loads(path.read_bytes())]
        except (OSError, ValueError, TypeError):
            self.left_over = []
        self._write()

    def add(self, run: str) -> None:
        """Notes a run."""
        self._runs.append(run)
        self._write()

    def remove(self, runs: Sequence[str]) -> None:
        """Strikes runs out."""
        if runs:
            self._runs = [run for run in self._runs if run not in runs]
            self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._runs), encoding="utf-8")
        part.replace(self._path)
