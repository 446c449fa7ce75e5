"""``GET /models``: what may be named in ``model=``."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter

from tinker_cookbook.engine.checkpoints.paths import SCHEME
from tinker_cookbook.exceptions import CheckpointError
from tinker_cookbook.server.access import OwnerDep, StateDep
from tinker_cookbook.server.keys import Owner
from tinker_cookbook.server.openai.errors import OpenAIRoute, no_model
from tinker_cookbook.server.state import ServerState

router = APIRouter(route_class=OpenAIRoute)


@router.get("/models")
async def list_models(owner: OwnerDep, host: StateDep) -> dict[str, Any]:
    """The served base models, then the caller's checkpoints for sampling, newest first."""
    return {"object": "list", "data": await asyncio.to_thread(_all, owner, host)}


@router.get("/models/{name:path}")
async def get_model(name: str, owner: OwnerDep, host: StateDep) -> dict[str, Any]:
    """One of them, or a checkpoint for training, which may be sampled too."""
    return await asyncio.to_thread(_one, owner, host, name)


def _all(owner: Owner, host: ServerState) -> list[dict[str, Any]]:
    found = []
    for run in owner.store.list_runs():
        if run.info.base_model not in host.models:
            continue
        for info in reversed(owner.store.list_checkpoints(run.run_id)):
            if info.path.kind == "sampler_weights" and info.problem is None:
                found.append(_entry(str(info.path), info.created_at, owner, run.info.base_model))
    return [_base(name, host) for name in host.models] + found


def _one(owner: Owner, host: ServerState, name: str) -> dict[str, Any]:
    if not name.startswith(SCHEME):
        return _base(host.require_model(name, "model"), host)
    try:
        info = owner.store.get_checkpoint(name)
        base_model = owner.store.get_run(info.path.run_id).info.base_model
    except CheckpointError as error:
        raise no_model(f"model: {error}") from error
    host.require_model(base_model, "model")
    return _entry(name, info.created_at, owner, base_model)


def _base(name: str, host: ServerState) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(host.started_at),
        "owned_by": "tinker_cookbook",
    }


def _entry(path: str, created_at: float, owner: Owner, base_model: str) -> dict[str, Any]:
    return {
        "id": path,
        "object": "model",
        "created": int(created_at),
        "owned_by": owner.name,
        "parent": base_model,
    }
