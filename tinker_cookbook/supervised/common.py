"""Datums from tokens and weights, and losses from log-probabilities.

A datum's *weights* multiply the log-probability of each token in the loss; ``reduction="mean"``
scales them. Its *loss mask* marks the trained tokens. Reported losses count every trained token
once, by the mask, so that they are comparable between training and test data for any reduction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.utils.imports import tinker, torch

if TYPE_CHECKING:
    Tokens: TypeAlias = torch.Tensor | npt.NDArray[Any] | Sequence[int]
    Weights: TypeAlias = torch.Tensor | npt.NDArray[Any] | Sequence[float]

Reduction = Literal["none", "mean"]
"""``none``: each trained token has weight 1. ``mean``: the weights of each example sum to 1."""


def datum_from_model_input_weights(
    model_input: tinker.ModelInput,
    weights: Weights,
    max_length: int | None = None,
    reduction: Reduction = "none",
) -> tinker.Datum:
    """Returns a datum that trains token i with weight i; ``model_input`` and ``weights`` are [T].

    Position i predicts token i + 1, so inputs, ``target_tokens`` and ``weights`` of the datum are
    [T - 1], and the first weight is unused. An image has targets and weights 0. ``max_length``
    truncates the T tokens; a truncated image, or an image without text after it, is dropped. Raises
    DataValidationError for different lengths, weights that are not finite, and fewer than 2 tokens.
    """
    return data_from_examples([(model_input, weights)], max_length, reduction)[0]


def check_images_fit(model_input: tinker.ModelInput, max_length: int | None) -> None:
    """Raises DataValidationError if a truncation to ``max_length`` would cut an image."""
    if max_length is None or model_input.length <= max_length:
        return
    start = 0
    for chunk in model_input.chunks:
        end = start + chunk.length
        # An image at the very end would be context of nothing.
        if getattr(chunk, "tokens", None) is None and start < max_length <= end:
            raise DataValidationError(
                f"max_length: got {max_length}, which would cut an image of {chunk.length} tokens, "
                f"{start} to {end} of {model_input.length}; expected more than {end}, or smaller "
                "images (max_image_size=PIXELS is an option of some renderer names)"
            )
        start = end


def datum_from_tokens_weights(
    tokens: Tokens,
    weights: Weights,
    max_length: int | None = None,
    reduction: Reduction = "none",
) -> tinker.Datum:
    """Returns the datum of ``datum_from_model_input_weights`` for token ids [T] and weights [T]."""
    model_input = tinker.ModelInput.from_ints(np.asarray(tokens).tolist())
    return datum_from_model_input_weights(model_input, weights, max_length, reduction)


def data_from_examples(
    examples: Sequence[tuple[tinker.ModelInput, Weights]],
    max_length: int | None = None,
    reduction: Reduction = "none",
) -> list[tinker.Datum]:
    """Returns the datums of one split conversation; a mean uses the weights of all of them."""
    shifted_N = [_shifted(model_input, max_length) for model_input, _ in examples]
    values_N: list[npt.NDArray[np.float32]] = []
    for (model_input, weights), (_, targets) in zip(examples, shifted_N, strict=True):
        values, expected = np.asarray(weights, dtype=np.float32), (model_input.length,)
        if values.shape != expected:
            raise DataValidationError(
                f"weights: got shape {values.shape}, expected one weight per token, with "
                f"shape {expected}"
            )
        # Position i predicts token i + 1, so the weights start at the second token.
        values = values[1 : len(targets) + 1]
        for wrong, why in (
            (~np.isfinite(values), "expected a finite number"),
            ((targets < 0) & (values != 0), "expected 0: images are not predicted"),
        ):
            if wrong.any():
                at = int(wrong.argmax())
                raise DataValidationError(f"weights[{at + 1}]: got {values[at]}, {why}")
        values_N.append(values)
    return [
        tinker.Datum(
            model_input=inputs,
            loss_fn_inputs={
                "target_tokens": tinker.TensorData.from_numpy(np.maximum(targets, 0)),
                # A copy, so that the datum does not share memory with the longer array.
                "weights": tinker.TensorData.from_numpy(values.copy()),
            },
        )
        for (inputs, targets), values in zip(shifted_N, _reduce(values_N, reduction), strict=True)
    ]


def _shifted(
    model_input: tinker.ModelInput, max_length: int | None = None
) -> tuple[tinker.ModelInput, npt.NDArray[np.int64]]:
    """Returns all T tokens but the last as input, and all but the first as targets [T - 1], -1 at
    the positions of images; at most ``max_length`` of the T tokens."""
    if max_length is not None and max_length < 2:
        raise DataValidationError(
            f"max_length: got {max_length}, expected at least 2 (one token to read and one to "
            "predict), or None for no limit"
        )
    # An image has no token ids.
    parts = [
        np.asarray(getattr(c, "tokens", [-1] * c.length), np.int64) for c in model_input.chunks
    ]
    ids = np.concatenate([np.empty(0, np.int64), *parts])[:max_length]
    # An image at the end, maybe a truncated one, predicts nothing.
    length = int((np.flatnonzero(ids >= 0) + 1).max(initial=0))
    if length < 2:
        raise DataValidationError(
            f"tokens: got {length}, expected at least 2: one to read and one to predict"
        )
    chunks: list[Any] = []
    left = length - 1
    for chunk in cast("list[Any]", model_input.chunks):
        if left < chunk.length:  # a chunk of text, since text follows every image
            # model_construct skips the validation of each token.
            text = tinker.EncodedTextChunk.model_construct(tokens=chunk.tokens[:left])
            chunks += [text] if left else []
            break
        chunks.append(chunk)
        left -= chunk.length
    return tinker.ModelInput(chunks=chunks), ids[1:length]


def _reduce(
    weights: Sequence[npt.NDArray[np.float32]], reduction: Reduction
) -> list[npt.NDArray[np.float32]]:
    """Divides all weights by their sum for ``mean``; weights that are all 0 are unchanged."""
    if reduction not in ("none", "mean"):
        raise DataValidationError(
            f"Unknown reduction mode. reduction: got {reduction!r}, expected 'none' or 'mean'"
        )
    # Weights that are all 0 have no mean; datasets drop such a datum.
    if reduction == "none" or not any(values.any() for values in weights):
        return list(weights)
    # float64, so that the sum over long examples is exact enough.
    total = sum(float(values.sum(dtype=np.float64)) for values in weights)
    if total <= 0:
        raise DataValidationError(
            f"weights: their sum is {total:g}, expected it to be positive under reduction='mean', "
            "which divides by it; use reduction='none' for signed weights"
        )
    # One sum for all datums of a conversation, so that splitting does not change its weight.
    return [values / np.float32(total) for values in weights]


def create_rightshifted_model_input_and_leftshifted_targets(
    chunks: Sequence[tinker.ModelInputChunk] | tinker.ModelInput,
) -> tuple[tinker.ModelInput, list[int]]:
    """Returns all T tokens but the last as input, and all but the first as targets, both [T - 1].

    Targets of images are 0; images without text after them are dropped.
    """
    if not isinstance(chunks, tinker.ModelInput):
        chunks = tinker.ModelInput(chunks=list(chunks))
    inputs, targets = _shifted(chunks)
    return inputs, np.maximum(targets, 0).tolist()


def count_loss_tokens(datum: tinker.Datum) -> int:
    """Counts positions with non-zero weight."""
    return int(np.count_nonzero(datum.loss_fn_inputs["weights"].to_numpy()))


def compute_mean_nll(logprobs_list: Sequence[Any], weights_list: Sequence[Any]) -> float:
    """Returns the weighted mean loss in nats, ``-sum(w * lp) / sum(w)``; NaN for a sum of 0.

    Both lists have one entry [T] for each datum: ``TensorData``, tensors, arrays or lists.
    """
    total, weight = 0.0, 0.0
    for logprobs, weights in zip(logprobs_list, weights_list, strict=True):
        lp, w = _as_array(logprobs), _as_array(weights)
        # A position with weight 0 may have log-probability -inf, and 0 * inf is NaN.
        used = w != 0
        total -= float(lp[used] @ w[used])
        weight += float(w.sum())
    return total / weight if weight else math.nan


def compute_token_nll(logprobs_list: Sequence[Any], data: Sequence[tinker.Datum]) -> float:
    """Returns the mean negative log-likelihood in nats over trained tokens, each counted once."""
    masks = [datum.loss_fn_inputs["weights"].to_numpy() != 0 for datum in data]
    return compute_mean_nll(logprobs_list, masks)


def compute_bpb(
    logprobs_list: Sequence[Any],
    weights_list: Sequence[Any],
    target_tokens_list: Sequence[Any],
    tokenizer: Tokenizer,
) -> float:
    """Returns bits per byte of the trained text, ``sum(-lp) / (ln 2 * bytes)``; NaN without text.

    The lists have one entry [T] for each datum; targets with a weight above 0 are counted. The
    value is comparable between tokenizers: special tokens are not text and are not counted.
    """
    # Some tokenizers have a list of special ids, others only a method.
    special_ids = np.array(sorted(getattr(tokenizer, "all_special_ids", None) or []), np.int64)
    is_special = getattr(tokenizer, "is_special_token", None)
    nats, size = 0.0, 0
    for logprobs, weights, targets in zip(
        logprobs_list, weights_list, target_tokens_list, strict=True
    ):
        ids = _as_array(targets).astype(np.int64)
        special = np.isin(ids, special_ids)
        # The method accepts one id, so call it once per distinct id.
        if callable(is_special):
            special |= np.isin(ids, [id_ for id_ in np.unique(ids).tolist() if is_special(id_)])
        # Special tokens have no bytes, so their loss must not count either.
        counted = (_as_array(weights) > 0) & ~special
        nats -= float(_as_array(logprobs)[counted].sum())
        # Decode each run of counted tokens as a whole, because a character may have several tokens.
        edges = np.flatnonzero(np.diff(np.concatenate(([0], counted, [0]))))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            text = tokenizer.decode(ids[start:end].tolist(), skip_special_tokens=False)
            size += len(("".join(text) if isinstance(text, list) else text).encode())
    return nats / math.log(2) / size if size else math.nan


def compute_data_bpb(
    logprobs_list: Sequence[Any], data: Sequence[tinker.Datum], tokenizer: Tokenizer
) -> float:
    """Returns ``compute_bpb`` with the weights and targets of datums."""
    weights = [datum.loss_fn_inputs["weights"] for datum in data]
    targets = [datum.loss_fn_inputs["target_tokens"] for datum in data]
    return compute_bpb(logprobs_list, weights, targets, tokenizer)


def _as_array(values: Any) -> npt.NDArray[np.float64]:
    if hasattr(values, "to_numpy"):
        values = values.to_numpy()
    elif hasattr(values, "detach"):
        # numpy has no bfloat16, so the tensor is converted to float32 first.
        values = values.detach().float().cpu().numpy()
    return np.asarray(values, dtype=np.float64)
