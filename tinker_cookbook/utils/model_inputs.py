"""Model inputs as integer arrays, images included, and their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.utils.imports import tinker

Keys: TypeAlias = npt.NDArray[np.int64]
"""[T]: the token at each position, negative at the positions of an image."""


class ChunkKeys:
    """Converts a model input to one int64 key for each position, and back.

    A token is its own key. A chunk of another type (an image) of n positions becomes n copies of a
    negative key that identifies its content. So inputs with images can be compared, cut and joined
    as arrays.
    """

    def __init__(self) -> None:
        self._known: list[tuple[tinker.ModelInputChunk, int]] = []

    def keys(self, model_input: tinker.ModelInput) -> Keys:
        """Returns the keys [T] of all positions."""
        parts = [self._chunk_keys(chunk) for chunk in model_input.chunks]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def model_input(self, keys: Keys) -> tinker.ModelInput:
        """Returns the input of these keys, with adjacent text in one chunk."""
        # If there is only text, skip the search for images.
        if not self._known:
            return tinker.ModelInput.from_ints(keys.tolist())
        # A part starts where text changes to an image or back, or where another image begins.
        starts = np.flatnonzero(np.diff(np.where(keys < 0, keys, 0), prepend=1))
        chunks: list[tinker.ModelInputChunk] = []
        for part in np.split(keys, starts[1:]):
            if part[0] >= 0:
                chunks.append(tinker.EncodedTextChunk(tokens=part.tolist()))
            else:
                # The same image twice in a row is one part: its length gives the number of copies.
                chunk, length = self._known[-1 - int(part[0])]
                chunks += [chunk] * (len(part) // length)
        return tinker.ModelInput(chunks=chunks)

    def _chunk_keys(self, chunk: tinker.ModelInputChunk) -> Keys:
        tokens = getattr(chunk, "tokens", None)
        if tokens is not None:
            return np.asarray(tokens, dtype=np.int64)
        # Compared by content: the same image in several inputs must have the same key.
        for place, (known, length) in enumerate(self._known):
            if known == chunk:
                return np.full(length, -1 - place, dtype=np.int64)
        try:
            # An image without expected_tokens raises here.
            length = int(chunk.length)
        except ValueError:
            length = 0
        if length < 1:
            raise DataValidationError(
                f"model_input: a chunk of type {chunk.type!r} has no number of positions, which "
                "training needs; set its expected_tokens"
            )
        self._known.append((chunk, length))
        return np.full(length, -len(self._known), dtype=np.int64)


def whole_sequence(datum: tinker.Datum) -> tinker.ModelInput:
    """Returns the T + 1 tokens from which a datum's T inputs and T targets were made."""
    # Inputs and targets overlap in all tokens but the first input and the last target.
    last = int(datum.loss_fn_inputs["target_tokens"].to_numpy()[-1])
    return datum.model_input.append_int(last)


async def score_datums(
    client: SamplingClient, data: Sequence[tinker.Datum]
) -> list[npt.NDArray[np.float64]]:
    """Returns the client's log-probabilities [T] of each datum's targets, in nats.

    Values before the first trained target are 0: the backend prefills the prompt without
    predicting it.
    """
    firsts = []
    for datum in data:
        # The first target with weight; the last one if none has any.
        first = 0
        for name in ("weights", "mask"):
            if name in datum.loss_fn_inputs:
                trained = datum.loss_fn_inputs[name].to_numpy() != 0
                first = int(trained.argmax()) if trained.any() else len(trained) - 1
                break
        firsts.append(first)
    # All requests are submitted before the first is awaited, so that the engine batches them.
    futures = [
        client.compute_logprobs(whole_sequence(datum), datum.model_input.length - first)
        for datum, first in zip(data, firsts, strict=True)
    ]
    scores = []
    for future, first in zip(futures, firsts, strict=True):
        # The first token has no log-probability, so value i belongs to target i.
        values = np.array((await future)[1:], dtype=np.float64)
        values[:first] = 0.0
        scores.append(values)
    return scores
