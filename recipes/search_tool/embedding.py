"""Embeddings of Google's Gemini API, for a Chroma collection that was made with them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from os import environ
from typing import Any, TypeVar

from tinker_cookbook.exceptions import BackendError, ConfigurationError
from tinker_cookbook.utils.imports import missing_extra

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_RETRIES = 10
RETRY_DELAY = 1.0
_BACKOFF = 1.5


def get_gemini_client(
    *,
    vertexai: bool | None = None,
    project: str | None = None,
    location: str | None = None,
    http_options: Any | None = None,
    **kwargs: Any,
) -> Any:
    """Returns a client of the Gemini API, by default through Vertex AI.

    ``project``, ``location`` and ``vertexai`` default to the variables
    ``GCP_VERTEXAI_PROJECT_NUMBER``, ``GCP_VERTEXAI_REGION`` and ``GOOGLE_GENAI_USE_VERTEXAI``.

    Raises:
        ConfigurationError: google-genai is not installed, or a variable is not set.
    """
    try:
        from google import genai  # pyright: ignore[reportAttributeAccessIssue]
        from google.genai.types import HttpOptions  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise missing_extra("embeddings of Gemini", error, "vector-search") from error
    if vertexai is None:
        vertexai = environ.get("GOOGLE_GENAI_USE_VERTEXAI", "true").lower() in ("true", "1")
    if vertexai:
        project = project or environ.get("GCP_VERTEXAI_PROJECT_NUMBER")
        location = location or environ.get("GCP_VERTEXAI_REGION")
        if not project or not location:
            raise ConfigurationError(
                "expected $GCP_VERTEXAI_PROJECT_NUMBER and $GCP_VERTEXAI_REGION to be set. "
                "Embeddings of Gemini need an account; a local index needs none"
            )
        kwargs |= {"project": project, "location": location}
    # Without Vertex AI the client reads GOOGLE_API_KEY by itself.
    options = http_options or HttpOptions(api_version="v1", timeout=10_000)
    return genai.Client(http_options=options, vertexai=vertexai, **kwargs)


async def get_gemini_embedding(
    client: Any,
    texts: list[str],
    model: str = "gemini-embedding-001",
    embedding_dim: int = 768,
    task_type: str = "RETRIEVAL_QUERY",
    max_retries: int = MAX_RETRIES,
    retry_delay: float = RETRY_DELAY,
) -> list[list[float]]:
    """Returns a vector of ``embedding_dim`` numbers for each text.

    Raises:
        BackendError: all ``max_retries`` requests failed, or the answer had not one vector a text.
    """
    config = {"output_dimensionality": embedding_dim, "task_type": task_type}

    async def embed() -> list[list[float]]:
        response = await client.aio.models.embed_content(model=model, contents=texts, config=config)
        vectors = [embedding.values for embedding in response.embeddings or ()]
        if len(vectors) != len(texts) or not all(vectors):
            raise BackendError(f"got {len(vectors)} vectors, expected {len(texts)}")
        return vectors

    return await retried(embed, max_retries, retry_delay, f"embeddings of {model}")


async def retried(request: Callable[[], Awaitable[T]], attempts: int, delay: float, what: str) -> T:
    """Returns the result of the first request that does not fail, with growing pauses.

    Raises:
        BackendError: all requests failed; ``what`` names them in the error.
    """
    for attempt in range(1, attempts + 1):
        try:
            return await request()
        except Exception as error:  # the clients raise errors of several libraries
            if attempt == attempts:
                raise BackendError(
                    f"{what}: {attempts} requests failed, the last one with {error!r}"
                ) from error
            logger.warning("%s: %r; next attempt in %.1f s", what, error, delay)
        await asyncio.sleep(delay)
        delay *= _BACKOFF
    raise ConfigurationError(f"max_retries: got {attempts}, expected at least 1")
