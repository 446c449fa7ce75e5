"""Searching the open sessions, a page at a time."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import AwareDatetime, Field

from tinker_cookbook.engine.checkpoints.store import CheckpointInfo
from tinker_cookbook.exceptions import BackendError
from tinker_cookbook.server.access import TheHost, TheOwner
from tinker_cookbook.server.bodies import Body
from tinker_cookbook.server.keys import Owner
from tinker_cookbook.server.read_body import JsonRoute
from tinker_cookbook.server.sessions import Session
from tinker_cookbook.server.tokens import user_of

router = APIRouter(prefix="/api/v1", tags=["service"], route_class=JsonRoute)


class Cursor(Body):
    """The last session of the page before."""

    last_created_at: AwareDatetime
    last_session_id: str


class Search(Body):
    """What must hold of a session; ``owner`` is read as far as it excludes the caller."""

    session_id: str | None = None
    display_name: str | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict)
    statuses: list[dict[str, Any]] | None = None
    project_ids: list[str] | None = None
    owner: dict[str, Any] = Field(default_factory=dict)
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: Cursor | None = None


@router.post("/sessions/search")
async def search(body: Search, owner: TheOwner, host: TheHost) -> dict[str, Any]:
    """Open sessions of the caller, newest first; ended ones are forgotten here."""
    if body.project_ids is not None:
        raise BackendError("project_ids: this server has no projects; leave it out")
    found = [one for one in host.sessions(owner) if _fits(one, body, owner)]
    found.sort(key=_place, reverse=True)
    if body.cursor is not None:
        last = (body.cursor.last_created_at, body.cursor.last_session_id)
        found = [one for one in found if _place(one) < last]
    page = found[: body.limit]
    following = None
    if len(found) > len(page):
        began, session_id = _place(page[-1])
        following = {"last_created_at": began.isoformat(), "last_session_id": session_id}
    summaries = await asyncio.to_thread(lambda: [_summary(one) for one in page])
    return {"sessions": summaries, "next_cursor": following}


def _place(session: Session) -> tuple[datetime, str]:
    return datetime.fromtimestamp(session.began_at, UTC), session.session_id


def _fits(session: Session, body: Search, owner: Owner) -> bool:
    metadata = {key: str(value) for key, value in (session.user_metadata or {}).items()}
    if any(metadata.get(key) != value for key, value in body.user_metadata.items()):
        return False
    if body.statuses is not None and all(one.get("type") != "active" for one in body.statuses):
        return False
    users = body.owner.get("owner_urns") if body.owner.get("type") == "user" else None
    if users is not None and user_of(owner.name) not in users:
        return False
    if body.session_id is None and body.display_name is None:
        return True
    words = (body.display_name or "").lower().split()
    name = (session.display_name or "").lower()
    return session.session_id == body.session_id or (
        bool(words) and all(word in name for word in words)
    )


def _summary(session: Session) -> dict[str, Any]:
    checkpoints = _checkpoints(session)
    return {
        "session_id": session.session_id,
        "created_at": _place(session)[0].isoformat(),
        "owner": user_of(session.owner.name),
        "project_id": "",
        "status": {"type": "active"},
        "checkpoints_count": len(checkpoints),
        "checkpoint_storage_bytes": sum(info.size_bytes for info in checkpoints),
        "display_name": session.display_name,
        "user_metadata": session.user_metadata,
    }


def _checkpoints(session: Session) -> list[CheckpointInfo]:
    store = session.owner.store
    known = set(store.run_ids())
    runs = [run for run in list(session.models) if run in known]  # others are still being made
    return [info for run in runs for info in store.list_checkpoints(run)]
