"""Forms in which data and APIs write an image, read as ``{"type": "image", "image": …}``."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any

from tinker_cookbook.exceptions import RendererError

IMAGE_TYPES = ("image", "image_url", "input_image")
"""Types of parts with an image: of this package and transformers, and of OpenAI's two APIs."""

VALUES = ("image", "image_url", "url", "path", "base64")
"""Keys of such a part that may have the image."""

# Base64 of a PNG, JPEG, GIF, WebP or BMP file; the first characters are those of its signature.
_BASE64 = re.compile(r"(?:iVBORw0KGgo|/9j/|R0lGOD|UklGR|Qk)[A-Za-z0-9+/\s]{40,}={0,2}\s*")


def read_image_part(part: Any, where: str) -> Any:
    """Returns an image part in the form of this package; other parts are returned unchanged.

    Raises RendererError, which starts with ``where``, for a part without an image.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in IMAGE_TYPES:
        return part
    key = next((key for key in VALUES if part.get(key) is not None), kind)
    value = part.get(key)
    if isinstance(value, Mapping):
        value = _of_object(value)
    if value is None:
        raise RendererError(
            f"{where}.{key}: got {part.get(key)!r:.80}, expected an image: a file, a data URI, "
            '{"url": …} or {"bytes": …}; in a row of data, its column images may have the image'
        )
    return {"type": "image", "image": _decoded(value)}


def image_label(image: Any) -> str:
    """Returns a short text for an image: its path, or its kind and size."""
    if isinstance(image, bytes):
        return f"{len(image)} bytes"
    if isinstance(image, str):
        return f"{image[:22]}… ({len(image)} characters)" if image.startswith("data:") else image
    return f"Image({image.size[0]}x{image.size[1]}, {image.mode})"


def _of_object(value: Mapping[str, Any]) -> Any:
    """Returns the image of ``{"url": …}``, or of ``{"bytes": …, "path": …}`` as in tables."""
    data = value.get("bytes")
    if data is not None:
        return data if isinstance(data, str) else bytes(data)
    return value.get("url") or value.get("path")


def _decoded(value: Any) -> Any:
    """Returns base64 without ``data:`` as bytes; other values are returned unchanged."""
    if isinstance(value, str) and _BASE64.match(value[:80]) and _BASE64.fullmatch(value):
        try:
            return base64.b64decode("".join(value.split()), validate=True)
        except (binascii.Error, ValueError):
            return value
    return value
