"""Asking for results: requests are acknowledged at once and fetched when they are done."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import CancelledError
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from tinker_cookbook.server import bodies
from tinker_cookbook.server.access import TheHost, TheOwner
from tinker_cookbook.server.errors import Gone
from tinker_cookbook.server.keys import Owner
from tinker_cookbook.server.pending import Pending, error_of
from tinker_cookbook.server.read_body import JsonRoute
from tinker_cookbook.server.state import ServerState

HELD_SECONDS = 35.0
"""How long an answer waits for the result; clients give up at 45."""

PROTOBUF = "application/x-protobuf"

router = APIRouter(prefix="/api/v1", tags=["futures"], route_class=JsonRoute)


class _PythonJson(JSONResponse):
    """JSON in which a loss may be ``NaN`` or ``Infinity``, as Python writes and reads them.

    Results in JSON go to SDKs before 0.25, which read answers with Python's parser. There is no
    other spelling that their types take: null and texts are refused where a number is expected.
    """

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


@router.post("/retrieve_future", response_model=None)
async def retrieve_future(
    body: bodies.RequestId, request: Request, owner: TheOwner, host: TheHost
) -> Response:
    """The result of a request, its error, or 408: not yet."""
    pending = _pending(host, owner, body.request_id)
    if not await _done(pending, host):
        later = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
        return JSONResponse(later, status_code=408)
    pending.fetched_at = time.monotonic()
    return _answer(pending, PROTOBUF in request.headers.get("accept", ""))


@router.post("/cancel_future")
async def cancel_future(body: dict[str, Any], owner: TheOwner, host: TheHost) -> dict[str, Any]:
    """Takes back requests that nobody waits for any more."""
    ids = body.get("request_ids") or [body.get("request_id")]
    for request_id in ids if isinstance(ids, list) else []:
        pending = host.board.get(str(request_id))
        if pending is not None and _is_of(host, owner, pending):
            pending.cancel()
    return {}


async def _done(pending: Pending, host: ServerState) -> bool:
    """Whether the result came while there was time to wait for it.

    When the server is stopped, that is not the case but for the operation in hand.
    """
    if pending.future.done():
        return True
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    pending.future.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
    until = loop.time() + HELD_SECONDS
    waits = [asyncio.ensure_future(event.wait()) for event in (ended, host.stopping)]
    await asyncio.wait(waits, timeout=HELD_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    if pending.in_hand():
        await asyncio.wait(waits[:1], timeout=until - loop.time())
    for wait in waits:
        wait.cancel()
    return pending.future.done()


def _pending(host: ServerState, owner: Owner, request_id: str) -> Pending:
    pending = host.board.get(request_id)
    if pending is None or not _is_of(host, owner, pending):
        raise Gone(
            f"request {request_id!r}: not known here; its session ended, its result was fetched "
            "long ago, or the server was started anew"
        )
    host.session(owner, pending.session_id)
    return pending


def _is_of(host: ServerState, owner: Owner, pending: Pending) -> bool:
    return any(one.session_id == pending.session_id for one in host.sessions(owner))


def _answer(pending: Pending, binary: bool) -> Response:
    try:
        result = pending.future.result()
        message = pending.encoder.proto(result) if binary else None
        if message is not None:
            return Response(message, media_type=PROTOBUF)
        return _PythonJson(pending.encoder.json(result))
    except (Exception, CancelledError) as error:
        return JSONResponse(error_of(error))
