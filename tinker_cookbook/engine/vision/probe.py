"""A short input with an image, for the comparison with transformers when a model is loaded."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinker_cookbook.engine.vision.images import ImageInput, is_image, joined
from tinker_cookbook.engine.vision.processing import FAMILIES, image_reader
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.image_processing_utils import pillow


@dataclass(frozen=True)
class Probe:
    """Tokens [T] for the engine, and the arguments of transformers' model."""

    tokens: np.ndarray
    inputs: dict[str, Tensor]
    image: ImageInput | None = None

    @property
    def targets(self) -> np.ndarray:
        """A text token [T] at each position."""
        following = np.roll(self.tokens, -1)
        return np.where(is_image(following), 0, following)


def probe_of(name: str, folder: Path, config: Any, text: np.ndarray, at: torch.device) -> Probe:
    """Returns the ``text`` [T], with an image in it if the engine knows how the model reads it."""
    image = _image(name, folder)
    if image is None:
        return Probe(text, {"input_ids": torch.from_numpy(text).to(at)[None]})
    half = len(text) // 2
    tokens, _ = joined([text[:half], image, text[half:]])
    marked = is_image(tokens)
    inputs = {"input_ids": torch.from_numpy(np.where(marked, config.image_token_id, tokens))[None]}
    if marks := FAMILIES[config.model_type].marks:
        inputs[marks] = torch.from_numpy(marked).int()[None]
    inputs |= {key: torch.from_numpy(value) for key, value in image.pixels().items()}
    return Probe(tokens, {key: value.to(at) for key, value in inputs.items()}, image)


def _image(name: str, folder: Path) -> ImageInput | None:
    try:
        reader = image_reader(name, folder)
    except ConfigurationError:  # a request with an image gets the reason
        return None
    rows, columns = np.mgrid[0:48, 0:64]
    colors = np.stack([5 * rows, 4 * columns, 2 * (rows + columns)], -1).astype(np.uint8)
    out = io.BytesIO()
    pillow().fromarray(colors).save(out, "PNG")
    return reader.read(out.getvalue(), None, "probe")
