"""Routes that list and manage runs, checkpoints and sessions of the caller; and the fallback."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, RedirectResponse
from pydantic import AwareDatetime, Field

from tinker_cookbook.backends.local_rest import LocalRestClient
from tinker_cookbook.exceptions import BackendError
from tinker_cookbook.server import bodies
from tinker_cookbook.server.access import Limit, Offset, OwnerDep, StateDep
from tinker_cookbook.server.bodies import JsonRoute
from tinker_cookbook.server.errors import NotFoundError
from tinker_cookbook.server.keys import Owner, user_urn
from tinker_cookbook.server.state import ServerState, Session

router = APIRouter(prefix="/api/v1", tags=["rest"], route_class=JsonRoute)
fallback_router = APIRouter(prefix="/api/v1")

Kind = Literal["weights", "sampler_weights", "external_weights"]

_ARCHIVE = "archive.tar"


def _client(owner: Owner) -> LocalRestClient:
    return LocalRestClient(owner.store)


def _json(model: Any) -> dict[str, Any]:
    return model.model_dump(mode="json")


@router.get("/training_runs")
async def list_runs(
    owner: OwnerDep, limit: Limit = 20, offset: Offset = 0, project_id: str | None = None
) -> dict[str, Any]:
    """Lists runs, newest first."""
    if project_id is not None:
        raise BackendError(
            f"project_id: got {project_id!r}, but this server has no projects; leave it out to "
            "list all runs"
        )
    return _json(await _client(owner).list_training_runs(limit, offset))


@router.get("/training_runs/{run_id}")
async def get_run(run_id: str, owner: OwnerDep) -> dict[str, Any]:
    """Returns a run."""
    return _json(await _client(owner).get_training_run(run_id))


@router.get("/training_runs/{run_id}/checkpoints")
async def list_checkpoints(run_id: str, owner: OwnerDep) -> dict[str, Any]:
    """Lists the checkpoints of a run."""
    return _json(await _client(owner).list_checkpoints(run_id))


@router.get("/checkpoints")
async def list_all(owner: OwnerDep, limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
    """Lists the checkpoints of all runs, newest first."""
    return _json(await _client(owner).list_user_checkpoints(limit, offset))


@router.post("/weights_info")
async def weights_info(body: bodies.WeightsPath, owner: OwnerDep) -> dict[str, Any]:
    """Returns base model and LoRA rank of a checkpoint."""
    return _json(await _client(owner).get_weights_info_by_tinker_path(body.tinker_path))


@router.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}", status_code=204)
async def delete(run_id: str, kind: Kind, name: str, owner: OwnerDep) -> Response:
    """Deletes a checkpoint."""
    await _client(owner).delete_checkpoint(run_id, f"{kind}/{name}")
    return Response(status_code=204)


@router.put("/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl", status_code=204)
async def set_ttl(
    run_id: str, kind: Kind, name: str, body: bodies.Ttl, owner: OwnerDep
) -> Response:
    """Sets or removes the time to live of a checkpoint."""
    path = f"tinker://{run_id}/{kind}/{name}"
    await _client(owner).set_checkpoint_ttl_from_tinker_path(path, body.ttl_seconds)
    return Response(status_code=204)


@router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}/archive", response_model=None)
async def archive(
    run_id: str, kind: Kind, name: str, request: Request, owner: OwnerDep, state: StateDep
) -> Response:
    """Redirects to a signed URL of a tar file with the adapter in PEFT's format."""
    path = f"tinker://{run_id}/{kind}/{name}"
    await asyncio.to_thread(owner.store.get_checkpoint, path)
    url = _signed_url(request, state, owner.name, path, _ARCHIVE)
    return RedirectResponse(url, status_code=302)


@router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls")
async def external_weights_urls(
    run_id: str, kind: Kind, name: str, request: Request, owner: OwnerDep, state: StateDep
) -> dict[str, Any]:
    """Returns a signed URL for each file of an adapter."""
    path = f"tinker://{run_id}/{kind}/{name}"
    files = await asyncio.to_thread(owner.store.peft_files, path)
    return {
        "urls": {file: _signed_url(request, state, owner.name, path, file) for file in files},
        "expires": state.signed_urls.expires().isoformat(),
    }


@router.get("/files/{owner_name}/{run_id}/{kind}/{name}/{file}", response_model=None)
async def file_of(
    owner_name: str,
    run_id: str,
    kind: Kind,
    name: str,
    file: str,
    state: StateDep,
    until: int = 0,
    signature: str = "",
) -> Response:
    """Returns a file by its signed URL."""
    path = f"tinker://{run_id}/{kind}/{name}"
    state.signed_urls.verify(owner_name, path, file, until, signature)
    owner = state.keys.owner(owner_name)
    if file == _ARCHIVE:
        tar = await asyncio.to_thread(owner.store.archive, path)
        return FileResponse(tar, media_type="application/x-tar")
    files = await asyncio.to_thread(owner.store.peft_files, path)
    return Response(files[file], media_type="application/octet-stream")


def _signed_url(request: Request, state: ServerState, owner: str, path: str, file: str) -> str:
    query = state.signed_urls.sign(owner, path, file)
    base = f"{str(request.base_url).rstrip('/')}{router.prefix}"
    return f"{base}/files/{owner}/{path.removeprefix('tinker://')}/{file}?{query}"


class Cursor(bodies.Body):
    """Last session of the previous page."""

    last_created_at: AwareDatetime
    last_session_id: str


