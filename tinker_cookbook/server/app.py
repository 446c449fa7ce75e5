"""The application: routes, errors as JSON, and what runs beside the requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.server import (
    account_routes,
    bodies,
    future_routes,
    metrics_routes,
    openai,
    refused_routes,
    rest_routes,
    sampling_routes,
    service_routes,
    session_search,
    training_routes,
)
from tinker_cookbook.server.errors import memory_full, status_of
from tinker_cookbook.server.gate import Gate
from tinker_cookbook.server.openai.bodies import ChatBody, CompletionBody
from tinker_cookbook.server.openai.errors import as_api_error
from tinker_cookbook.server.openapi_bodies import describe
from tinker_cookbook.server.state import ServerState

logger = logging.getLogger(__name__)


def make_app(host: ServerState, max_request_bytes: int) -> FastAPI:
    """The ASGI application over ``host``.

    Args:
        host: The server's state; closed with the application.
        max_request_bytes: Largest body of a request.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(host.sweep_for_good())
        yield
        sweeping.cancel()
        host.close()

    app = FastAPI(title="tinker_cookbook server", lifespan=lifespan, redoc_url=None)
    app.state.host = host
    app.state.max_request_bytes = max_request_bytes
    app.add_middleware(Gate, keys=host.keys, max_bytes=max_request_bytes, refuse=_refused)
    app.add_exception_handler(TinkerCookbookError, _said)
    app.add_exception_handler(ValueError, _said)
    app.add_exception_handler(MemoryError, _said)
    for part in (
        future_routes,  # addresses are tried in this order, so the busiest come first
        training_routes,
        sampling_routes,
        service_routes,
        account_routes,
        session_search,
        rest_routes,
        metrics_routes,
        openai,
        refused_routes,  # last, for it takes all that the others leave
    ):
        app.include_router(part.router)

    describe(app, (bodies.JsonPass, bodies.SampleBody, ChatBody, CompletionBody))

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Whether the server answers. Needs no key."""
        return {"status": "ok"}

    return app


def _refused(error: HTTPException, path: str) -> JSONResponse:
    """An error from before the routes, in the form of the API that was asked."""
    said: dict[str, Any] = {"detail": error.detail}
    if path.startswith(openai.PREFIX):
        said = as_api_error(error).body()
    return JSONResponse(said, status_code=error.status_code, headers=error.headers)


async def _said(request: Request, error: Exception) -> JSONResponse:
    status = status_of(error)
    if status >= 500:
        logger.error("%s %s: %s", request.method, request.url.path, error)
    headers = {"Retry-After": "1"} if status == 429 else None
    said = memory_full(error) if isinstance(error, MemoryError) else str(error)
    return JSONResponse({"detail": said}, status_code=status, headers=headers)
