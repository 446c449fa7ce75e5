"""Prompts and training examples with images, for the models of ``tiny_vlm``."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from tiny_vlm import IMAGE_TOKEN

from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.training.examples import Example
from tinker_cookbook.engine.vision.images import ImageInput, is_image, joined
from tinker_cookbook.engine.vision.processing import image_reader

Prompt = tuple[np.ndarray, tuple[ImageInput, ...]]

SIZES = ((40, 64), (24, 90), (64, 33))


def png(seed: int, height: int = 40, width: int = 64) -> bytes:
    from PIL import Image

    rng = np.random.default_rng(seed)
    small = rng.integers(0, 255, (4, 4, 3), dtype=np.uint8)  # larger areas than noise has
    out = io.BytesIO()
    Image.fromarray(small).resize((width, height)).save(out, "PNG")
    return out.getvalue()


def prompt_of(
    base: BaseModel,
    count: int,
    seed: int = 0,
    length: int = 12,
    pixels: int | None = None,
    *,
    adjacent: bool = False,
) -> Prompt:
    """Text with ``count`` images of different sizes in it; ``pixels``: other images. If they are
    ``adjacent``, no text is between them."""
    rng = np.random.default_rng(seed)
    reader = image_reader(base.name, base.folder)
    parts: list[Any] = [rng.integers(3, IMAGE_TOKEN, 5)]
    for number in range(count):
        drawn = png((seed if pixels is None else pixels) + number, *SIZES[number % 3])
        image = reader.read(drawn, None, "image")
        between = 0 if adjacent and number < count - 1 else 3 + number
        parts += [image, rng.integers(3, IMAGE_TOKEN, between)]
    parts.append(rng.integers(3, IMAGE_TOKEN, length))
    return joined(parts)


def example_of(prompt: Prompt, seed: int = 0) -> Example:
    """Signed weights on the tokens that are no images."""
    tokens, images = prompt
    targets = np.where(is_image(tokens), 0, tokens)[1:]
    weights = np.random.default_rng(seed).normal(size=len(targets)).astype(np.float32)
    weights[is_image(tokens[1:])] = 0
    weights[:4] = 0
    return Example(tokens[:-1], {"target_tokens": targets, "weights": weights}, images)


def group_of(base: BaseModel, seed: int = 7) -> list[Example]:
    """Three answers to a prompt with two images."""
    tokens, images = prompt_of(base, 2, seed, 30)
    rng = np.random.default_rng(1)
    answers = [np.concatenate([tokens, rng.integers(3, IMAGE_TOKEN, n)]) for n in (9, 14, 6)]
    return [example_of((answer, images), n) for n, answer in enumerate(answers)]
