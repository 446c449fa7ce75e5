"""Images of rows: in a column of their own, or as parts of the messages.

Images of the columns ``images`` or ``image`` take the places of parts ``{"type": "image"}`` without
an image, or else of the marks ``<image>`` in texts (LLaVA, LLaMA-Factory), in order. Without either
they stand before the first user message, as in TRL. Paths are relative to the file of the row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.core.image_parts import IMAGE_TYPES, VALUES

IMAGE_COLUMNS = ("images", "image", "image_paths", "image_path")
MARK = "<image>"
_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm"))
_LONGEST_PATH = 1024


def has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether a part of the messages is an image."""
    return any(
        isinstance(content := message["content"], list)
        and any(part["type"] == "image" for part in content)
        for message in messages
    )


def with_images(row: Mapping[str, Any], messages: list[Any]) -> list[Any]:
    """Returns the messages with the images of the row's columns in their places.

    Raises RendererError if there are more or fewer images than places.
    """
    columns = [name for name in IMAGE_COLUMNS if _is_filled(row.get(name))]
    if columns[:2] == ["images", "image"]:
        raise RendererError("got images in the columns images and image, expected one of them")
    parts = [part for message in messages for part in _parts(message) if _is_image(part)]
    empty = [part for part in parts if _is_empty(part)]
    # Images in the messages themselves: a column then repeats them.
    if len(parts) > len(empty) or not (columns or empty or any(n in row for n in IMAGE_COLUMNS)):
        return messages
    column = columns[0] if columns else IMAGE_COLUMNS[0]
    images = _listed(row.get(column)) if columns else []
    marks = [sum(text.count(MARK) for text in _texts(message)) for message in messages]
    asked = [0 if _role(m) == "assistant" else n for m, n in zip(messages, marks, strict=True)]
    if empty:
        places, fill = len(empty), _fill_parts
    elif sum(asked) == len(images) or not sum(marks):
        places, fill = sum(asked), _fill_marks
    else:  # an answer may mention the mark, but its images must not be lost
        places, fill, asked = sum(marks), _fill_marks, marks
    if not places and images:
        return _at_first_question(messages, images, column)
    if places != len(images):
        kind = 'parts {"type": "image"}' if empty else f"marks {MARK}"
        raise RendererError(
            f"{column}: got {len(images)} images and {places} {kind} in the messages, expected one "
            "place for each image"
        )
    left = iter(images)
    return [fill(m, left) if n or empty else m for m, n in zip(messages, asked, strict=True)]


def resolve_paths(value: Any, folder: Path) -> None:
    """Makes relative image paths in a row begin with ``folder``; changes the row itself.

    These are the values of image columns and of image parts that name a file there.
    """
    if isinstance(value, list):
        for item in value:
            resolve_paths(item, folder)
    if not isinstance(value, dict):
        return
    is_image = value.get("type") in IMAGE_TYPES
    for key, item in value.items():
        if key in IMAGE_COLUMNS or (is_image and key in VALUES):
            value[key] = _resolved(item, folder)
        elif isinstance(item, (list, dict)):
            resolve_paths(item, folder)
        elif isinstance(item, str) and item.startswith("[") and '"image' in item:
            # Messages in a cell of a CSV file.
            value[key] = cell = _from_json(item)
            resolve_paths(cell, folder)


def _resolved(item: Any, folder: Path) -> Any:
    if isinstance(item, list):
        return [_resolved(one, folder) for one in item]
    if isinstance(item, dict):  # {"bytes", "path"} of a table, or OpenAI's {"url"}
        if item.get("bytes"):  # the path is a name then
            return item
        local = {key: _resolved(item[key], folder) for key in ("path", "url") if item.get(key)}
        return {**item, **local}
    if not isinstance(item, str) or len(item) > _LONGEST_PATH or item.startswith("data:"):
        return item
    if item.startswith("["):  # a list in a cell of a CSV file
        return [_resolved(one, folder) for one in _listed(item)]
    path = folder / item
    # Rows of other kinds have images that are not files, such as the name of a container's.
    is_file = path.suffix.lower() in _SUFFIXES or path.is_file()
    return str(path) if is_file and "://" not in item and not item.startswith("~") else item


def _is_filled(value: Any) -> bool:
    return value is not None and not (isinstance(value, (str, list, tuple, dict)) and not value)


def _from_json(text: str) -> Any:
    """Returns the list of a text that is JSON; other texts are returned unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _listed(value: Any) -> list[Any]:
    """Returns the images of a column: a list, its JSON text, or a single image."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _from_json(value)
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _parts(message: Any) -> list[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list) else []


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES


def _is_empty(part: Mapping[str, Any]) -> bool:
    return not any(_is_filled(part.get(key)) for key in VALUES)


def _texts(message: Any) -> list[str]:
    content = message.get("content") if isinstance(message, Mapping) else None
    found = [content, *(part.get("text") for part in _parts(message) if isinstance(part, Mapping))]
    return [text for text in found if isinstance(text, str)]


_Fill = Callable[[Any, Any], Any]


def _fill_parts(message: Any, images: Any) -> Any:
    if not any(map(_is_image, _parts(message))):
        return message
    return {
        **message,
        "content": [
            {"type": "image", "image": next(images)} if _is_image(part) else part
            for part in message["content"]
        ],
    }


def _fill_marks(message: Any, images: Any) -> Any:
    """Replaces each mark by an image; the text around it stays as it is."""
    parts: list[Any] = []
    for part in _parts(message) or [{"type": "text", "text": message["content"]}]:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            parts.append(part)
            continue
        for i, piece in enumerate(text.split(MARK)):
            if i:
                parts.append({"type": "image", "image": next(images)})
            if piece:
                parts.append({"type": "text", "text": piece})
    return {**message, "content": parts}


def _at_first_question(messages: list[Any], images: list[Any], column: str) -> list[Any]:
    first = next((i for i, message in enumerate(messages) if _role(message) == "user"), None)
    if first is None:
        raise RendererError(f"{column}: got images, but no user message, expected one to show them")
    content = messages[first].get("content")
    text = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    shown = [{"type": "image", "image": image} for image in images]
    return [
        *messages[:first],
        {**messages[first], "content": [*shown, *text]},
        *messages[first + 1 :],
    ]
