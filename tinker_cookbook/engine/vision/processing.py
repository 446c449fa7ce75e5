"""From the bytes of an image to its tokens and pixels, as the model's image processor makes them.

Needs no weights, so images are checked before anything is loaded or computed.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tinker_cookbook.engine.model.resolve import model_config
from tinker_cookbook.engine.vision.images import (
    MOST_TOKENS,
    ImageInput,
    feature_ids,
    grid_positions,
    interned,
)
from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataFormatError,
    DataValidationError,
    ModelNotFoundError,
)
from tinker_cookbook.image_processing_utils import decode_image, get_image_processor

Pixels: TypeAlias = dict[str, np.ndarray]


class Expansion(NamedTuple):
    """Tokens of an image, and its rotary positions, as in ``ImageInput``."""

    tokens: np.ndarray
    positions: np.ndarray | None = None
    advance: int = 0


Expand: TypeAlias = "Callable[[dict[str, Any], Pixels, bytes], Expansion]"

_KEPT_IMAGES = 256
"""Images that are kept after their last use: an epoch, or a group's next turn, reads them again."""
_KEPT_BYTES = 256 << 20


class ImageReader:
    """Reads images for the model in ``folder``.

    Raises ``ConfigurationError`` if the model does not take images, or none that the engine knows.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._folder, self._config = folder, model_config(folder)
        kind = str(self._config.get("model_type"))
        if "vision_config" not in self._config:
            raise ConfigurationError(
                f"{name} is a text model (model_type {kind!r}), but the input has an image; give a "
                "model that takes images, such as Qwen3-VL, or leave the images out"
            )
        if kind not in EXPANDS:
            raise ConfigurationError(
                f"{name} has the model type {kind!r}, whose images the engine does not know; "
                f"expected one of {', '.join(EXPANDS)}. Text alone works"
            )
        try:
            self._processor = get_image_processor(str(folder))
        except ModelNotFoundError as error:
            raise ConfigurationError(str(error)) from error
        self._expand = EXPANDS[kind]
        self._kept: OrderedDict[bytes, tuple[ImageInput, int]] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()
        # Images of two processors are different inputs, also if their pixels are equal.
        self._source = repr(sorted(self._processor.to_dict().items(), key=str)).encode()

    def read(self, data: bytes, expected_tokens: int | None, where: str) -> ImageInput:
        """Returns an image from its encoded bytes.

        Raises ``DataValidationError``, which begins with ``where``, if it cannot be read, or if the
        number of its tokens is not ``expected_tokens``.
        """
        key = hashlib.sha256(data).digest()
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
        image = found[0] if found is not None else self._read(data, where)
        if found is None:
            self._keep(key, image, len(data))
        if expected_tokens is not None and expected_tokens != len(image):
            raise DataValidationError(
                f"{where}: expected_tokens is {expected_tokens}, but the image has {len(image)} "
                "tokens for this model; count them with the model's own image processor "
                "(renderers.image_to_chunk), or leave expected_tokens out"
            )
        return image

    def _keep(self, key: bytes, image: ImageInput, size: int) -> None:
        with self._lock:
            self._kept[key] = image, size
            self._kept_bytes += size
            while len(self._kept) > _KEPT_IMAGES or self._kept_bytes > _KEPT_BYTES:
                _, (_, freed) = self._kept.popitem(last=False)
                self._kept_bytes -= freed

    def _read(self, data: bytes, where: str) -> ImageInput:
        rgb = _decoded(data, where)
        digest = hashlib.sha256(self._source + repr(rgb.size).encode() + rgb.tobytes()).digest()
        try:
            pixels = _processed(self._processor, rgb)
        except ValueError as error:  # an aspect ratio that the processor refuses
            width, height = rgb.size
            raise DataValidationError(
                f"{where}: the image processor refuses {width} x {height} pixels: {error}; crop "
                "the image or pad it"
            ) from error
        expansion = self._expand(self._config, pixels, digest)
        if len(expansion.tokens) > MOST_TOKENS:
            raise DataValidationError(
                f"{where}: the image has {len(expansion.tokens)} tokens, expected at most "
                f"{MOST_TOKENS}; make it smaller"
            )
        # Pixels are many times larger than the file, and needed only if the features are not kept.
        make_pixels = partial(_pixels_of, str(self._folder), data)
        return interned(ImageInput(digest, make_pixels, *expansion))


@cache
def image_reader(name: str, folder: Path) -> ImageReader:
    """Returns the reader of a model's images, made once."""
    return ImageReader(name, folder)


def _decoded(data: bytes, where: str) -> Any:
    try:
        return decode_image(data, where)
    except DataFormatError as error:
        raise DataValidationError(str(error)) from error


def _processed(processor: Any, rgb: Any) -> Pixels:
    return dict(processor(images=[rgb], return_tensors="np"))


def _pixels_of(folder: str, data: bytes) -> Pixels:
    return _processed(get_image_processor(folder), _decoded(data, "image"))


def _expand_qwen(config: dict[str, Any], pixels: Pixels, digest: bytes) -> Expansion:
    """One token for each square of merged patches, with positions on three axes."""
    merge = int(config["vision_config"].get("spatial_merge_size", 2))
    _, height, width = (int(side) for side in pixels["image_grid_thw"][0])
    height, width = height // merge, width // merge
    ids = feature_ids(digest, height * width)
    return Expansion(ids, grid_positions(height, width), max(height, width))


EXPANDS: dict[str, Expand] = dict.fromkeys(
    ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _expand_qwen
)
"""How the images of a model type become tokens."""
