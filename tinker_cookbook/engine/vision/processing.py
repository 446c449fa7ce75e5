"""From the bytes of an image to its tokens and pixels, as the model's image processor makes them.

Needs no weights, so images are checked before anything is loaded or computed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tinker_cookbook.engine.memory import BoundedCache
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
from tinker_cookbook.image_text_processor import get_image_text_processor

Pixels: TypeAlias = dict[str, np.ndarray]


class Expansion(NamedTuple):
    """Tokens of an image, and how they are placed and seen, as in ``ImageInput``."""

    tokens: np.ndarray
    positions: np.ndarray | None = None
    advance: int = 0
    both_ways: bool = False


Encode: TypeAlias = "Callable[[str], list[int]]"


@dataclass(frozen=True)
class Family:
    """How images of a kind of model become tokens.

    ``expand`` gets the model's config, the arrays of the image processor (called with
    ``options``), the image's digest, and the model's tokenizer. The vision tower takes the arrays
    ``inputs``, or with ``whole`` all those of transformers' whole processor.
    """

    expand: Callable[[dict[str, Any], Pixels, bytes, Encode], Expansion]
    inputs: tuple[str, ...] = ()
    marks: str = ""
    """The argument of transformers' model that marks the positions of images, if it has one."""
    options: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False


_KEPT_BYTES = 256 << 20
"""Of images that an epoch, or a group's next turn, may read again."""
_made: BoundedCache[bytes, Pixels] = BoundedCache(256 << 20)
"""Pixels that the vision tower has not read yet, by the images' digests: they are made once."""


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
        self.family = FAMILIES.get(kind, WHOLE)
        try:
            self.processor = _processor(str(folder), self.family)
        except (ConfigurationError, ModelNotFoundError) as error:
            raise ConfigurationError(
                f"{name} (model_type {kind!r}) cannot read images: {error}. Text alone works"
            ) from error
        self._kept: BoundedCache[bytes, ImageInput] = BoundedCache(_KEPT_BYTES)
        self._tokenizer: Any = None
        # Images for two models are different inputs, also if their pixels are equal.
        made_by = [self.processor.to_dict(), dict(self._config)]
        self._source = json.dumps(made_by, sort_keys=True, default=str).encode()

    def read(self, data: bytes, expected_tokens: int | None, where: str) -> ImageInput:
        """Returns an image from its encoded bytes.

        Raises ``DataValidationError``, which begins with ``where``, if it cannot be read, or if the
        number of its tokens is not ``expected_tokens``.
        """
        key = hashlib.sha256(data).digest()
        if (image := self._kept.get(key)) is None:
            image = self._read(data, where)
            self._kept.put(key, image, len(data) + image.tokens.nbytes)
        if expected_tokens is not None and expected_tokens != len(image):
            raise DataValidationError(
                f"{where}: expected_tokens is {expected_tokens}, but the image has {len(image)} "
                "tokens for this model; count them with the model's own image processor "
                "(renderers.image_to_chunk), or leave expected_tokens out"
            )
        return image

    def _read(self, data: bytes, where: str) -> ImageInput:
        try:
            rgb = decode_image(data, where)
        except DataFormatError as error:
            raise DataValidationError(str(error)) from error
        digest = hashlib.sha256(self._source + repr(rgb.size).encode() + rgb.tobytes()).digest()
        try:
            pixels = _processed(self.processor, rgb, self.family)
        except ValueError as error:  # an aspect ratio that the processor refuses
            width, height = rgb.size
            raise DataValidationError(
                f"{where}: the image processor refuses {width} x {height} pixels: {error}; crop "
                "the image or pad it"
            ) from error
        tiled = "pixel_attention_mask" in pixels  # pixels [1, tiles, channels, height, width]
        if tiled and not pixels["pixel_values"].any(axis=(-3, -2, -1)).all():
            raise DataValidationError(
                f"{where}: a part of the image is all zeros for the image processor, and "
                "transformers drops such parts; expected image_mean above 0 in "
                "preprocessor_config.json, or another image"
            )
        expansion = self.family.expand(self._config, pixels, digest, self._encode)
        if len(expansion.tokens) > MOST_TOKENS:
            raise DataValidationError(
                f"{where}: the image has {len(expansion.tokens)} tokens, expected at most "
                f"{MOST_TOKENS}; make it smaller"
            )
        # Pixels are many times larger than the file, and needed only if the features are not kept.
        kind, inputs = str(self._config["model_type"]), _inputs(pixels, self.family)
        _made.put(digest, inputs, sum(array.nbytes for array in inputs.values()))
        make_pixels = partial(_pixels_of, str(self._folder), kind, digest, data)
        return interned(ImageInput(digest, make_pixels, *expansion))

    def _encode(self, text: str) -> list[int]:
        from transformers import AutoTokenizer

        if self._tokenizer is None:
            self._tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
        return self._tokenizer.encode(text, add_special_tokens=False)


