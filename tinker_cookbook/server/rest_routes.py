"""Routes for runs, checkpoints, sessions and accounts; metrics."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi import Body as BodyField
from fastapi.responses import FileResponse, RedirectResponse
from pydantic import AwareDatetime, Field

from tinker_cookbook.backends.local_rest import LocalRestClient
from tinker_cookbook.exceptions import BackendError
from tinker_cookbook.server import bodies
from tinker_cookbook.server.access import ApiUserDep, StateDep, key_of
from tinker_cookbook.server.bodies import Json, JsonRoute
from tinker_cookbook.server.errors import NotFoundError
from tinker_cookbook.server.exposition import exposition
from tinker_cookbook.server.keys import TOKEN_PREFIX, user_urn
from tinker_cookbook.server.state import ServerState, Session

router = APIRouter(prefix="/api/v1", tags=["rest"], route_class=JsonRoute)

URL_SECONDS = 3600
# The SDK's default limit for the data of one pass; it divides larger batches.
_MAX_PASS_BYTES = 5_000_000

_CHECKPOINT = "training_runs/{run_id}/checkpoints/{kind}/{name}"
_ARCHIVE = "archive.tar"


async def _client(owner: ApiUserDep) -> LocalRestClient:
    return LocalRestClient(owner.store)


async def _checkpoint_path(
    run_id: str, kind: Literal["weights", "sampler_weights", "external_weights"], name: str
) -> str:
    return f"tinker://{run_id}/{kind}/{name}"


ClientDep = Annotated[LocalRestClient, Depends(_client)]
PathDep = Annotated[str, Depends(_checkpoint_path)]
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0)]


@router.get("/training_runs")
async def list_runs(
    client: ClientDep, limit: Limit = 20, offset: Offset = 0, project_id: str | None = None
) -> Json:
    """Lists runs, newest first."""
    if project_id is not None:
        raise BackendError(
            f"project_id: got {project_id!r}, but this server has no projects; leave it out to "
            "list all runs"
        )
    return (await client.list_training_runs(limit, offset)).model_dump(mode="json")


@router.get("/training_runs/{run_id}")
async def get_run(run_id: str, client: ClientDep) -> Json:
    """Returns a run."""
    return (await client.get_training_run(run_id)).model_dump(mode="json")


@router.get("/training_runs/{run_id}/checkpoints")
async def list_checkpoints(run_id: str, client: ClientDep) -> Json:
    """Lists the checkpoints of a run."""
    return (await client.list_checkpoints(run_id)).model_dump(mode="json")


@router.get("/checkpoints")
async def list_all(
    client: ClientDep, owner: ApiUserDep, limit: Limit = 100, offset: Offset = 0
) -> Json:
    """Lists the checkpoints of all runs, newest first, and what all files of the runs use."""
    listed = (await client.list_user_checkpoints(limit, offset)).model_dump(mode="json")
    used = await asyncio.to_thread(owner.store.used_bytes)
    return listed | {"storage": {"used_bytes": used, "quota_bytes": owner.store.quota_bytes}}


@router.post("/weights_info")
async def weights_info(tinker_path: bodies.IdField, client: ClientDep) -> Json:
    """Returns base model and LoRA rank of a checkpoint."""
    return (await client.get_weights_info_by_tinker_path(tinker_path)).model_dump(mode="json")


@router.delete(f"/{_CHECKPOINT}", status_code=204)
async def delete(path: PathDep, client: ClientDep) -> None:
    """Deletes a checkpoint."""
    await client.delete_checkpoint_from_tinker_path(path)


@router.put(f"/{_CHECKPOINT}/ttl", status_code=204)
async def set_ttl(
    path: PathDep,
    client: ClientDep,
    ttl_seconds: Annotated[bodies.Int64 | None, BodyField(embed=True)] = None,
) -> None:
    """Sets the time to live of a checkpoint; None keeps it until it is deleted."""
    await client.set_checkpoint_ttl_from_tinker_path(path, ttl_seconds)


@router.post(f"/{_CHECKPOINT}/publish", status_code=204)
async def publish(path: PathDep, client: ClientDep) -> None:
    """Makes a checkpoint readable for every owner; only its owner may do this."""
    await client.publish_checkpoint_from_tinker_path(path)


@router.delete(f"/{_CHECKPOINT}/publish", status_code=204)
async def unpublish(path: PathDep, client: ClientDep) -> None:
    """Makes a published checkpoint private again."""
    await client.unpublish_checkpoint_from_tinker_path(path)


@router.get(f"/{_CHECKPOINT}/archive", response_model=None)
def archive(path: PathDep, request: Request, owner: ApiUserDep, state: StateDep) -> Response:
    """Redirects to a signed URL of a tar file with the adapter in PEFT's format."""
    # Check the checkpoint before a URL is signed.
    owner.store.get_checkpoint(path)
    until = int(time.time()) + URL_SECONDS
    url = _signed_url(request, state, owner.name, path, _ARCHIVE, until)
    return RedirectResponse(url, status_code=302)


