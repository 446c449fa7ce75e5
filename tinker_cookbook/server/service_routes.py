"""Routes for sessions, accounts, and what clients request before they start; and the metrics."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tinker_cookbook.engine.devices import free_memory_bytes
from tinker_cookbook.exceptions import BackendError
from tinker_cookbook.server import bodies
from tinker_cookbook.server.access import Limit, Offset, OwnerDep, StateDep
from tinker_cookbook.server.bodies import JsonRoute
from tinker_cookbook.server.keys import TOKEN_PREFIX
from tinker_cookbook.server.state import ServerState

router = APIRouter(prefix="/api/v1", tags=["service"], route_class=JsonRoute)
metrics_router = APIRouter(tags=["metrics"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Returns that the server responds. Needs no key."""
    return {"status": "ok"}


@router.post("/client/config")
async def client_config(owner: OwnerDep, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the server's features; the SDK uses its defaults for the others."""
    return {
        "proto_compress_fwdbwd": False,
        "parallel_fwdbwd_chunks": True,
        "pjwt_auth_enabled": True,  # a client reads its owner's name from the token
    }


@router.post("/client/dynamic_config")
async def dynamic_config(owner: OwnerDep, body: dict[str, Any]) -> dict[str, Any]:
    """Returns settings that may change while a client runs."""
    return {"sample_cancel_enabled": True}


@router.get("/get_server_capabilities")
def capabilities(owner: OwnerDep, state: StateDep) -> dict[str, Any]:
    """Returns the base models and their context lengths."""
    known = dict(state.engine.available_models())
    fixed = {"trainable": True, "sampleable": True}
    return {
        "supported_models": [
            {"model_name": name, "max_context_length": known.get(name), **fixed}
            for name in state.models
        ]
    }


@router.post("/create_session")
async def create_session(
    body: bodies.CreateSession, owner: OwnerDep, state: StateDep
) -> dict[str, Any]:
    """Creates a session."""
    session = state.start_session(owner, body.user_metadata, body.display_name)
    created = {"type": "create_session", "session_id": session.session_id}
    if body.project_id is not None:
        created["warning_message"] = (
            f"project_id: got {body.project_id!r}, which is ignored: this server has no projects"
        )
    return created


@router.post("/session_heartbeat")
async def heartbeat(session_id: bodies.IdField, owner: OwnerDep, state: StateDep) -> dict[str, str]:
    """Keeps a session open."""
    state.session(owner, session_id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish(session_id: str, body: dict[str, Any], owner: OwnerDep, state: StateDep) -> None:
    """Ends a session: its models leave memory, its checkpoints stay."""
    reason = body.get("reason")
    kind = reason.get("type", "finished") if isinstance(reason, dict) else "finished"
    state.end_session(state.session(owner, session_id), str(kind))


@router.get("/sessions")
async def list_sessions(
    owner: OwnerDep, state: StateDep, limit: Limit = 20, offset: Offset = 0
) -> dict[str, Any]:
    """Returns the ids of the open sessions, newest first."""
    found = sorted(state.sessions(owner), key=lambda one: one.created_at, reverse=True)
    return {"sessions": [session.session_id for session in found[offset : offset + limit]]}


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, owner: OwnerDep, state: StateDep) -> dict[str, Any]:
    """Returns the models and samplers of a session."""
    session = state.session(owner, session_id)
    return {
        "training_run_ids": list(session.models),
        "sampler_ids": list(session.samplers),
        "user_metadata": session.user_metadata,
        "display_name": session.display_name,
    }


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, owner: OwnerDep, state: StateDep) -> dict[str, Any]:
    """Returns the weights that a sampler uses."""
    _, sampler = state.sampler(owner, sampler_id)
    weights = {"base_model": sampler.base_model, "model_path": sampler.model_path}
    return {"sampler_id": sampler_id, **weights}


@router.post("/telemetry")
async def telemetry(owner: OwnerDep) -> dict[str, str]:
    """Ignores telemetry; the body is not read."""
    return {"status": "accepted"}


@router.post("/auth/token", tags=["account"])
async def token(request: Request, owner: OwnerDep, state: StateDep) -> dict[str, str]:
    """Returns a token that replaces the key for some hours and names its owner."""
    if request.headers.get("x-api-key", "").startswith(TOKEN_PREFIX):
        raise BackendError("auth/token: got a token, expected a key: send the one it was made from")
    return {"jwt": state.keys.token_of(owner)}


@router.get("/auth/apikey/me", tags=["account"])
async def own_key(owner: OwnerDep) -> dict[str, Any]:
    """Returns the description of a key, which ``tinker auth login`` stores."""
    number = int.from_bytes(hashlib.sha256(owner.name.encode()).digest()[:6])
    return {
        "key_id": number,
        "name": owner.name,
        "note": "of a server of your own",
        "details": {
            "org_details": {"name": "tinker_cookbook"},
            "user_details": {"email": owner.name},
        },
    }


@metrics_router.get("/metrics", response_model=None)
async def metrics(owner: OwnerDep, state: StateDep) -> Response:
    """Returns Prometheus metrics of the whole server; a scraper sends its key as bearer token."""
    registry = CollectorRegistry()
    registry.register(_Collector(state))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class _Collector:
    """Prometheus collector of the server's state."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state, sessions = self._state, self._state.sessions()
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        running = sum(not pending.future.done() for pending in state.requests.values())
        free = free_memory_bytes(state.engine.choice.device)
        for kind, name, text, value in (
            (gauge, "sessions", "Open sessions", len(sessions)),
            (gauge, "runs", "Runs in memory", sum(len(one.models) for one in sessions)),
            (gauge, "samplers", "Open samplers", sum(len(one.samplers) for one in sessions)),
            (gauge, "requests_running", "Requests that have not ended", running),
            (
                gauge,
                "samples_waiting",
                "Requested samples that have not ended",
                state.sample_quota.count,
            ),
            (gauge, "free_memory_bytes", "Free memory of the device", free),
            (gauge, "uptime_seconds", "Seconds since the start", time.time() - state.started_at),
            (counter, "trained_tokens", "Tokens of forward passes", state.trained_tokens),
            (
                counter,
                "sampled_tokens",
                "Sampled tokens, including those of cancelled requests",
                state.engine.sampled_tokens,
            ),
        ):
            yield kind(f"tinker_cookbook_{name}", text, value)