class SessionSearch(bodies.Body):
    """Conditions of a session search; ``owner`` has an effect only if it excludes the caller."""

    session_id: str | None = None
    display_name: str | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict)
    statuses: list[dict[str, Any]] | None = None
    project_ids: list[str] | None = None
    owner: dict[str, Any] = Field(default_factory=dict)
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: Cursor | None = None


@router.post("/sessions/search", tags=["service"])
async def search_sessions(body: SessionSearch, owner: OwnerDep, state: StateDep) -> dict[str, Any]:
    """Searches the caller's open sessions, newest first; ended ones are not stored."""
    if body.project_ids is not None:
        raise BackendError("project_ids: this server has no projects; leave it out")
    found = [one for one in state.sessions(owner) if _matches(one, body, owner)]
    found.sort(key=_sort_key, reverse=True)
    if body.cursor is not None:
        last = (body.cursor.last_created_at, body.cursor.last_session_id)
        found = [one for one in found if _sort_key(one) < last]
    page = found[: body.limit]
    following = None
    if len(found) > len(page):
        created, session_id = _sort_key(page[-1])
        following = {"last_created_at": created.isoformat(), "last_session_id": session_id}
    summaries = await asyncio.to_thread(lambda: [_summary(one) for one in page])
    return {"sessions": summaries, "next_cursor": following}


def _sort_key(session: Session) -> tuple[datetime, str]:
    return datetime.fromtimestamp(session.created_at, UTC), session.session_id


def _matches(session: Session, body: SessionSearch, owner: Owner) -> bool:
    metadata = {key: str(value) for key, value in (session.user_metadata or {}).items()}
    if any(metadata.get(key) != value for key, value in body.user_metadata.items()):
        return False
    if body.statuses is not None and all(one.get("type") != "active" for one in body.statuses):
        return False
    users = body.owner.get("owner_urns") if body.owner.get("type") == "user" else None
    if users is not None and user_urn(owner.name) not in users:
        return False
    if body.session_id is None and body.display_name is None:
        return True
    words = (body.display_name or "").lower().split()
    name = (session.display_name or "").lower()
    return session.session_id == body.session_id or (
        bool(words) and all(word in name for word in words)
    )


def _summary(session: Session) -> dict[str, Any]:
    store = session.owner.store
    known = set(store.run_ids())
    runs = [run for run in list(session.models) if run in known]  # others are being created
    checkpoints = [info for run in runs for info in store.list_checkpoints(run)]
    return {
        "session_id": session.session_id,
        "created_at": _sort_key(session)[0].isoformat(),
        "owner": user_urn(session.owner.name),
        "project_id": "",
        "status": {"type": "active"},
        "checkpoints_count": len(checkpoints),
        "checkpoint_storage_bytes": sum(info.size_bytes for info in checkpoints),
        "display_name": session.display_name,
        "user_metadata": session.user_metadata,
    }


_CHECKPOINT = "training_runs/{run_id}/checkpoints/{kind}/{name}"
_PRIVATE = (
    "this server shows no checkpoint to anyone but its owner. Fetch it with "
    "`tinker checkpoint download` and upload the folder where others can read it"
)
_NO_PROJECTS = "this server has no projects"
_NO_BILLS = "nothing is billed here"

# Error messages by method and path, for addresses of the hosted service that are not supported.
# They get 400, which clients do not retry; other unknown addresses get 404.
REFUSED = {
    f"POST {_CHECKPOINT}/publish": f"publishing: {_PRIVATE}",
    f"DELETE {_CHECKPOINT}/publish": f"publishing: {_PRIVATE}",
    "POST copy_weights": (
        f"copying into a project: {_NO_PROJECTS}. A run of its own for the copy comes of "
        "create_training_client_from_state and save_state"
    ),
    "PUT sessions/{session_id}/project": f"assigning a project: {_NO_PROJECTS}; leave it out",
    "GET sessions/{session_id}/trace_export": (
        "exporting a trace: this server records none; /metrics counts what it does"
    ),
    "GET audit": "audit log: this server keeps none; what it does stands in its output",
    "GET billing/usage/events": f"billing: {_NO_BILLS}; /metrics counts the tokens",
    "GET billing/usage/checkpoints/current": (
        f"storage costs: {_NO_BILLS}; `tinker checkpoint list` shows the sizes"
    ),
    "DELETE auth/apikey/me": (
        "deleting a key: take it out of the server's file of keys and start the server anew"
    ),
    "POST create_custom_loss": (
        "uploading a loss: this server runs no code of clients. Leave custom_loss_server_side off: "
        "then forward_backward_custom computes the loss in the client"
    ),
    "POST retrieve_futures": "retrieve_futures: ask for each result with retrieve_future",
    "POST join_sampling_session": (
        "join_sampling_session: clones of a sampling client choose their own numbers here"
    ),
    "POST unload_model": "unload_model: models leave memory with their session; finish that",
}


def _refuse(reason: str) -> Callable[..., Awaitable[None]]:
    async def refuse(owner: OwnerDep) -> None:
        raise BackendError(reason)

    return refuse


for _address, _reason in REFUSED.items():
    _method, _path = _address.split()
    fallback_router.add_api_route(
        f"/{_path}", _refuse(_reason), methods=[_method], include_in_schema=False
    )


@fallback_router.api_route(
    "/{rest:path}", methods=["GET", "POST", "PUT", "DELETE"], include_in_schema=False
)
async def unknown(rest: str, request: Request, owner: OwnerDep) -> None:
    """Refuses any other address."""
    raise NotFoundError(
        f"{request.method} {request.url.path}: this server has no such address; /docs shows those "
        "it has"
    )
