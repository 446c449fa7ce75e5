"""The store's HTTP interface.

- ``POST /ingest/wire`` with ``{"rows": […]}``, ``POST /ingest/annotations`` with
  ``{"annotations": […]}``: stores a batch as a whole; a row that is there already is counted
- ``GET /runs``
- ``GET /runs/RUN_ID/rows?split=&iteration=&group_idx=&traj_idx=&purpose=&cursor=&limit=``
- ``GET /runs/RUN_ID/annotations?kind=&cursor=&limit=``
- ``GET /stream?run_id=&cursor=``: rows as they arrive (server-sent events); ``Last-Event-ID``
  continues where a reader stopped
- ``GET /healthz``; ``GET /touch``, which also restarts the time until the store ends unused
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from pydantic import TypeAdapter

from tinker_cookbook.capture.store.db import CaptureDB

_MAX_REQUEST_BYTES = 256 * 2**20
_MAX_ROWS = 1000  # of one answer
_POLL_SECONDS = 0.25
_HEARTBEAT_SECONDS = 15.0

_BODY = TypeAdapter(dict[str, list[dict[str, Any]]])
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    db: CaptureDB,
    *,
    idle_shutdown_sec: float | None = None,
    shutdown_cb: Callable[[], None] | None = None,
    identity: dict[str, str] | None = None,
) -> web.Application:
    """Builds the application of a store.

    Args:
        db: The database; stays open.
        idle_shutdown_sec: Seconds without a request, ``/healthz`` apart, until ``shutdown_cb`` is
            called. From then on each request gets status 503.
        shutdown_cb: Ends the server.
        identity: Added to the answer of ``/healthz``.
    """
    store = _Store(db, identity or {})
    app = web.Application(middlewares=[store.count], client_max_size=_MAX_REQUEST_BYTES)
    app.router.add_get("/healthz", store.healthz)
    app.router.add_get("/touch", store.touch)
    app.router.add_post("/ingest/wire", store.ingest_wire)
    app.router.add_post("/ingest/annotations", store.ingest_annotations)
    app.router.add_get("/runs", store.runs)
    app.router.add_get("/runs/{run_id}/rows", store.rows)
    app.router.add_get("/runs/{run_id}/annotations", store.annotations)
    app.router.add_get("/stream", store.stream)
    if idle_shutdown_sec is not None and shutdown_cb is not None:
        seconds, end = idle_shutdown_sec, shutdown_cb

        async def watch(_: web.Application) -> AsyncIterator[None]:
            watching = asyncio.create_task(store.end_when_idle(seconds, end))
            yield
            watching.cancel()

        app.cleanup_ctx.append(watch)
    return app


class _Store:
    """The handlers."""

    def __init__(self, db: CaptureDB, identity: dict[str, str]) -> None:
        self._db, self._identity = db, identity
        self._used_at = time.monotonic()
        self._ending = False

    @web.middleware
    async def count(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        # A client must not take a store that ends before its next request.
        if self._ending:
            return _error("the store is shutting down", status=503)
        if request.path != "/healthz":
            self._used_at = time.monotonic()
        return await handler(request)

    async def end_when_idle(self, seconds: float, end: Callable[[], None]) -> None:
        """Calls ``end`` after ``seconds`` without a request."""
        while (left := self._used_at + seconds - time.monotonic()) > 0:
            await asyncio.sleep(left)
        self._ending = True
        end()

    async def healthz(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "pid": os.getpid(), **self._identity})

    async def touch(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def ingest_wire(self, request: web.Request) -> web.Response:
        body, store = await request.read(), self._db.ingest_wire
        return await _answer(lambda: vars(store(_items(body, "rows"))))

    async def ingest_annotations(self, request: web.Request) -> web.Response:
        body, store = await request.read(), self._db.ingest_annotations
        return await _answer(lambda: vars(store(_items(body, "annotations"))))

    async def runs(self, request: web.Request) -> web.Response:
        return await _answer(lambda: {"runs": [run.to_dict() for run in self._db.list_runs()]})

    async def rows(self, request: web.Request) -> web.Response:
        def query() -> dict[str, Any]:
            asked = request.query
            filters: dict[str, Any] = {n: asked[n] for n in ("split", "purpose") if n in asked}
            numbers = ("iteration", "group_idx", "traj_idx")
            filters |= {n: _integer(asked, n, 0) for n in numbers if n in asked}
            return _page("rows", self._db.query_rows, request, filters=filters)

        return await _answer(query)

    async def annotations(self, request: web.Request) -> web.Response:
        kind, query = request.query.get("kind"), self._db.query_annotations
        return await _answer(lambda: _page("annotations", query, request, kind=kind))

    async def stream(self, request: web.Request) -> web.StreamResponse:
        run_id, header = request.query.get("run_id"), request.headers.get("Last-Event-ID", "0")
        try:
            cursor = _integer({"cursor": request.query.get("cursor") or header}, "cursor", 0)
        except ValueError as error:
            return _error(f"{error} (of the query, or of the header Last-Event-ID)")

        def read(after: int) -> list[tuple[int, str]]:
            return [
                (e.cursor, f"id: {e.cursor}\nevent: {e.event_type}\ndata: {json.dumps(e.data)}\n\n")
                for e in self._db.stream_events(run_id, after)
            ]

        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        written_at = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            while request.transport is not None and not request.transport.is_closing():
                self._used_at = time.monotonic()
                events = await asyncio.to_thread(read, cursor)
                for _, text in events:
                    await response.write(text.encode())
                if events:
                    cursor, written_at = events[-1][0], time.monotonic()
                    continue
                if time.monotonic() - written_at >= _HEARTBEAT_SECONDS:
                    await response.write(b": heartbeat\n\n")
                    written_at = time.monotonic()
                await asyncio.sleep(_POLL_SECONDS)
        return response


def _error(text: str, status: int = 400) -> web.Response:
    return web.json_response({"error": text}, status=status)


async def _answer(work: Callable[[], Mapping[str, Any]]) -> web.Response:
    """Returns the result of ``work`` as JSON, status 400 for its ``ValueError``."""
    try:
        # In a thread with the encoding: rows are large, and other requests would wait.
        text = await asyncio.to_thread(lambda: json.dumps(work()))
    except ValueError as error:
        return _error(str(error))
    return web.Response(text=text, content_type="application/json")


def _items(body: bytes, key: str) -> list[dict[str, Any]]:
    if (items := _BODY.validate_json(body).get(key)) is None:
        raise ValueError(f"the request's body must have {key!r}")
    return items


def _page(
    key: str, query: Callable[..., list[Any]], request: web.Request, **options: Any
) -> dict[str, Any]:
    cursor = _integer(request.query, "cursor", 0)
    limit = _integer(request.query, "limit", _MAX_ROWS)
    if limit < 1:  # SQLite would take a negative one for none
        raise ValueError("'limit' must be a positive integer")
    run_id = request.match_info["run_id"]
    rows = query(run_id, cursor=cursor, limit=min(limit, _MAX_ROWS), **options)
    return {key: rows, "next_cursor": rows[-1]["cursor"] if rows else None}


def _integer(values: Mapping[str, str], name: str, default: int) -> int:
    try:
        value = int(values.get(name, default))
        if -(2**63) <= value < 2**63:
            return value
    except ValueError:
        pass
    raise ValueError(f"{name!r} must be an integer of 64 bits, got {values[name]!r}")
