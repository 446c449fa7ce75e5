"""The ASGI application: routes, error responses and background tasks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.server import (
    bodies,
    openai,
    operation_routes,
    page,
    rest_routes,
    sampling_routes,
)
from tinker_cookbook.server.access import AccessMiddleware, BoundedHeadProtocol, IdleConnections
from tinker_cookbook.server.bodies import Json
from tinker_cookbook.server.errors import (
    SERVER_FAILED,
    NotFoundError,
    SessionEndedError,
    memory_full_message,
    status_of,
)
from tinker_cookbook.server.metrics import count_error
from tinker_cookbook.server.openai.generate import GenerateBody
from tinker_cookbook.server.openai.models import ModelLoader
from tinker_cookbook.server.openai.protocol import (
    ApiError,
    ChatBody,
    CompletionBody,
    ResponsesBody,
    as_api_error,
)
from tinker_cookbook.server.request_log import RequestLog
from tinker_cookbook.server.state import ServerState

logger = logging.getLogger(__name__)


def make_app(state: ServerState, max_request_bytes: int, log: RequestLog | None = None) -> FastAPI:
    """Builds the ASGI application, which closes ``state`` and ``log`` at its end."""
    log = log or RequestLog("none", Path())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loops = state.sweep_forever(), state.expire_forever(), state.watch_keys_forever()
        tasks = [asyncio.create_task(loop) for loop in loops]
        yield
        for task in tasks:
            task.cancel()
        state.close()
        log.close()

    # FastAPI's own page of documentation would run code from a third party's server.
    app = FastAPI(
        title="tinker_cookbook server",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.server = state
    app.state.max_request_bytes = max_request_bytes
    app.state.openai_loader = ModelLoader(state)
    # The middleware runs before routing, so it also answers requests to unknown addresses.
    app.add_middleware(AccessMiddleware, keys=state.keys, refuse=error_response, record=log.add)
    # One handler per class: a handler of Exception would re-raise the error after the response, and
    # the connection would be closed. The middleware answers all other errors.
    for kind in (TinkerCookbookError, ValueError, MemoryError, ApiError, HTTPException):
        app.add_exception_handler(kind, _handle_error)
    # The handler of malformed bodies also skips the operation's sequence id.
    app.add_exception_handler(RequestValidationError, operation_routes.skip_refused)
    # Routes are matched in this order, so the most frequent ones come first.
    for part in (operation_routes, sampling_routes, rest_routes, openai, page):
        app.include_router(part.router)
    # Probes and scrapers expect these two without the prefix of an API.
    app.add_api_route("/healthz", rest_routes.healthz)
    app.add_api_route("/metrics", rest_routes.server_metrics, response_model=None)
    # These routes read their bodies themselves, so FastAPI cannot document them.
    of_openai = (ChatBody, CompletionBody, ResponsesBody, GenerateBody)
    bodies.add_schemas(app, (bodies.SampleBody, *of_openai))
    return app


async def serve(app: FastAPI, listener: socket.socket, on_start: Callable[[], None]) -> None:
    """Serves until a signal arrives; a second one does not wait for the running operation.

    ``listener`` is a bound socket. It starts to listen after the signal handlers are in place, so a
    client that can connect can also rely on an orderly stop. ``on_start`` is called then.
    """
    settings = uvicorn.Config(
        app,
        http=BoundedHeadProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        # Slightly longer than the longest poll, so that each poll can return its result.
        timeout_graceful_shutdown=round(operation_routes.LONG_POLL_SECONDS) + 5,
    )
    server = _Server(settings, app.state.server, on_start)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again when it is done
        signal.signal(number, lambda *_: None)
    checking = asyncio.create_task(IdleConnections(server).check_forever())
    await server.serve(sockets=[listener])
    checking.cancel()


class _Server(uvicorn.Server):
    """A uvicorn server that reports its start, and ends long polls when it is to stop."""

    def __init__(
        self, settings: uvicorn.Config, state: ServerState, on_start: Callable[[], None]
    ) -> None:
        super().__init__(settings)
        self._state, self._on_start = state, on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Set ``stopping`` before uvicorn waits for open responses, so that long polls end early.
        if not self._state.stopping.is_set():
            logger.info("stopping after the running operation; a second Ctrl-C does not wait")
        self._state.stopping.set()
        super().handle_exit(sig, frame)


def error_response(error: Exception, path: str) -> JSONResponse:
    """Returns the error response in the format of the path's API."""
    headers = None
    if isinstance(error, HTTPException):
        status, detail, headers = error.status_code, error.detail, error.headers
    else:
        status, detail = status_of(error), str(error)
    if isinstance(error, MemoryError):
        detail = memory_full_message(error)
    body: Json = {"detail": detail}
    # OpenAI clients expect another error format than the Tinker SDK.
    if isinstance(error, ApiError) or path.startswith(openai.ERROR_PREFIXES):
        api_error = as_api_error(error)
        status, body = api_error.status, api_error.body()
    count_error(error, "server" if status >= 500 else "user")
    if status >= 500:
        logger.error("%s", path, exc_info=error)
        if "detail" in body:  # the text may contain paths of this machine
            body["detail"] = SERVER_FAILED
    if isinstance(error, SessionEndedError):
        body["code"] = error.code  # a training loop can continue from its last checkpoint
    if status == 429:  # seconds after which a client retries
        headers = {"Retry-After": "1"}
    return JSONResponse(body, status, headers)


async def _handle_error(request: Request, error: Exception) -> JSONResponse:
    path = request.url.path
    # The router raises 405 and 404 without a reason. Clients do not retry these.
    if isinstance(error, HTTPException) and error.status_code == 405:
        allowed = (error.headers or {}).get("Allow")
        problem = f"{request.method} {path}: this path exists for {allowed} only"
        error = HTTPException(405, problem, error.headers)
    elif isinstance(error, HTTPException) and error.status_code == 404:
        problem = "this server has no such path; /docs lists all. "
        if path.startswith("/api/"):
            error = NotFoundError(f"{problem}It has no projects, traces, audit log and billing")
        else:
            # A client of OpenAI's API with a wrong base URL shows only errors in OpenAI's format.
            problem += f"The OpenAI API is at {openai.ROOT_PREFIX}"
            error = ApiError(problem, status=404, code="unknown_url")
    return error_response(error, path)
