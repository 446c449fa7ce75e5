"""Sessions, models at hand, and what clients ask before they begin."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Response

from tinker_cookbook.server import bodies
from tinker_cookbook.server.access import Limit, Offset, TheHost, TheOwner
from tinker_cookbook.server.read_body import JsonRoute

router = APIRouter(prefix="/api/v1", tags=["service"], route_class=JsonRoute)


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Whether the server answers. Needs no key."""
    return {"status": "ok"}


@router.post("/client/config")
async def client_config(owner: TheOwner, body: dict[str, Any]) -> dict[str, Any]:
    """Features of the server; what is not named is the SDK's default."""
    return {
        "proto_compress_fwdbwd": False,
        "parallel_fwdbwd_chunks": True,
        "pjwt_auth_enabled": True,  # without a token a client does not know who it is
    }


@router.post("/client/dynamic_config")
async def dynamic_config(owner: TheOwner, body: dict[str, Any]) -> dict[str, Any]:
    """Settings that may change while a client runs."""
    return {"sample_cancel_enabled": True}


@router.get("/get_server_capabilities")
async def capabilities(owner: TheOwner, host: TheHost) -> dict[str, Any]:
    """The base models and their context lengths."""
    known = await asyncio.to_thread(lambda: dict(host.engine.available_models()))
    return {
        "supported_models": [
            {
                "model_name": name,
                "max_context_length": known.get(name),
                "trainable": True,
                "sampleable": True,
            }
            for name in host.models
        ]
    }


@router.post("/create_session")
async def create_session(
    body: bodies.CreateSession, owner: TheOwner, host: TheHost
) -> dict[str, Any]:
    """A client begins."""
    session = host.start_session(owner, body.user_metadata, body.display_name)
    answer = {"type": "create_session", "session_id": session.session_id}
    if body.project_id is not None:
        answer["warning_message"] = (
            f"project_id: got {body.project_id!r}, which is left aside: this server has no projects"
        )
    return answer


@router.post("/session_heartbeat")
async def heartbeat(body: bodies.SessionId, owner: TheOwner, host: TheHost) -> dict[str, Any]:
    """A client lives."""
    host.session(owner, body.session_id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish(
    session_id: str, body: bodies.FinishSession, owner: TheOwner, host: TheHost
) -> Response:
    """A client ends; its models leave memory, its checkpoints stay."""
    session = host.session(owner, session_id)
    host.end_session(session, str((body.reason or {}).get("type", "finished")))
    return Response(status_code=204)


@router.get("/sessions")
async def list_sessions(
    owner: TheOwner, host: TheHost, limit: Limit = 20, offset: Offset = 0
) -> dict[str, Any]:
    """The open sessions, newest first."""
    found = sorted(host.sessions(owner), key=lambda one: one.began_at, reverse=True)
    return {"sessions": [session.session_id for session in found[offset : offset + limit]]}


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, owner: TheOwner, host: TheHost) -> dict[str, Any]:
    """What a session has open."""
    session = host.session(owner, session_id)
    return {
        "training_run_ids": list(session.models),
        "sampler_ids": list(session.samplers),
        "user_metadata": session.user_metadata,
        "display_name": session.display_name,
    }


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, owner: TheOwner, host: TheHost) -> dict[str, Any]:
    """What a sampler samples from."""
    _, sampler = host.sampler(owner, sampler_id)
    return {
        "sampler_id": sampler_id,
        "base_model": sampler.base_model,
        "model_path": sampler.model_path,
    }


@router.post("/telemetry")
async def telemetry(owner: TheOwner) -> dict[str, str]:
    """Accepted and dropped: the body is not even read."""
    return {"status": "accepted"}
