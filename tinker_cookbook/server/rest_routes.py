"""Listing and managing runs and checkpoints: those of the caller's store alone."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, RedirectResponse

from tinker_cookbook.backends.local_rest import LocalRestClient
from tinker_cookbook.exceptions import BackendError
from tinker_cookbook.server import bodies
from tinker_cookbook.server.access import Limit, Offset, TheHost, TheOwner
from tinker_cookbook.server.read_body import JsonRoute
from tinker_cookbook.server.state import ServerState

router = APIRouter(prefix="/api/v1", tags=["rest"], route_class=JsonRoute)

Kind = Literal["weights", "sampler_weights", "external_weights"]

_ARCHIVE = "archive.tar"


def _client(owner: TheOwner) -> LocalRestClient:
    return LocalRestClient(owner.store)


def _json(found: Any) -> dict[str, Any]:
    return found.model_dump(mode="json")


@router.get("/training_runs")
async def list_runs(
    owner: TheOwner, limit: Limit = 20, offset: Offset = 0, project_id: str | None = None
) -> dict[str, Any]:
    """Runs, newest first."""
    if project_id is not None:
        raise BackendError(
            f"project_id: got {project_id!r}, but this server has no projects; leave it out to "
            "list all runs"
        )
    return _json(await _client(owner).list_training_runs(limit, offset))


@router.get("/training_runs/{run_id}")
async def get_run(run_id: str, owner: TheOwner) -> dict[str, Any]:
    """One run."""
    return _json(await _client(owner).get_training_run(run_id))


@router.get("/training_runs/{run_id}/checkpoints")
async def list_checkpoints(run_id: str, owner: TheOwner) -> dict[str, Any]:
    """Checkpoints of a run."""
    return _json(await _client(owner).list_checkpoints(run_id))


@router.get("/checkpoints")
async def list_all(owner: TheOwner, limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
    """Checkpoints of all runs, newest first."""
    return _json(await _client(owner).list_user_checkpoints(limit, offset))


@router.post("/weights_info")
async def weights_info(body: bodies.WeightsPath, owner: TheOwner) -> dict[str, Any]:
    """Base model and adapter shape of a checkpoint."""
    return _json(await _client(owner).get_weights_info_by_tinker_path(body.tinker_path))


@router.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}", status_code=204)
async def delete(run_id: str, kind: Kind, name: str, owner: TheOwner) -> Response:
    """Deletes a checkpoint for good."""
    await _client(owner).delete_checkpoint(run_id, f"{kind}/{name}")
    return Response(status_code=204)


@router.put("/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl", status_code=204)
async def set_ttl(
    run_id: str, kind: Kind, name: str, body: bodies.Ttl, owner: TheOwner
) -> Response:
    """Lets a checkpoint expire, or keeps it for good."""
    path = f"tinker://{run_id}/{kind}/{name}"
    await _client(owner).set_checkpoint_ttl_from_tinker_path(path, body.ttl_seconds)
    return Response(status_code=204)


@router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}/archive", response_model=None)
async def archive(
    run_id: str, kind: Kind, name: str, request: Request, owner: TheOwner, host: TheHost
) -> Response:
    """Leads to a tar file with the adapter in PEFT's format, by an address that needs no key."""
    path = f"tinker://{run_id}/{kind}/{name}"
    await asyncio.to_thread(owner.store.get_checkpoint, path)
    return RedirectResponse(_address(request, host, owner.name, path, _ARCHIVE), status_code=302)


@router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls")
async def external_weights_urls(
    run_id: str, kind: Kind, name: str, request: Request, owner: TheOwner, host: TheHost
) -> dict[str, Any]:
    """An address for each file of an adapter, which needs no key and holds for an hour."""
    path = f"tinker://{run_id}/{kind}/{name}"
    files = await asyncio.to_thread(owner.store.peft_files, path)
    return {
        "urls": {file: _address(request, host, owner.name, path, file) for file in files},
        "expires": host.links.expires().isoformat(),
    }


@router.get("/files/{owner_name}/{run_id}/{kind}/{name}/{file}", response_model=None)
async def file_of(
    owner_name: str,
    run_id: str,
    kind: Kind,
    name: str,
    file: str,
    host: TheHost,
    until: int = 0,
    signature: str = "",
) -> Response:
    """A file by its signed address."""
    path = f"tinker://{run_id}/{kind}/{name}"
    owner = host.links.owner_of(host.keys, owner_name, path, file, until, signature)
    if file == _ARCHIVE:
        tar = await asyncio.to_thread(owner.store.archive, path)
        return FileResponse(tar, media_type="application/x-tar")
    files = await asyncio.to_thread(owner.store.peft_files, path)
    return Response(files[file], media_type="application/octet-stream")


def _address(request: Request, host: ServerState, owner: str, path: str, file: str) -> str:
    query = host.links.sign(owner, path, file)
    base = f"{str(request.base_url).rstrip('/')}{router.prefix}"
    return f"{base}/files/{owner}/{path.removeprefix('tinker://')}/{file}?{query}"
