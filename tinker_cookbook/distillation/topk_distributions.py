"""Top-K distributions of a teacher: requests, conversion to targets, and metrics.

A teacher returns its K most probable next tokens at every position of a text. Renormalised to
sum to 1, they are the targets ``q`` of a cross-entropy (Hinton, Vinyals and Dean 2015,
arXiv 1503.02531, truncated to the top K)::

    loss = - sum over positions t, tokens k of  weight_t * q_tk * log p_tk

with ``p`` the student's probabilities over its whole vocabulary. Up to the entropy of ``q``, which
does not depend on the student, this is KL(q || p). Off-policy distillation and SDFT train on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.exceptions import (
    BackendError,
    ConfigurationError,
    DataError,
    DataValidationError,
    TinkerCookbookError,
)
from tinker_cookbook.utils.imports import tinker
from tinker_cookbook.utils.model_inputs import whole_sequence

PROBABILITY_ROUNDING = 1e-6
"""Float32 probabilities sum to 1 up to this rounding error."""

_NUMBER = "number"


@dataclass(frozen=True)
class TopK:
    """The K most probable tokens at each of T positions.

    ``ids`` [T, K]; ``logprobs`` [T, K] in nats at temperature 1 over the whole vocabulary, ``-inf``
    for an entry without a token, which has id 0.
    """

    ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, positions: Any) -> TopK:
        """Returns the rows at ``positions``: a slice, a mask or indices."""
        return TopK(self.ids[positions], self.logprobs[positions])

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """Mask [T] of positions with at least one token."""
        return np.any(self.logprobs > -np.inf, axis=-1)

    def renormalised(self) -> npt.NDArray[np.float32]:
        """Returns probabilities [T, K] that sum to 1 at each position."""
        # Subtract the maximum first, so that small probabilities do not underflow.
        relative = np.exp(self.logprobs - self.logprobs.max(axis=-1, keepdims=True))
        return relative / relative.sum(axis=-1, keepdims=True)

    def within(self, vocab_size: int | None) -> TopK:
        """Removes token ids that the student does not have."""
        if vocab_size is None or not (outside := self.ids >= vocab_size).any():
            return self
        kept = TopK(
            np.where(outside, 0, self.ids), np.where(outside, np.float32(-np.inf), self.logprobs)
        )
        if not kept.present.all():
            raise DataValidationError(
                f"teacher: all of its top {self.ids.shape[1]} tokens at a position have ids of "
                f"{vocab_size} and above, which the student lacks; choose a teacher with the same "
                "tokenizer"
            )
        return kept


def check_top_k(name: str, k: int, vocab_size: int) -> None:
    """Raises ``ConfigurationError`` for a number of targets outside 1 to the vocabulary size."""
    if not 1 <= k <= vocab_size:
        raise ConfigurationError(
            f"{name}: got {k}, expected 1 to {vocab_size}, the size of the vocabulary; 20 is usual"
        )


async def score_with_topk(
    teacher: SamplingClient,
    sequence: tinker.ModelInput,
    k: int,
    *,
    first: int = 1,
    complete: bool = True,
) -> tuple[TopK, npt.NDArray[np.float64]]:
    """Returns the teacher's top ``k`` for the tokens of ``sequence`` [T] from index ``first`` on.

    Row i of ``T - first`` is the teacher's prediction of token ``first + i`` from the tokens before
    it. With it come the log-probabilities [T - first] of the sequence's tokens, or None if the
    teacher returns only distributions. With ``complete=False``, the backend may omit
    distributions or the last rows; such a row has no token (:attr:`TopK.present`).

    Raises:
        DataError: The teacher rejects the text, for example because it is too long.
        BackendError: The backend returned no distributions.
    """
    try:
        # The API scores prompts only while sampling, so the context needs one more token.
        response = await teacher.sample(
            prompt=sequence,
            num_samples=1,
            sampling_params=tinker.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=k,
        )
    except TinkerCookbookError as error:
        raise DataError(
            f"teacher: cannot score an example of {sequence.length} tokens: {error}; a "
            "lower max_length truncates examples"
        ) from error
    topk = _read_topk(response, sequence.length, k, complete)[first:]
    if complete and not topk.present.all():
        raise BackendError(
            f"topk_prompt_logprobs: row {int(topk.present.argmin())} of {len(topk)} is empty, "
            "expected the teacher's most probable tokens there"
        )
    logprobs = getattr(response, "prompt_logprobs", None) or []
    return topk, np.array(logprobs[first:], np.float64)


def _read_topk(response: Any, length: int, k: int, complete: bool) -> TopK:
    """Returns the top ``k`` of a response, padded to ``length`` rows."""
    arrays = getattr(response, "topk_prompt_logprobs_np", None)
    # Responses of user code may have the lists only.
    if not isinstance(getattr(arrays, "token_ids", None), np.ndarray):
        arrays = None
    rows = response.topk_prompt_logprobs if arrays is None else arrays.token_ids
    count = 0 if rows is None else len(rows)
    # Callers that can skip positions accept a partial response, but never an empty one.
    if count != length and (complete or not 0 < count < length):
        got = "none" if rows is None else f"those of {count} positions"
        raise BackendError(
            f"topk_prompt_logprobs: got {got}, expected the teacher's top {k} tokens at each of "
            f"{length} positions; this backend cannot serve as a teacher of soft targets"
        )
    ids, logprobs = np.zeros((length, k), np.int64), np.full((length, k), -np.inf, np.float32)
    if arrays is not None:
        # A backend may return fewer or more than K tokens.
        width = min(k, arrays.token_ids.shape[1])
        ids[:count, :width] = arrays.token_ids[:, :k]
        logprobs[:count, :width] = arrays.logprobs[:, :k]
    else:
        # Lists of pairs. A position without a distribution is None; a row may be short.
        lists = [row[:k] if row else [] for row in rows or ()]
        filled = np.arange(k) < np.fromiter(map(len, lists), np.int64)[:, None]
        # float64 represents every token id exactly.
        pairs = np.array(list(chain.from_iterable(lists)), np.float64).reshape(-1, 2)
        ids[:count][filled], logprobs[:count][filled] = pairs[:, 0], pairs[:, 1]
    # Backends mark an entry without a token by an extremely low log-probability.
    absent = ~(logprobs > -1e4)
    return TopK(np.where(absent, 0, ids), np.where(absent, np.float32(-np.inf), logprobs))


@dataclass(frozen=True)
class SoftDatum:
    """A datum with soft targets, and ``mass`` [T]: the teacher's total probability of the
    targets at each position, 0 without targets. It is only for metrics."""

    datum: tinker.Datum
    mass: npt.NDArray[np.float32]


async def soft_targets(
    datum: tinker.Datum, teacher: SamplingClient, k: int, vocab_size: int | None = None
) -> SoftDatum:
    """Returns ``datum`` with the teacher's top ``k`` as targets.

    ``target_tokens`` and ``weights`` become [T, K]: at a trained position, the datum's
    weight times the teacher's renormalised probabilities; elsewhere 0.
    """
    weights = datum.loss_fn_inputs["weights"].to_numpy()
    # Positions with weight 0 are not trained, so they keep empty rows.
    positions = np.flatnonzero(weights)
    topk, _ = await score_with_topk(teacher, whole_sequence(datum), k)
    topk = topk[positions].within(vocab_size)
    return soft_datum(datum.model_input, positions, topk, weights[positions])


def soft_datum(
    model_input: tinker.ModelInput,
    positions: npt.NDArray[np.int64],
    topk: TopK,
    weights: npt.NDArray[Any] | None = None,
) -> SoftDatum:
    """Returns a datum with the N rows of ``topk`` as targets at ``positions`` [N].

    ``weights`` [N] multiply the rows' probabilities; default: 1.
    """
    # Positions without targets stay 0: their weight of 0 excludes them from the loss.
    shape = (model_input.length, topk.ids.shape[1])
    ids, soft = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    mass = np.zeros(len(ids), np.float32)
    probabilities = topk.renormalised()
    ids[positions] = topk.ids
    soft[positions] = probabilities if weights is None else probabilities * weights[:, None]
    # Computed before renormalisation, because metrics need the probability outside the top K.
    mass[positions] = np.exp(topk.logprobs).sum(axis=-1)
    datum = tinker.Datum(
        model_input=model_input,
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(ids),
            "weights": tinker.TensorData.from_numpy(soft),
        },
    )
    return SoftDatum(datum, mass)


def distance_metrics(
    data: Sequence[SoftDatum], logprobs_D: Sequence[Any], prefix: str = "teacher"
) -> dict[str, float]:
    """Returns distances from student to teacher in nats, as means over trained positions.

    ``logprobs_D`` holds the student's log-probabilities [T, K] of each datum's targets. The result
    is empty if no position is trained.

    ``PREFIX/cross_entropy``
        The loss: ``-sum_k q_k log p_k``. Falls towards ``PREFIX/entropy``.
    ``PREFIX/forward_kl``
        KL(teacher || student), with all tokens outside of the top K as one more outcome; never
        above the KL over the whole vocabulary. Falls towards 0. At step 0 it is 0 for the same
        model, 0.1 to 1 for models of a family.
    ``PREFIX/topk_mass``
        Probability of the teacher's top K together. Below about 0.9 raise K.
    ``PREFIX/entropy``
        Entropy of the targets ``q``: 0 if the teacher is certain, at most ``log K``.
    """
    # In float64, because differences of nearly equal logarithms are small.
    parts: list[tuple[npt.NDArray[np.float64], ...]] = []
    for soft, logprobs in zip(data, logprobs_D, strict=True):
        weights = soft.datum.loss_fn_inputs["weights"].to_numpy().astype(np.float64)
        at = weights.any(axis=-1)
        # soft_targets multiplied q by the weight of the position, so divide by it.
        q = weights[at] / weights[at].sum(axis=-1, keepdims=True)
        array = logprobs.to_numpy() if hasattr(logprobs, "to_numpy") else logprobs
        parts.append((q, soft.mass[at].astype(np.float64), np.asarray(array, np.float64)[at]))
    if not any(len(q) for q, _, _ in parts):
        return {}
    q, mass, student = (np.concatenate(part) for part in zip(*parts, strict=True))
    # 0 log 0 is 0.
    log_q = np.log(q, out=np.zeros_like(q), where=q > 0)
    student = np.where(q > 0, student, 0.0)  # an entry without a token has another token's id
    cross_entropy, entropy = -(q * student).sum(axis=-1), -(q * log_q).sum(axis=-1)
    # KL over K + 1 outcomes: the top K, and the remaining probability of both models.
    rest = np.maximum(1 - mass, PROBABILITY_ROUNDING)
    student_mass = np.where(q > 0, np.exp(student), 0.0).sum(axis=-1)
    student_rest = np.maximum(1 - student_mass, PROBABILITY_ROUNDING)
    # sum_k mass q_k (log(mass q_k) - log p_k) = mass (log mass + cross-entropy - entropy).
    forward_kl = mass * (np.log(mass) + cross_entropy - entropy)
    forward_kl += rest * np.log(rest / student_rest)
    return {
        f"{prefix}/cross_entropy": float(cross_entropy.mean()),
        f"{prefix}/forward_kl": float(forward_kl.mean()),
        f"{prefix}/topk_mass": float(mass.mean()),
        f"{prefix}/entropy": float(entropy.mean()),
    }


def numbered(datum: tinker.Datum, number: int) -> tinker.Datum:
    """Attaches the number of the dataset or row to a datum. The number selects the teacher or
    demonstration and is removed before the loss.
    """
    field = tinker.TensorData.from_numpy(np.array([number], dtype=np.int64))
    return tinker.Datum(
        model_input=datum.model_input, loss_fn_inputs={**datum.loss_fn_inputs, _NUMBER: field}
    )


def number_of(datum: tinker.Datum) -> int:
    """Returns the number attached by :func:`numbered`."""
    if _NUMBER not in datum.loss_fn_inputs:
        raise DataValidationError(
            "datum: got one without a number, expected a dataset with numbered examples, "
            "since the number selects the teacher or demonstration"
        )
    return int(datum.loss_fn_inputs[_NUMBER].to_numpy()[0])


def without_number(datum: tinker.Datum) -> tinker.Datum:
    """Returns the datum without its number."""
    fields = {name: value for name, value in datum.loss_fn_inputs.items() if name != _NUMBER}
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs=fields)
