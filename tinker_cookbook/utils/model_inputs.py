"""Model inputs with images as arrays, and their log-probabilities from a sampling client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.utils.imports import lazy_module

if TYPE_CHECKING:
    import tinker
    from tinker import types

    from tinker_cookbook.backends import SamplingClient
else:
    tinker = lazy_module("tinker")

Keys: TypeAlias = npt.NDArray[np.int64]
"""[T]: the token at each position, negative where a medium stands."""


class ChunkKeys:
    """Writes a model input as one int64 key for each position, and back.

    A token is its own key. A chunk of another type (an image) that takes n positions is n times
    the same negative key, which stands for its content. So inputs with images compare, cut and
    join as arrays like any other.
    """

    def __init__(self) -> None:
        self._known: list[tuple[types.ModelInputChunk, int]] = []

    def keys(self, model_input: tinker.ModelInput) -> Keys:
        """[T] keys of all positions."""
        parts = [self._chunk_keys(chunk) for chunk in model_input.chunks]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def model_input(self, keys: Keys) -> tinker.ModelInput:
        """Returns the input that the keys were made of, adjacent text in one chunk."""
        if not self._known:
            return tinker.ModelInput.from_ints(keys.tolist())
        starts = np.flatnonzero(np.diff(np.where(keys < 0, keys, 0), prepend=1))
        chunks: list[types.ModelInputChunk] = []
        for part in np.split(keys, starts[1:]):
            if part[0] >= 0:
                chunks.append(tinker.EncodedTextChunk(tokens=part.tolist()))
            else:
                chunk, length = self._known[-1 - int(part[0])]
                chunks += [chunk] * (len(part) // length)
        return tinker.ModelInput(chunks=chunks)

    @staticmethod
    def without_trailing_media(keys: Keys) -> Keys:
        """Returns the keys up to the last token: a medium at the end, whole or cut, predicts
        nothing."""
        return keys[: int(np.flatnonzero(keys >= 0)[-1]) + 1] if (keys >= 0).any() else keys[:0]

    def _chunk_keys(self, chunk: types.ModelInputChunk) -> Keys:
        tokens = getattr(chunk, "tokens", None)
        if tokens is not None:
            return np.asarray(tokens, dtype=np.int64)
        for place, (known, length) in enumerate(self._known):
            if known == chunk:
                return np.full(length, -1 - place, dtype=np.int64)
        length = _positions(chunk)
        self._known.append((chunk, length))
        return np.full(length, -len(self._known), dtype=np.int64)


def _positions(chunk: types.ModelInputChunk) -> int:
    try:
        length = int(chunk.length)
    except ValueError:
        length = 0
    if length < 1:
        raise DataValidationError(
            f"model_input: a chunk of type {chunk.type!r} does not say how many positions it "
            "takes, which training needs; set its expected_tokens"
        )
    return length


def whole_sequence(datum: tinker.Datum) -> tinker.ModelInput:
    """Returns the T + 1 tokens of which a datum's T inputs and T targets were made."""
    last = int(datum.loss_fn_inputs["target_tokens"].to_numpy()[-1])
    return datum.model_input.append_int(last)


async def score_datums(
    client: SamplingClient, data: Sequence[tinker.Datum]
) -> list[npt.NDArray[np.float64]]:
    """Returns the client's log-probabilities [T] of each datum's targets, in nats.

    Those before the first target that is trained are not asked for, and 0: the backend has to read
    the prompt, but not to predict it. All are asked for before the first is awaited: the bundled
    engine computes together what waits together, and on a CPU no value depends on the other
    requests.
    """
    firsts = [_first_trained(datum) for datum in data]
    futures = [
        client.compute_logprobs(whole_sequence(datum), datum.model_input.length - first)
        for datum, first in zip(data, firsts, strict=True)
    ]
    scores = []
    for future, first in zip(futures, firsts, strict=True):
        values = np.array((await future)[1:], dtype=np.float64)
        values[:first] = 0.0
        scores.append(values)
    return scores


def _first_trained(datum: tinker.Datum) -> int:
    """Number of the first target that counts; the last one where none does."""
    for name in ("weights", "mask"):
        if name in datum.loss_fn_inputs:
            trained = datum.loss_fn_inputs[name].to_numpy() != 0
            return int(trained.argmax()) if trained.any() else len(trained) - 1
    return 0
