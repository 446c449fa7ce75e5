"""OpenAI-compatible API of the engine, under ``/oai/api/v1``: models, completions, chat, responses.

Unsupported parameters are refused, never ignored.
"""

from __future__ import annotations

from fastapi import APIRouter

from tinker_cookbook.server.openai import completions, models, responses

PREFIX = "/oai/api/v1"

router = APIRouter(prefix=PREFIX, tags=["openai"])
router.include_router(models.router)
router.include_router(completions.router)
router.include_router(responses.router)
