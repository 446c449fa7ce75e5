"""The OpenAI-compatible API over the engine, under ``/oai/api/v1``: models, completions, chat.

What cannot be done as asked is refused in that API's form, never left out: an answer from here
means what the same call means elsewhere.
"""

from __future__ import annotations

from fastapi import APIRouter, Request

from tinker_cookbook.server.openai import chat, completions, models
from tinker_cookbook.server.openai.errors import ApiError, OpenAIRoute

PREFIX = "/oai/api/v1"

router = APIRouter(prefix=PREFIX, tags=["openai"], route_class=OpenAIRoute)
for _part in (models, completions, chat):
    router.include_router(_part.router)


@router.api_route("/{rest:path}", methods=["GET", "POST", "PUT", "DELETE"], include_in_schema=False)
async def unknown(rest: str, request: Request) -> None:
    """Any other address: an error of this prefix too has the OpenAI shape."""
    raise ApiError(
        f"{request.method} {request.url.path}: this server has GET models, POST completions and "
        "POST chat/completions under this prefix",
        status=404,
        code="unknown_url",
    )


__all__ = ["PREFIX", "router"]
