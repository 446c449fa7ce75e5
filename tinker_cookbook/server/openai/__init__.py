"""OpenAI-compatible API of the engine, under ``/v1`` and ``/oai/api/v1``.

It has models, completions, chat and responses, and vLLM's ``generate`` route for tokens.

Unsupported parameters are refused, never ignored.
"""

from __future__ import annotations

from fastapi import APIRouter

from tinker_cookbook.leaves import find_leaf
from tinker_cookbook.server.openai import completions, generate, models

PREFIX = "/oai/api/v1"
# Clients of vLLM use ``/v1``; ``/inference/v1/generate`` is relative to its parent path.
ROOT_PREFIX = "/v1"
# The hosted service's address; with it only the host of a program's base URL changes.
HOSTED_PREFIX = "/services/tinker-prod/oai/api/v1"
ERROR_PREFIXES = ("/oai/", f"{ROOT_PREFIX}/", "/inference/", "/services/")

_responses = find_leaf("server.openai.responses")
_parts = [models.router, completions.router, *([_responses.router] if _responses else [])]
router = APIRouter(tags=["openai"])
for _prefix, _documented in ((PREFIX, True), (ROOT_PREFIX, False), (HOSTED_PREFIX, False)):
    for _part in _parts:
        router.include_router(_part, prefix=_prefix, include_in_schema=_documented)
    _above = _prefix.removesuffix("/v1")
    router.include_router(generate.router, prefix=_above, include_in_schema=_documented)