@cache
def image_reader(name: str, folder: Path) -> ImageReader:
    """Returns the reader of a model's images, made once."""
    return ImageReader(name, folder)


def _processor(folder: str, family: Family) -> Any:
    return get_image_text_processor(folder) if family.whole else get_image_processor(folder)


def _processed(processor: Any, rgb: Any, family: Family) -> Pixels:
    return dict(processor(images=[rgb], return_tensors="np", **family.options))


def _inputs(pixels: Pixels, family: Family) -> Pixels:
    names = [name for name in pixels if name != "input_ids"] if family.whole else family.inputs
    return {name: np.asarray(pixels[name]) for name in names if name in pixels}


def _pixels_of(folder: str, kind: str, digest: bytes, data: bytes) -> Pixels:
    if (made := _made.pop(digest)) is not None:
        return made
    family = FAMILIES.get(kind, WHOLE)
    rgb = decode_image(data, "image")
    return _inputs(_processed(_processor(folder, family), rgb, family), family)


def _expand_qwen(
    config: dict[str, Any], pixels: Pixels, digest: bytes, encode: Encode
) -> Expansion:
    """One token for each square of merged patches, with positions on three axes."""
    merge = int(config["vision_config"].get("spatial_merge_size", 2))
    _, height, width = (int(side) for side in pixels["image_grid_thw"][0])
    height, width = height // merge, width // merge
    ids = feature_ids(digest, height * width)
    return Expansion(ids, grid_positions(height, width), max(height, width))


def _expand_idefics(
    config: dict[str, Any], pixels: Pixels, digest: bytes, encode: Encode
) -> Expansion:
    """Tiles in rows and columns, each behind its mark, and the whole image in low resolution."""
    vision = config["vision_config"]
    side = int(vision["image_size"]) // int(vision["patch_size"])
    count = side**2 // int(config.get("scale_factor", 2)) ** 2
    around, image = "<fake_token_around_image>", "<image>" * count
    rows, columns = (int(np.ravel(pixels[name])[0]) for name in ("rows", "cols"))
    text = ""
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            text += f"{around}<row_{row}_col_{column}>{image}"
        text += "\n"
    text += "\n" * bool(rows) + f"{around}<global-img>{image}{around}"
    ids = np.array(encode(text), dtype=np.int64)
    at = ids == int(config["image_token_id"])
    ids[at] = feature_ids(digest, int(at.sum()))
    return Expansion(ids)


def _expand_gemma3(
    config: dict[str, Any], pixels: Pixels, digest: bytes, encode: Encode
) -> Expansion:
    """A fixed number of tokens; the marks and line breaks around them are text of the prompt."""
    ids = feature_ids(digest, int(config.get("mm_tokens_per_image", 256)))
    return Expansion(ids, both_ways=True)


def _expand_whole(
    config: dict[str, Any], pixels: Pixels, digest: bytes, encode: Encode
) -> Expansion:
    """What transformers' processor writes for the image."""
    ids = np.array(pixels["input_ids"][0], dtype=np.int64)
    at = ids < 0
    ids[at] = feature_ids(digest, int(at.sum()))
    return Expansion(ids)


_QWEN = Family(_expand_qwen, ("pixel_values", "image_grid_thw"), "mm_token_type_ids")
_IDEFICS = Family(
    _expand_idefics,
    ("pixel_values", "pixel_attention_mask"),
    options={"return_row_col_info": True},
)
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN
    ),
    **dict.fromkeys(("idefics3", "smolvlm"), _IDEFICS),
    "gemma3": Family(_expand_gemma3, ("pixel_values",), "token_type_ids"),
}
"""By the model type in config.json."""
WHOLE = Family(_expand_whole, whole=True)
"""Of all other types; a loaded model is compared with transformers before it takes images."""
