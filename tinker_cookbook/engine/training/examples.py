"""Training examples of the engine, and checks of them before any computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.training.losses import LOSSES, Loss
from tinker_cookbook.engine.vision.images import ImageInput, is_image, text_tokens
from tinker_cookbook.exceptions import DataValidationError, nearest

_KNOWN = {"mask", *(name for one in LOSSES.values() for name in (*one.required, *one.optional))}
"""Names that any loss knows, and ``mask``."""


@dataclass(frozen=True)
class Example:
    """One sequence.

    ``tokens`` [T] int64 is the model's input; position i predicts ``inputs["target_tokens"][i]``.
    ``inputs`` holds the loss's arrays, [T] or, for cross_entropy, [T, K]. ``images`` are those
    whose ids are in ``tokens``; they must exist as long as the example.
    """

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]
    images: tuple[ImageInput, ...] = ()

    @property
    def targets(self) -> np.ndarray:
        """Target token ids, [T] or [T, K] int64."""
        return self.inputs["target_tokens"]

    def __len__(self) -> int:
        return len(self.tokens)

    def for_loss(self, loss: Loss) -> Example:
        """Returns the example without ``mask`` and without fields that only other losses read.

        One datum may have the fields of several losses, as for the hosted service. No loss reads a
        ``mask``: ``weights`` or ``advantages`` alone define what is trained. Names that no loss
        knows are kept, so that ``check_examples`` refuses them.
        """
        ignored = _KNOWN.difference(loss.required, loss.optional)
        if ignored.isdisjoint(self.inputs):
            return self
        kept = {name: value for name, value in self.inputs.items() if name not in ignored}
        return replace(self, inputs=kept)


def check_examples(data: Sequence[Example], loss: Loss, base: BaseModel) -> frozenset[str]:
    """Raises ``DataValidationError`` with datum and field; returns the optional fields in use.

    Either all datums or none must have an optional field (per-token clip thresholds).
    """
    if not data:
        raise DataValidationError("data: got no datum, expected at least one")
    optional = frozenset(name for name in loss.optional if name in data[0].inputs)
    for index, example in enumerate(data):
        where = f"datum {index}"
        base.check_images(example.tokens)
        text = text_tokens(example.tokens)
        if len(text) or not len(example.tokens):
            _check_tokens(where, "model_input", text, base.vocab_size)
        if len(example) > base.context_length:
            raise DataValidationError(
                f"{where}: model_input has {len(example)} tokens, but the model's context is "
                f"{base.context_length}; cut it (max_length={base.context_length})"
            )
        present, known = set(example.inputs), (*loss.required, *loss.optional)
        if lacking := [name for name in loss.required if name not in present]:
            raise DataValidationError(
                f"{where}: loss_fn_inputs lacks {lacking[0]!r}; {loss.name} needs "
                f"{', '.join(loss.required)}"
            )
        if unknown := present.difference(known):
            name = min(unknown)
            raise DataValidationError(
                f"{where}: loss_fn_inputs has {name!r}, which {loss.name} does not use; expected "
                f"{', '.join(known)}{nearest(name, known)}"
            )
        # A micro-batch concatenates each field over its sequences. A field of only some would not
        # line up with the tokens.
        if present.intersection(loss.optional) != optional:
            raise DataValidationError(
                f"{where}: optional loss_fn_inputs differ from those of datum 0 "
                f"({sorted(optional) or 'none'}); give them for all datums or for none"
            )
        _check_fields(where, example, loss, base.vocab_size)
        if example.images:
            _check_images_untrained(where, example)
    return optional


def _check_fields(where: str, example: Example, loss: Loss, vocab_size: int) -> None:
    targets = example.targets
    # Only cross_entropy can sum over K targets of a position; other losses compare one token with
    # its sampled log-probability.
    shapes = {1: f"({len(example)},)"}
    if loss.name == "cross_entropy":
        shapes[2] = f"({len(example)}, K)"
    if targets.ndim not in shapes:
        raise DataValidationError(
            f"{where}: target_tokens has shape {targets.shape}, expected "
            f"{' or '.join(shapes.values())}"
        )
    _check_tokens(where, "target_tokens", targets, vocab_size)
    for name, values in example.inputs.items():
        expected = targets.shape if name in ("target_tokens", "weights") else (len(example),)
        if values.shape != expected or values.shape[0] != len(example):
            raise DataValidationError(
                f"{where}: {name} has shape {values.shape}, expected "
                f"{(len(example), *expected[1:])} to match model_input's {len(example)} tokens"
            )
        # One NaN would make the summed gradient of the whole batch NaN. Here, the datum and the
        # position are still known.
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            position = int(np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1))[0])
            raise DataValidationError(
                f"{where}: {name} is {values[position]} at position {position}, expected finite "
                "numbers; check how it was computed"
            )


def _check_images_untrained(where: str, example: Example) -> None:
    # A position before a part of an image predicts none of the vocabulary's tokens.
    before_image = np.append(is_image(example.tokens[1:]), False)
    for name in ("weights", "advantages"):
        if name not in example.inputs:
            continue
        trained = example.inputs[name].reshape(len(example), -1).any(1) & before_image
        if trained.any():
            raise DataValidationError(
                f"{where}: {name} is not 0 at position {int(trained.argmax())}, after which a part "
                "of an image follows; expected 0, since images are not trained"
            )


def _check_tokens(where: str, name: str, tokens: np.ndarray, vocab_size: int) -> None:
    if tokens.size == 0:
        raise DataValidationError(f"{where}: {name} is empty, expected at least one token")
    # Floats would be truncated to integers later, without an error.
    if tokens.dtype.kind not in "iu":
        raise DataValidationError(
            f"{where}: {name} has type {tokens.dtype}, expected integers (token ids)"
        )
    check_token_range(f"{where}: {name}", tokens, vocab_size)


def check_token_range(what: str, tokens: np.ndarray, vocab_size: int) -> None:
    """Raises ``DataValidationError`` if ``tokens`` (at least one) are not all in the vocabulary."""
    # The embedding would raise too, but could not name the datum.
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise DataValidationError(
            f"{what} holds token id {low if low < 0 else high}, expected 0 to "
            f"{vocab_size - 1}; it was probably tokenised for another model"
        )