@router.get(f"/{_CHECKPOINT}/external_weights_urls")
def external_weights_urls(
    path: PathDep, request: Request, owner: ApiUserDep, state: StateDep
) -> Json:
    """Returns a signed URL for each file of an adapter."""
    until = int(time.time()) + URL_SECONDS
    return {
        "urls": {
            file: _signed_url(request, state, owner.name, path, file, until)
            for file in owner.store.peft_files(path)
        },
        "expires": datetime.fromtimestamp(until, UTC).isoformat(),
    }


def _signed_url(
    request: Request, state: ServerState, owner: str, path: str, file: str, until: int
) -> str:
    base = f"{str(request.base_url).rstrip('/')}{router.prefix}/files/{owner}"
    signature = state.signature(owner, path, file, until)
    return f"{base}/{path.removeprefix('tinker://')}/{file}?until={until}&signature={signature}"


@router.get("/files/{owner_name}/{run_id}/{kind}/{name}/{file}", response_model=None)
def file_of(
    owner_name: str, path: PathDep, file: str, state: StateDep, until: int = 0, signature: str = ""
) -> Response:
    """Returns a file by its signed URL."""
    # compare_digest runs in constant time.
    expected = state.signature(owner_name, path, file, until)
    if not hmac.compare_digest(expected.encode(), signature.encode()) or until < time.time():
        raise NotFoundError(
            "this URL was not signed by this server, or has expired; request a new one"
        )
    store = state.keys.owner(owner_name).store
    if file == _ARCHIVE:
        return FileResponse(store.archive(path), media_type="application/x-tar")
    return Response(store.peft_files(path)[file], media_type="application/octet-stream")


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Health check: returns the server's name. Needs no key."""
    return {"status": "ok", "server": "tinker_cookbook"}


@router.post("/client/config")
async def client_config(request: Request, owner: ApiUserDep, body: Json) -> Json:
    """Returns the server's features; the SDK uses its defaults for the others."""
    # Half of the limit, because the SDK counts only the data and not the fields around them.
    half = request.app.state.max_request_bytes // 2
    return {
        "fwdbwd_max_chunk_bytes_count": min(_MAX_PASS_BYTES, half),
        "proto_compress_fwdbwd": False,
        "parallel_fwdbwd_chunks": True,
        "pjwt_auth_enabled": True,  # clients read the owner's name from the token
    }


@router.post("/client/dynamic_config")
async def dynamic_config(owner: ApiUserDep, body: Json) -> Json:
    """Returns settings that may change while a client runs."""
    return {"sample_cancel_enabled": True}


@router.get("/get_server_capabilities")
def capabilities(owner: ApiUserDep, state: StateDep) -> Json:
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
async def create_session(body: bodies.CreateSession, owner: ApiUserDep, state: StateDep) -> Json:
    """Creates a session."""
    session = state.start_session(owner, body.user_metadata, body.display_name)
    created = {"type": "create_session", "session_id": session.session_id}
    if body.project_id is not None:
        created["warning_message"] = (
            f"project_id: got {body.project_id!r}, which is ignored: this server has no projects"
        )
    return created


@router.post("/session_heartbeat")
async def heartbeat(
    session_id: bodies.IdField, owner: ApiUserDep, state: StateDep
) -> dict[str, str]:
    """Keeps a session open."""
    state.session(owner, session_id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish(session_id: str, body: Json, owner: ApiUserDep, state: StateDep) -> None:
    """Ends a session: frees its models, keeps its checkpoints."""
    reason = body.get("reason")
    kind = reason.get("type", "finished") if isinstance(reason, dict) else "finished"
    state.end_session(state.session(owner, session_id), str(kind))


@router.get("/sessions")
async def list_sessions(
    owner: ApiUserDep, state: StateDep, limit: Limit = 20, offset: Offset = 0
) -> Json:
    """Returns the ids of the open sessions, newest first."""
    found = sorted(state.sessions(owner), key=lambda one: one.created_at, reverse=True)
    return {"sessions": [session.session_id for session in found[offset : offset + limit]]}


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, owner: ApiUserDep, state: StateDep) -> Json:
    """Returns the models and samplers of a session."""
    session = state.session(owner, session_id)
    return {
        "training_run_ids": list(session.models),
        "sampler_ids": list(session.samplers),
        "user_metadata": session.user_metadata,
        "display_name": session.display_name,
    }


