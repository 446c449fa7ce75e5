"""Short inputs with images, for the comparison with transformers when a model is loaded."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinker_cookbook.engine.vision.images import ImageInput, is_image, joined
from tinker_cookbook.engine.vision.processing import ImageReader, image_reader
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.image_processing_utils import decode_image, pillow


@dataclass(frozen=True)
class Probe:
    """Tokens [T] for the engine, and the arguments of transformers' model."""

    tokens: np.ndarray
    inputs: dict[str, Tensor]
    image: ImageInput | None = None

    def targets(self, at: torch.device) -> Tensor:
        """Returns a text token [T] at each position."""
        following = np.roll(self.tokens, -1)
        return torch.from_numpy(np.where(is_image(following), 0, following)).to(at)

    @torch.no_grad()
    def reference(self, model: Any, *, with_hidden: bool) -> tuple[Tensor, Tensor | None]:
        """Returns log-probabilities [T] of transformers' ``model`` for the targets, and its hidden
        states [1, T, H] if ``with_hidden``."""
        inputs = {**self.inputs, "use_cache": False}
        logprobs = model(**inputs).logits[0].float().log_softmax(-1)
        hidden = model.base_model(**inputs).last_hidden_state if with_hidden else None
        return logprobs.gather(1, self.targets(logprobs.device)[:, None])[:, 0], hidden


def probe_of(name: str, folder: Path, config: Any, text: np.ndarray, at: torch.device) -> Probe:
    """Returns the ``text`` [T], with an image in it if the engine knows how the model reads it."""
    reader = _reader(name, folder)
    if reader is None or reader.family.whole:
        return Probe(text, {"input_ids": torch.from_numpy(text).to(at)[None]})
    image = reader.read(_picture(48, 64), None, "probe")
    half = len(text) // 2
    tokens, _ = joined([text[:half], image, text[half:]])
    marked = is_image(tokens)
    inputs = {"input_ids": torch.from_numpy(np.where(marked, config.image_token_id, tokens))[None]}
    if marks := reader.family.marks:
        inputs[marks] = torch.from_numpy(marked).int()[None]
    inputs |= {key: torch.from_numpy(value) for key, value in image.pixels().items()}
    return Probe(tokens, {key: value.to(at) for key, value in inputs.items()}, image)


def whole_probe(name: str, folder: Path, at: torch.device) -> Probe | str | None:
    """Returns a prompt with two images of different sizes, with all that transformers' processor
    makes of it; the reason if their tokens are others than those of each image alone; ``None`` if
    the model has no such processor, or the engine has code for its images."""
    reader = _reader(name, folder)
    if reader is None or not reader.family.whole:
        return None
    try:
        files = [_picture(48, 64), _picture(96, 40)]
        mark, images = reader.processor.mark, [reader.read(file, None, "probe") for file in files]
        shown = [decode_image(file) for file in files]
        made = reader.processor.of_prompt(
            ["One ", mark, " two ", mark, " three"], shown, return_tensors="pt"
        )
    except Exception as error:  # processors may raise anything
        return f"transformers' processor fails: {error}"
    tokens = _with_ids(made["input_ids"][0].numpy(), images, reader.processor.mark_id)
    if tokens is None:
        return (
            "in a prompt with two images, transformers' processor writes other tokens for them "
            "than for each of them alone"
        )
    inputs = {name: torch.as_tensor(value).to(at) for name, value in made.items()}
    inputs.pop("labels", None)
    return Probe(tokens, inputs, images[0])


def _with_ids(written: np.ndarray, images: Sequence[ImageInput], mark_id: int) -> np.ndarray | None:
    """Returns the tokens [T] of a prompt with the ids of its images; ``None`` if they are not those
    of each image alone."""
    tokens, position = written.astype(np.int64), 0
    for image in images:
        alone = np.where(is_image(image.tokens), mark_id, image.tokens)
        starts = range(position, len(tokens) - len(image) + 1)
        equal = (at for at in starts if (tokens[at : at + len(image)] == alone).all())
        if (start := next(equal, None)) is None:
            return None
        position = start + len(image)
        tokens[start:position] = image.tokens
    return None if (tokens == mark_id).any() else tokens


def difference(found: Tensor, expected: Tensor, *, exact: bool) -> str:
    """Returns by how much two log-probabilities [T] of the same tokens differ, "" if only by
    rounding; ``exact`` in float32."""
    differences = (found - expected).abs()  # half precision moves single positions far
    largest = (differences.max() if exact else differences.median()).item()
    # bfloat16: SmolLM2 differs by 0.03 (median) and at most 0.1 from rounding alone.
    tolerance = 1e-3 if exact else 0.1
    # Not ``>``, because NaN must fail too.
    if largest <= tolerance:
        return ""
    return f"by {largest:.2g} (expected <= {tolerance:g})"


def _reader(name: str, folder: Path) -> ImageReader | None:
    try:
        return image_reader(name, folder)
    except ConfigurationError:  # a request with an image gets the reason
        return None


def _picture(height: int, width: int) -> bytes:
    """Returns a PNG file."""
    rows, columns = np.mgrid[0:height, 0:width]
    colors = np.stack([2 * rows, 4 * columns, rows + columns], -1).astype(np.uint8)
    out = io.BytesIO()
    pillow().fromarray(colors).save(out, "PNG")
    return out.getvalue()
