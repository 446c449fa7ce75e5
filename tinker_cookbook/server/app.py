"""The application: routes, errors as JSON, and what runs beside the requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
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
from tinker_cookbook.server.documented import describe
from tinker_cookbook.server.errors import memory_full, status_of
from tinker_cookbook.server.host import Host
from tinker_cookbook.server.openai.bodies import ChatBody, CompletionBody

logger = logging.getLogger(__name__)


def make_app(host: Host, max_request_bytes: int) -> FastAPI:
    """The ASGI application over ``host``.

    Args:
        host: The server's state; closed with the application.
        max_request_bytes: Largest body of a training pass.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(host.sweep_for_good())
        yield
        sweeping.cancel()
        host.close()

    app = FastAPI(title="tinker_cookbook server", lifespan=lifespan)
    app.state.host = host
    app.state.max_request_bytes = max_request_bytes
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

    describe(app, (bodies.JsonPass, ChatBody, CompletionBody))

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Whether the server answers. Needs no key."""
        return {"status": "ok"}

    return app


async def _said(request: Request, error: Exception) -> JSONResponse:
    status = status_of(error)
    if status >= 500:
        logger.error("%s %s: %s", request.method, request.url.path, error)
    headers = {"Retry-After": "1"} if status == 429 else None
    said = memory_full(error) if isinstance(error, MemoryError) else str(error)
    return JSONResponse({"detail": said}, status_code=status, headers=headers)
