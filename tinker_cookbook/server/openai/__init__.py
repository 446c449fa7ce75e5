"""OpenAI-compatible API of the engine, under ``/oai/api/v1``: models, completions, chat.

Unsupported parameters are refused, never ignored.
"""

from __future__ import annotations

from fastapi import APIRouter, Request

from tinker_cookbook.server.openai import completions, models
from tinker_cookbook.server.openai.protocol import ApiError

PREFIX = "/oai/api/v1"

router = APIRouter(prefix=PREFIX, tags=["openai"])
for _part in (models, completions):
    router.include_router(_part.router)


@router.api_route("/{rest:path}", methods=["GET", "POST", "PUT", "DELETE"], include_in_schema=False)
async def unknown(rest: str, request: Request) -> None:
    """Refuses any other address, with an error in OpenAI's form."""
    raise ApiError(
        f"{request.method} {request.url.path}: this server has GET models, POST completions and "
        "POST chat/completions under this prefix",
        status=404,
        code="unknown_url",
    )
