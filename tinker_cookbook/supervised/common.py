"""Datums from tokens and weights, and losses from log-probabilities.

A datum's *weights* multiply the log-probability of each token in the loss; ``reduction="mean"``
scales them. Its *loss mask* marks the trained tokens. Reported losses count every trained token
once, by the mask, so that they are comparable between training and test data for any reduction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.utils.imports import lazy_module
from tinker_cookbook.utils.model_inputs import ChunkKeys, Keys

if TYPE_CHECKING:
    import tinker
    import torch

    from tinker_cookbook.tokenizer_utils import Tokenizer

    Tokens: TypeAlias = torch.Tensor | npt.NDArray[Any] | Sequence[int]
    Weights: TypeAlias = torch.Tensor | npt.NDArray[Any] | Sequence[float]
else:
    tinker = lazy_module("tinker")

Reduction = Literal["none", "mean"]
"""``none``: each trained token has weight 1. ``mean``: the weights of each example sum to 1."""


def tokens_of(model_input: tinker.ModelInput) -> npt.NDArray[np.int64]:
    """Returns the token ids [T] of a text-only input."""
    keys = ChunkKeys().keys(model_input)
    if (keys < 0).any():
        kinds = sorted({chunk.type for chunk in model_input.chunks} - {"encoded_text"})
        raise DataValidationError(
            f"model_input: got chunks of type {', '.join(kinds)}, expected 'encoded_text' only: "
            "images and audio have no token ids; leave them out"
        )
    return keys


def datum_from_model_input_weights(
    model_input: tinker.ModelInput,
    weights: Weights,
    max_length: int | None = None,
    reduction: Reduction = "none",
) -> tinker.Datum:
    """Returns a datum that trains token i with weight i; ``model_input`` and ``weights`` are [T].

    Position i predicts token i + 1, so inputs, ``target_tokens`` and ``weights`` of the datum are
    [T - 1], and the first weight is unused. An image of n tokens has n positions, with targets and
    weights 0. ``max_length`` truncates the T tokens; an image that is cut, or that no text follows,
    is dropped. Raises DataValidationError for different lengths, weights that are not finite, and
    fewer than two tokens.
    """
    return data_from_examples([(model_input, weights)], max_length, reduction)[0]


def datum_from_tokens_weights(
    tokens: Tokens,
    weights: Weights,
    max_length: int | None = None,
    reduction: Reduction = "none",
) -> tinker.Datum:
    """Returns the datum of ``datum_from_model_input_weights`` for token ids [T] and weights [T]."""
    ids, values = _checked(tokens, weights, max_length)
    return make_datum(ids, reduce_weights([values[1:]], reduction)[0])


def make_datum(ids: npt.NDArray[np.int64], weights: npt.NDArray[np.float32]) -> tinker.Datum:
    """Returns a datum of valid token ids [T] and weights [T - 1] of the targets."""
    return _make_datum(tinker.ModelInput.from_ints(ids[:-1].tolist()), ids[1:], weights)


def _make_datum(
    model_input: tinker.ModelInput,
    targets: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float32],
) -> tinker.Datum:
    return tinker.Datum(
        model_input=model_input,
        loss_fn_inputs={
            # Copies, so that the datum does not share memory with the longer arrays.
            "target_tokens": tinker.TensorData.from_numpy(targets.copy()),
            "weights": tinker.TensorData.from_numpy(weights.copy()),
        },
    )


def data_from_examples(
    examples: Sequence[tuple[tinker.ModelInput, Weights]],
    max_length: int | None = None,
    reduction: Reduction = "none",
) -> list[tinker.Datum]:
    """Returns a datum for each (model input, weights) pair of a single split conversation.

    With ``reduction="mean"`` the weights of all pairs together sum to 1.
    """
    chunks = ChunkKeys()
    checked = [
        _checked_keys(chunks.keys(model_input), weights, max_length)
        for model_input, weights in examples
    ]
    reduced = reduce_weights([values[1:] for _, values in checked], reduction)
    return [
        _make_datum(chunks.model_input(keys[:-1]), np.maximum(keys[1:], 0), values)
        for (keys, _), values in zip(checked, reduced, strict=True)
    ]


def _checked_keys(
    keys: Keys, weights: Weights, max_length: int | None
) -> tuple[Keys, npt.NDArray[np.float32]]:
    keys, values = _checked(keys, weights, max_length)
    # Keys of image positions are negative.
    trained_media = np.flatnonzero((keys < 0) & (values != 0))
    if trained_media.size:
        at = int(trained_media[0])
        raise DataValidationError(
            f"weights[{at}]: got {values[at]} at a position of an image, expected 0: images are "
            "not predicted"
        )
    # An image at the end predicts nothing; without it the sequence may be too short.
    keys = ChunkKeys.without_trailing_media(keys)
    _check_length(keys)
    return keys, values[: len(keys)]


def reduce_weights(
    weights: Sequence[npt.NDArray[np.float32]], reduction: Reduction
) -> list[npt.NDArray[np.float32]]:
    """Divides all weights by their sum for ``mean``; weights that are all 0 are unchanged."""
    if reduction not in ("none", "mean"):
        raise DataValidationError(
            f"Unknown reduction mode. reduction: got {reduction!r}, expected 'none' or 'mean'"
        )
    if reduction == "none" or not any(values.any() for values in weights):
        return list(weights)
    # float64, so that the sum over long examples is exact enough.
    total = sum(float(values.sum(dtype=np.float64)) for values in weights)
    if total <= 0:
        raise DataValidationError(
            f"weights: their sum is {total:g}, expected it to be positive under reduction='mean', "
            "which divides by it; use reduction='none' for signed weights"
        )
    return [values / np.float32(total) for values in weights]


def _checked(
    tokens: Tokens, weights: Weights, max_length: int | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    ids, values = np.asarray(tokens), np.asarray(weights, dtype=np.float32)
    if ids.ndim != 1 or ids.shape != values.shape:
        raise DataValidationError(
            f"weights: got shape {values.shape}, expected one weight for each of the tokens, whose "
            f"shape is {ids.shape}"
        )
    if max_length is not None:
        if max_length < 2:
            raise DataValidationError(
                f"max_length: got {max_length}, expected at least 2 (one token to read and one to "
                "predict), or None for no limit"
            )
        ids, values = ids[:max_length], values[:max_length]
    _check_length(ids)
    if ids.dtype.kind not in "iu":
        raise DataValidationError(f"tokens: got dtype {ids.dtype}, expected integers")
    if not np.isfinite(values).all():
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        raise DataValidationError(f"weights[{at}]: got {values[at]}, expected a finite number")
    return ids.astype(np.int64, copy=False), values


def _check_length(ids: npt.NDArray[Any]) -> None:
    if len(ids) < 2:
        raise DataValidationError(
            f"tokens: got {len(ids)}, expected at least 2: one to read and one to predict"
        )


def create_rightshifted_model_input_and_leftshifted_targets(
    chunks: Sequence[tinker.ModelInputChunk] | tinker.ModelInput,
) -> tuple[tinker.ModelInput, list[int]]:
    """Returns all T tokens but the last as input, and all but the first as targets, both [T - 1].

    Targets of images are 0; images that no text follows are dropped.
    """
    if not isinstance(chunks, tinker.ModelInput):
        chunks = tinker.ModelInput(chunks=list(chunks))
    known = ChunkKeys()
    keys = ChunkKeys.without_trailing_media(known.keys(chunks))
    if len(keys) < 2:
        raise DataValidationError(
            f"model_input: got {len(keys)} tokens, expected at least 2: one to read and one to "
            "predict"
        )
    return known.model_input(keys[:-1]), np.maximum(keys[1:], 0).tolist()


def loss_mask(datum: tinker.Datum) -> npt.NDArray[np.bool_]:
    """Returns which positions are trained on, bool [T]."""
    return datum.loss_fn_inputs["weights"].to_numpy() != 0


def count_loss_tokens(datum: tinker.Datum) -> int:
    """Counts the positions whose weight is not 0."""
    return int(np.count_nonzero(loss_mask(datum)))


def total_weight(datum: tinker.Datum) -> float:
    """Returns the sum of the weights: 1 for a whole example under ``reduction="mean"``."""
    return float(datum.loss_fn_inputs["weights"].to_numpy().sum(dtype=np.float64))


def compute_mean_nll(logprobs_list: Sequence[Any], weights_list: Sequence[Any]) -> float:
    """Returns the weighted mean negative log-likelihood in nats: ``-sum(w * lp) / sum(w)``.

    Both lists have one entry [T] for each datum: ``TensorData``, tensors, arrays or lists. Returns
    NaN where the weights sum to 0.
    """
    if len(logprobs_list) != len(weights_list):
        raise DataValidationError(
            f"weights_list: got {len(weights_list)} entries, expected {len(logprobs_list)}, one "
            "for each entry of logprobs_list"
        )
    total, weight = 0.0, 0.0
    for i, (logprobs, weights) in enumerate(zip(logprobs_list, weights_list, strict=True)):
        lp, w = _as_array(logprobs), _as_array(weights)
        if lp.shape != w.shape:
            raise DataValidationError(
                f"weights_list[{i}]: got shape {w.shape}, expected {lp.shape}, that of its logprobs"
            )
        # A position of weight 0 may have a log-probability of -inf, and 0 * inf is NaN.
        used = w != 0
        total -= float(lp[used] @ w[used])
        weight += float(w.sum())
    return total / weight if weight else math.nan


def compute_token_nll(logprobs_list: Sequence[Any], data: Sequence[tinker.Datum]) -> float:
    """Returns the mean negative log-likelihood in nats over trained tokens, each counted once."""
    return compute_mean_nll(logprobs_list, [loss_mask(datum) for datum in data])


def compute_bpb(
    logprobs_list: Sequence[Any],
    weights_list: Sequence[Any],
    target_tokens_list: Sequence[Any],
    tokenizer: Tokenizer,
) -> float:
    """Returns bits per byte of the trained text, ``sum(-lp) / (ln 2 * bytes)``; NaN without text.

    The value is comparable between tokenizers. Special tokens are not counted: they are no text,
    and their number depends on the chat format. Runs of tokens are decoded as a whole, to UTF-8.

    Args:
        logprobs_list: Log-probabilities [T] of the targets, an entry for each datum.
        weights_list: Weights [T]; targets with a weight above 0 are counted.
        target_tokens_list: Target ids [T].
        tokenizer: Tokenizer of the target ids.
    """
    special = _SpecialIds(tokenizer)
    nats, size = 0.0, 0
    for logprobs, weights, targets in zip(
        logprobs_list, weights_list, target_tokens_list, strict=True
    ):
        ids = _as_array(targets).astype(np.int64)
        counted = (_as_array(weights) > 0) & ~special.among(ids)
        nats -= float(_as_array(logprobs)[counted].sum())
        size += _counted_byte_count(ids, counted, tokenizer)
    return nats / math.log(2) / size if size else math.nan


def compute_data_bpb(
    logprobs_list: Sequence[Any], data: Sequence[tinker.Datum], tokenizer: Tokenizer
) -> float:
    """Returns ``compute_bpb`` with the weights and targets of datums."""
    inputs = [datum.loss_fn_inputs for datum in data]
    return compute_bpb(
        logprobs_list,
        [each["weights"] for each in inputs],
        [each["target_tokens"] for each in inputs],
        tokenizer,
    )


def _counted_byte_count(token_ids: Any, counted: Any, tokenizer: Tokenizer) -> int:
    """Returns the number of bytes of the counted tokens [T], each run decoded by itself."""
    ids, mask = np.asarray(token_ids), np.asarray(counted, dtype=bool)
    # Positions where a run of counted tokens starts or ends.
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    size = 0
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        text = tokenizer.decode(ids[start:end].tolist(), skip_special_tokens=False)
        size += len(("".join(text) if isinstance(text, list) else text).encode())
    return size


class _SpecialIds:
    """Special token ids of a tokenizer, from its list or its method."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._ids = np.array(sorted(getattr(tokenizer, "all_special_ids", None) or []), np.int64)
        self._is_special = getattr(tokenizer, "is_special_token", None)

    def among(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Returns which of ``ids`` [T] are special, bool [T]."""
        # Some tokenizers have a list of special ids, others only a method.
        found = np.isin(ids, self._ids)
        if callable(self._is_special):
            special = [token for token in np.unique(ids).tolist() if self._is_special(token)]
            found |= np.isin(ids, special)
        return found


def _as_array(values: Any) -> npt.NDArray[np.float64]:
    if hasattr(values, "to_numpy"):
        values = values.to_numpy()
    elif hasattr(values, "detach"):
        values = values.detach().float().cpu().numpy()
    return np.asarray(values, dtype=np.float64)
