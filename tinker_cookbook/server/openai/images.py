"""Images in messages of the OpenAI API: ``image_url`` and ``input_image`` parts."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request

from tinker_cookbook.server.bodies import Json
from tinker_cookbook.server.keys import ApiUser
from tinker_cookbook.server.openai.models import ModelLoader
from tinker_cookbook.server.openai.protocol import ApiError, SamplingBody
from tinker_cookbook.server.openai.sampling import ApiCall
from tinker_cookbook.server.state import ServerState

B = TypeVar("B", bound=SamplingBody)

IMAGE_PARTS = ("image_url", "input_image")


async def prepare(
    request: Request,
    loader: ModelLoader,
    owner: ApiUser,
    body: B,
    field: str,
    work: Callable[[ModelLoader, ApiUser, B], ApiCall],
) -> ApiCall:
    """Returns ``work`` of a request, whose messages or input items are in its ``field``."""
    if not await _read_images(request, loader.state, getattr(body, field), field):
        return await loader.run(work, loader, owner, body)
    # Few at once, since each may take the memory of a large image.
    async with loader.state.image_slots:
        return await loader.run(work, loader, owner, body)


async def _read_images(
    request: Request, state: ServerState, items: Sequence[Any] | str, field: str
) -> bool:
    """Replaces addresses of images by data URLs; returns whether there are images."""
    found, budget = False, request.app.state.max_request_bytes
    for part, where in _image_parts(items, field):
        found, url = True, image_url(part, where)
        if not url.startswith("data:"):
            data = await state.images.read(url, where, budget)
            # The decoder finds the format in the bytes.
            url = f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}"
            part["image_url"] = {"url": url}
            budget -= len(data)
    return found


def image_url(part: Mapping[str, Any], where: str) -> str:
    """Returns the address in a part; raises ``ApiError``."""
    value = part.get("image_url")
    # The Responses API has the address itself, chat an object.
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str) or not url:
        got = "file_id" if part.get("file_id") else repr(url) if url == "" else type(url).__name__
        raise ApiError(
            f"{where}.image_url: got {got}, expected a URL such as data:image/png;base64,…",
            param=where,
        )
    return url


def _image_parts(items: Sequence[Any] | str, field: str) -> Iterator[tuple[Json, str]]:
    for i, item in enumerate([] if isinstance(items, str) else items):
        for name in ("content", "output"):
            parts = item.get(name) if isinstance(item, Mapping) else None
            for j, part in enumerate(parts if isinstance(parts, list) else []):
                if isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
                    yield part, f"{field}[{i}].{name}[{j}]"
