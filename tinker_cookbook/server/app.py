"""The ASGI application: routes, error responses and background tasks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
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
from tinker_cookbook.server.access import HTTP_PROTOCOL, AccessMiddleware, IdleConnections
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
from tinker_cookbook.server.openai.protocol import (
    ApiError,
    ChatBody,
    CompletionBody,
    ResponsesBody,
    as_api_error,
)
from tinker_cookbook.server.request_log import AccessLog, RequestLog
from tinker_cookbook.server.state import ServerState

logger = logging.getLogger(__name__)


def make_app(state: ServerState, max_request_bytes: int, log: AccessLog | None = None) -> FastAPI:
    """Builds the ASGI application, which closes ``state`` at its end; ``log``: the access log."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        app.openapi()  # kept by FastAPI; the first request that needs it would wait for it
        loops = state.sweep_forever(), state.expire_forever(), state.watch_keys_forever()
        tasks = [asyncio.create_task(loop) for loop in loops]
        yield
        for task in tasks:
            task.cancel()
        state.close()
        if log is not None:
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
    # The middleware runs before routing, so it also answers requests to unknown addresses.
    app.add_middleware(
        AccessMiddleware, keys=state.keys, max_bytes=max_request_bytes, refuse=error_response
    )
    # Added last, so it is outermost and counts refused requests too.
    app.add_middleware(RequestLog, log=log)
    # One handler per class: a handler of Exception would re-raise the error after the response, and
    # the connection would be closed. The middleware answers all other errors.
    for kind in (TinkerCookbookError, ValueError, MemoryError, ApiError, HTTPException):
        app.add_exception_handler(kind, _handle_error)
    # The handler of malformed bodies also skips the operation's sequence id.
    app.add_exception_handler(RequestValidationError, operation_routes.skip_refused)
    # Routes are matched in this order, so the most frequent ones come first.
    for part in (operation_routes, sampling_routes, rest_routes, openai, page):
        app.include_router(part.router)
    # These routes read their bodies themselves, so FastAPI cannot document them.
    of_openai = (ChatBody, CompletionBody, ResponsesBody, GenerateBody)
    bodies.add_schemas(app, (bodies.JsonPass, bodies.SampleBody, *of_openai))

    # Probes and scrapers expect these two without the prefix of an API.
    app.add_api_route("/healthz", rest_routes.healthz)
    app.add_api_route("/metrics", rest_routes.server_metrics, response_model=None)
    return app


async def serve(
    app: FastAPI, state: ServerState, listener: socket.socket, on_start: Callable[[], None]
) -> None:
    """Serves until a signal arrives; a second one does not wait for the running operation.

    Args:
        app: The application of ``state``.
        state: The server's state, closed at the end.
        listener: A bound socket. It starts to listen after the signal handlers are in place, so
            a client that can connect can also rely on an orderly stop.
        on_start: Called when connections are accepted.
    """
    settings = uvicorn.Config(
        app,
        http=HTTP_PROTOCOL,
        ws="none",
        log_level="warning",
        access_log=False,
        # Slightly longer than the longest poll, so that each poll can return its result.
        timeout_graceful_shutdown=round(operation_routes.LONG_POLL_SECONDS) + 5,
    )
    server = _Server(settings, state, on_start)
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
    known = isinstance(error, HTTPException)
    status = error.status_code if known else status_of(error)
    detail = error.detail if known else str(error)
    if isinstance(error, MemoryError):
        detail = memory_full_message(error)
    # OpenAI clients expect another error format than the Tinker SDK.
    of_openai = isinstance(error, ApiError) or path.startswith(openai.ERROR_PREFIXES)
    api_error = as_api_error(error) if of_openai else None
    if api_error is not None:
        status = api_error.status
    count_error(error, "server" if status >= 500 else "user")
    if status >= 500:  # the text may contain paths of this machine
        detail = SERVER_FAILED
        logger.error("%s", path, exc_info=error)
    body: Json = {"detail": detail} if api_error is None else api_error.body()
    if isinstance(error, SessionEndedError):
        body["code"] = error.code  # a training loop can continue from its last checkpoint
    # Seconds after which a client retries a request that found the queue full.
    headers = error.headers if known else {"Retry-After": "1"} if status == 429 else None
    return JSONResponse(body, status, headers)


async def _handle_error(request: Request, error: Exception) -> JSONResponse:
    path = request.url.path
    # The router raises 405 and 404 without a reason. Clients do not retry these.
    if isinstance(error, HTTPException) and error.status_code == 405:
        allowed = (error.headers or {}).get("Allow")
        where = f"{request.method} {path}: this path exists"
        error = HTTPException(405, f"{where} for {allowed} only", error.headers)
    elif isinstance(error, HTTPException) and error.status_code == 404:
        problem = f"{request.method} {path}: this server has no such path; "
        error = NotFoundError(f"{problem}/docs lists them")
        # A client of OpenAI's API with a wrong base URL shows only errors in OpenAI's format.
        if not path.startswith("/api/"):
            known = "GET models, POST completions, POST chat/completions and POST responses"
            problem += f"the OpenAI API is at {openai.ROOT_PREFIX} ({known}); /docs lists all paths"
            error = ApiError(problem, status=404, code="unknown_url")
    return error_response(error, path)