class Cursor(bodies.Body):
    """Last session of the previous page."""

    last_created_at: AwareDatetime
    last_session_id: str


class SessionSearch(bodies.Body):
    """Conditions of a session search; ``owner`` can only exclude the caller."""

    session_id: str | None = None
    display_name: str | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict)
    statuses: list[Json] | None = None
    project_ids: list[str] | None = None
    owner: Json = Field(default_factory=dict)
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: Cursor | None = None

    def matches(self, session: Session) -> bool:
        """Returns whether an open session of the caller fulfils the conditions."""
        # All stored sessions are active and of the caller.
        if self.statuses is not None and all(one.get("type") != "active" for one in self.statuses):
            return False
        mine = user_urn(session.owner.name)
        if self.owner.get("type") == "user" and mine not in self.owner.get("owner_urns", ()):
            return False
        metadata = {key: str(value) for key, value in (session.user_metadata or {}).items()}
        if not self.user_metadata.items() <= metadata.items():
            return False
        # Matches the id, or all words of the name.
        words = (self.display_name or "").lower().split()
        name = (session.display_name or "").lower()
        named = all(word in name for word in words) and (words or self.session_id is None)
        return bool(named) or session.session_id == self.session_id


@router.post("/sessions/search", tags=["service"])
async def search_sessions(body: SessionSearch, owner: ApiUserDep, state: StateDep) -> Json:
    """Searches the caller's open sessions, newest first; ended ones are not stored."""
    if body.project_ids is not None:
        raise BackendError("project_ids: this server has no projects; leave it out")
    # The id breaks ties in time, so that no session is lost between two pages.
    found = {(one.created_at, one.session_id): one for one in state.sessions(owner)}
    keys = sorted((key for key, one in found.items() if body.matches(one)), reverse=True)
    if body.cursor is not None:
        last = body.cursor.last_created_at, body.cursor.last_session_id
        keys = [key for key in keys if key < last]
    page, following = keys[: body.limit], None
    if len(keys) > len(page):
        created, session_id = page[-1]
        following = {"last_created_at": created.isoformat(), "last_session_id": session_id}
    # In a thread, since each summary reads its runs' checkpoints from disk.
    summaries = await asyncio.to_thread(lambda: [_summary(found[key]) for key in page])
    return {"sessions": summaries, "next_cursor": following}


def _summary(session: Session) -> Json:
    store = session.owner.store
    # The other models are still being created.
    runs = set(session.models) & set(store.run_ids())
    checkpoints = [info for run in runs for info in store.list_checkpoints(run)]
    return {
        "session_id": session.session_id,
        "created_at": session.created_at.isoformat(),
        "owner": user_urn(session.owner.name),
        "project_id": "",
        "status": {"type": "active"},
        "checkpoints_count": len(checkpoints),
        "checkpoint_storage_bytes": sum(info.size_bytes for info in checkpoints),
        "display_name": session.display_name,
        "user_metadata": session.user_metadata,
    }


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, owner: ApiUserDep, state: StateDep) -> Json:
    """Returns the weights that a sampler uses."""
    _, sampler = state.sampler(owner, sampler_id)
    weights = {"base_model": sampler.base_model, "model_path": sampler.model_path}
    return {"sampler_id": sampler_id, **weights}


@router.post("/telemetry")
async def telemetry(owner: ApiUserDep) -> dict[str, str]:
    """Ignores telemetry; the body is not read."""
    return {"status": "accepted"}


@router.post("/auth/token", tags=["account"])
async def token(request: Request, owner: ApiUserDep, state: StateDep) -> dict[str, str]:
    """Returns a token that replaces the key for some hours and contains the owner's name."""
    # The SDK exchanges a token in TINKER_API_KEY too. It gets the same one, which still expires.
    given = key_of(request)
    return {"jwt": given if given.startswith(TOKEN_PREFIX) else state.keys.token_of(owner)}


@router.get("/auth/apikey/me", tags=["account"])
async def own_key(owner: ApiUserDep) -> Json:
    """Returns the description of a key that ``tinker auth login`` stores."""
    # A number derived from the owner, since keys have no stored id.
    number = int.from_bytes(hashlib.sha256(owner.name.encode()).digest()[:6])
    return {
        "key_id": number,
        "name": owner.name,
        "note": "a key of your own server",
        "details": {
            "org_details": {"name": "tinker_cookbook"},
            "user_details": {"email": owner.name},
        },
    }


def server_metrics(owner: ApiUserDep, state: StateDep) -> Response:
    """Returns Prometheus metrics of the whole server; a scraper sends its key as bearer token."""
    return exposition(state)
