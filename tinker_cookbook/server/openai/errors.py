"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from tinker_cookbook.exceptions import ModelNotFoundError
from tinker_cookbook.server.errors import status_of

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
_FIELD = re.compile(
    r"(model|prompt|max_tokens|temperature|top_p|top_k|seed|stop|n|renderer_name|tools"
    r"|messages(\[\d+\][^\s:]*)?)\b"
)
"""With which a message of the package begins where a parameter is at fault."""
_CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}


class ApiError(Exception):
    """An answer other than 200, with the field that is at fault."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param = status, param
        self.code = code or _CODES.get(status)

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        elif self.status >= 500:
            kind = "server_error"
        return {
            "error": {
                "message": str(self),
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def no_model(message: str) -> ApiError:
    """The model is none that this caller may name."""
    return ApiError(message, status=404, param="model", code="model_not_found")


def as_api_error(error: Exception) -> ApiError:
    """Any error as this API says it; messages of the package begin with the field's name."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(str(error.detail), status=error.status_code)
    if isinstance(error, RequestValidationError):
        return ApiError(f"request: {error.errors()[0]['msg']}")
    if isinstance(error, ModelNotFoundError):
        return no_model(str(error))
    status = status_of(error)
    if status >= 500:
        return ApiError("the server failed; its log has the reason", status=500)
    field = _FIELD.match(str(error))
    return ApiError(str(error), status=status, param=field[0] if field else None)


class OpenAIRoute(APIRoute):
    """A route whose errors, those of its dependencies among them, have OpenAI's shape."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, with its errors said differently."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except Exception as error:
                said = as_api_error(error)
                if said.status >= 500:
                    logger.exception("%s %s", request.method, request.url.path)
                headers = {"Retry-After": "1"} if said.status == 429 else None
                return JSONResponse(said.body(), status_code=said.status, headers=headers)

        return handle
