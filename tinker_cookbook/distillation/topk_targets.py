"""The top K tokens of a teacher as targets: soft targets on given texts, reverse KL on samples.

**Soft targets** (off-policy distillation, SDFT).

A teacher is asked for the K most probable next tokens at every position of a text. Renormalised
over those K they are the targets ``q`` of a cross-entropy (Hinton, Vinyals and Dean 2015,
arXiv 1503.02531, cut to the top K)::

    loss = - sum over positions t, tokens k of  weight_t * q_tk * log p_tk

with ``p`` the student's probabilities over its whole vocabulary. Up to the entropy of ``q``, which
does not depend on the student, that is KL(q || p).

**Reverse KL** (on-policy distillation with ``n_teacher_targets``). The log-probability of the
sampled token alone gives a noisy estimate of ``KL(student || teacher)``. The top K give the KL
itself, with all other tokens as one more outcome (generalised knowledge distillation, Agarwal et
al. 2023, arXiv 2306.13649, on samples of the student)::

    loss = coef * sum over positions t, outcomes k of  p_tk * (log p_tk - log q_tk)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tinker_cookbook.distillation.teachers import Teacher, TeacherSignal
from tinker_cookbook.exceptions import (
    BackendError,
    ConfigurationError,
    DataError,
    DataValidationError,
    TinkerCookbookError,
)
from tinker_cookbook.utils.imports import lazy_module
from tinker_cookbook.utils.model_inputs import whole_sequence

if TYPE_CHECKING:
    import tinker
    import torch
    from tinker import types

    from tinker_cookbook.backends import Future, SamplingClient, TrainingClient
    from tinker_cookbook.rl.config import PolicyTrainingConfig
else:
    tinker = lazy_module("tinker")
    torch = lazy_module("torch")

__all__ = [
    "TopKReverseKL",
    "TopKSignal",
    "TopKTeacher",
    "SoftDatum",
    "TopK",
    "score_with_topk",
    "ask_teacher",
    "check_top_k",
    "distance_metrics",
    "soft_datum",
    "soft_targets",
]

_ABSENT = -1e4
"""Log-probabilities below this mark an entry that the backend had no token for."""

_ROUNDING = 1e-6
"""Of a sum of float32 probabilities: less than this beside the top K cannot be told from none."""

_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TopK:
    """The ``K`` most probable tokens at each of ``T`` positions.

    ``ids`` [T, K]; ``logprobs`` [T, K] in nats at temperature 1 over the whole vocabulary, ``-inf``
    for an entry without a token, whose id is 0.
    """

    ids: npt.NDArray[np.int64]
    logprobs: _Floats

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """The positions [T] that have at least one token."""
        return np.any(self.logprobs > -np.inf, axis=-1)

    def renormalised(self) -> _Floats:
        """Probabilities [T, K] that add up to 1 at each position."""
        relative = np.exp(self.logprobs - self.logprobs.max(axis=-1, keepdims=True))
        return relative / relative.sum(axis=-1, keepdims=True)

    def within(self, vocab_size: int | None) -> TopK:
        """Without tokens of ids that the student does not have."""
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
    """Raises ``ConfigurationError`` for a number of targets that a vocabulary cannot give."""
    if not 1 <= k <= vocab_size:
        raise ConfigurationError(
            f"{name}: got {k}, expected 1 to {vocab_size}, the size of the vocabulary; 20 is usual"
        )


async def ask_teacher(
    teacher: SamplingClient,
    sequence: tinker.ModelInput,
    k: int,
    *,
    first: int = 1,
    complete: bool = True,
) -> TopK:
    """Returns the teacher's top ``k`` for each token of ``sequence`` [T] from number ``first``
    (>= 1) on.

    Row i belongs to token ``first + i`` and is what the teacher expects there from the tokens
    before it; there are ``T - first`` rows. One token is drawn along with it, since the API scores
    prompts only in sampling; so the teacher's context must hold ``T + 1`` tokens.

    With ``complete=False`` the backend may send no distribution for some positions, or fewer rows
    than there are tokens; such a row of the result has no token (see :attr:`TopK.present`).

    Raises:
        DataError: The teacher refuses the text, because it is too long for it, say.
        BackendError: The backend sent no distributions.
    """
    topk, _ = await score_with_topk(teacher, sequence, k, first=first, complete=complete)
    return topk


async def score_with_topk(
    teacher: SamplingClient,
    sequence: tinker.ModelInput,
    k: int,
    *,
    first: int = 1,
    complete: bool = True,
) -> tuple[TopK, npt.NDArray[np.float64]]:
    """As :func:`ask_teacher`, with the teacher's log-probabilities [T - first] of the tokens."""
    try:
        response = await teacher.sample(
            prompt=sequence,
            num_samples=1,
            sampling_params=tinker.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=k,
        )
    except TinkerCookbookError as error:
        raise DataError(
            f"teacher: it cannot score an example of {sequence.length} tokens: {error}; with a "
            "lower max_length examples are cut"
        ) from error
    found = _distributions(response, k)
    if found is None or not _has_rows(len(found), sequence.length, complete):
        got = "none" if found is None else f"those of {len(found)} positions"
        raise BackendError(
            f"topk_prompt_logprobs: got {got}, expected the teacher's top {k} tokens at each of "
            f"{sequence.length} positions; this backend cannot serve as a teacher of soft targets"
        )
    rows = _padded(found, sequence.length - len(found))
    topk = TopK(rows.ids[first:], rows.logprobs[first:])
    if complete and not topk.present.all():
        raise BackendError(
            f"topk_prompt_logprobs: row {int(topk.present.argmin())} of {len(topk)} is empty, "
            "expected the teacher's most probable tokens there"
        )
    # A teacher that sends distributions alone has no log-probabilities of the tokens.
    logprobs = getattr(response, "prompt_logprobs", None) or []
    return topk, np.array(logprobs[first:], np.float64)


def _has_rows(count: int, length: int, complete: bool) -> bool:
    return count == length or (not complete and 0 < count < length)


def _distributions(response: Any, k: int) -> TopK | None:
    """Returns the top ``k`` [T, k] of a sampling response, which has them as arrays or as plain
    lists."""
    arrays = getattr(response, "topk_prompt_logprobs_np", None)
    if arrays is not None:
        topk = TopK(arrays.token_ids[:, :k].astype(np.int64), arrays.logprobs[:, :k])
        topk = _padded(topk, 0, k - topk.ids.shape[1])
    else:
        rows = response.topk_prompt_logprobs
        if rows is None:
            return None
        topk = _of_lists([row[:k] if row else [] for row in rows], k)
    absent = ~(topk.logprobs > _ABSENT)
    logprobs = np.where(absent, np.float32(-np.inf), topk.logprobs.astype(np.float32))
    return TopK(np.where(absent, 0, topk.ids), logprobs)


def _of_lists(rows: Sequence[Sequence[tuple[int, float]]], k: int) -> TopK:
    """Rows of at most ``k`` pairs of token and log-probability; an empty row has no token."""
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    # float64 holds every token id exactly.
    pairs = np.array(list(chain.from_iterable(rows)), np.float64).reshape(-1, 2)
    filled = np.arange(k) < counts[:, None]
    ids = np.zeros((len(rows), k), np.int64)
    logprobs = np.full((len(rows), k), -np.inf, np.float32)
    ids[filled], logprobs[filled] = pairs[:, 0], pairs[:, 1]
    return TopK(ids, logprobs)


def _padded(topk: TopK, rows: int, columns: int = 0) -> TopK:
    """With so many rows and columns without tokens behind its own."""
    widths = ((0, rows), (0, columns))
    return TopK(np.pad(topk.ids, widths), np.pad(topk.logprobs, widths, constant_values=-np.inf))


@dataclass(frozen=True)
class SoftDatum:
    """A datum with soft targets, and ``mass`` [T]: the probability that the teacher gives to all
    of a position's targets together, 0 where there are none. No loss needs it, but metrics do."""

    datum: tinker.Datum
    mass: _Floats


async def soft_targets(
    datum: tinker.Datum, teacher: SamplingClient, k: int, vocab_size: int | None = None
) -> SoftDatum:
    """Returns ``datum`` with the teacher's top ``k`` in place of its targets.

    ``target_tokens`` and ``weights`` become [T, K]: at a trained position the weight that the datum
    has there, times the teacher's renormalised probabilities; elsewhere 0.

    Raises:
        DataValidationError: The datum has no token to train on, or has soft targets already.
    """
    targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
    weights = datum.loss_fn_inputs["weights"].to_numpy()
    if targets.ndim != 1:
        raise DataValidationError(
            f"target_tokens: got shape {targets.shape}, expected one target a position, in whose "
            "place the teacher's come"
        )
    positions = np.flatnonzero(weights)
    if not positions.size:
        raise DataValidationError(
            f"weights: all {len(weights)} are 0, expected at least one trained token for the "
            "teacher to give targets for; leave this example out"
        )
    topk = await ask_teacher(teacher, whole_sequence(datum), k)
    topk = TopK(topk.ids[positions], topk.logprobs[positions]).within(vocab_size)
    return soft_datum(datum.model_input, positions, topk, weights[positions])


def soft_datum(
    model_input: tinker.ModelInput,
    positions: npt.NDArray[np.int64],
    topk: TopK,
    weights: npt.NDArray[Any] | None = None,
) -> SoftDatum:
    """Returns a datum whose ``positions`` [N] have the N rows of ``topk`` as targets, others none.

    ``weights`` [N] multiply the rows' probabilities; by default each row counts 1.
    """
    shape = (model_input.length, topk.ids.shape[1])
    ids, soft = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    mass = np.zeros(len(ids), np.float32)
    probabilities = topk.renormalised()
    ids[positions] = topk.ids
    soft[positions] = probabilities if weights is None else probabilities * weights[:, None]
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
    """Returns how far the student is from the teacher, as means over trained positions, in nats.

    Args:
        data: What was trained on.
        logprobs_D: The student's log-probabilities [T, K] of each datum's targets.
        prefix: What the names begin with.

    ``PREFIX/cross_entropy``
        What is trained: ``-sum_k q_k log p_k``. Its floor is ``PREFIX/entropy``. Falls.
    ``PREFIX/forward_kl``
        KL(teacher || student), with all tokens outside of the top K as one more outcome; so it is
        0 where the two agree on the top K, and never above the KL over the whole vocabulary. At
        step 0 as far as the student is from the teacher: 0 if they are the same model, 0.1 to 1 for
        models of a family. Falls towards 0.
    ``PREFIX/topk_mass``
        Probability that the teacher gives to its top K together. Does not depend on the student.
        Below some 0.9 the targets are a cut of what the teacher thinks: raise K.
    ``PREFIX/entropy``
        Of the targets ``q``: 0 where the teacher is certain (then they are hard targets), at most
        ``log K``. Does not depend on the student.

    Nothing is returned where no position is trained.
    """
    rows = [_trained(soft, logprobs) for soft, logprobs in zip(data, logprobs_D, strict=True)]
    if not any(len(q) for q, _, _ in rows):
        return {}
    q, mass, student = (np.concatenate(part) for part in zip(*rows, strict=True))
    log_q = np.log(q, out=np.zeros_like(q), where=q > 0)
    student = np.where(q > 0, student, 0.0)  # an entry without a token has the id of another
    cross_entropy, entropy = -(q * student).sum(axis=-1), -(q * log_q).sum(axis=-1)
    # KL over K + 1 outcomes: the top K, and the remaining probability of both models.
    rest = np.maximum(1 - mass, _ROUNDING)
    students_mass = np.where(q > 0, np.exp(student), 0.0).sum(axis=-1)
    students_rest = np.maximum(1 - students_mass, _ROUNDING)
    forward_kl = mass * (np.log(mass) + cross_entropy - entropy)
    forward_kl += rest * np.log(rest / students_rest)
    return {
        f"{prefix}/cross_entropy": float(cross_entropy.mean()),
        f"{prefix}/forward_kl": float(forward_kl.mean()),
        f"{prefix}/topk_mass": float(mass.mean()),
        f"{prefix}/entropy": float(entropy.mean()),
    }


def _trained(soft: SoftDatum, logprobs: Any) -> tuple[npt.NDArray[np.float64], ...]:
    """At trained positions: ``q`` [N, K], mass [N], the student's log-probabilities [N, K]."""
    weights = _float64(soft.datum.loss_fn_inputs["weights"])
    at = weights.any(axis=-1)
    q = weights[at] / weights[at].sum(axis=-1, keepdims=True)
    return q, _float64(soft.mass)[at], _float64(logprobs)[at]


def _float64(values: Any) -> npt.NDArray[np.float64]:
    return np.asarray(values.to_numpy() if hasattr(values, "to_numpy") else values, np.float64)


_IDS, _PROBABILITIES = "teacher_ids", "teacher_probabilities"

_LEAST = 1e-6
"""Of float32 probabilities that add up to 1: less than this cannot be told from none."""


@dataclass(frozen=True)
class TopKTeacher(Teacher):
    """Leaves on each datum what it would have said: its ``k`` most probable tokens of each place.

    ``vocab_size`` is the student's: a teacher may know more tokens.
    """

    k: int = 20
    vocab_size: int | None = None

    async def _logprobs(self, data_D: Sequence[tinker.Datum]) -> list[npt.NDArray[np.float64]]:
        return list(await asyncio.gather(*map(self._judge, data_D)))

    async def _judge(self, datum: tinker.Datum) -> npt.NDArray[np.float64]:
        topk, logprobs = await score_with_topk(self.client, whole_sequence(datum), self.k)
        trained = datum.loss_fn_inputs["mask"].to_numpy() != 0
        rows = TopK(topk.ids[trained], topk.logprobs[trained]).within(self.vocab_size)
        ids = np.zeros((len(trained), self.k), np.int64)
        q = np.zeros((len(trained), self.k), np.float32)
        ids[trained], q[trained] = rows.ids, np.exp(rows.logprobs)
        datum.loss_fn_inputs[_IDS] = tinker.TensorData.from_numpy(ids)
        datum.loss_fn_inputs[_PROBABILITIES] = tinker.TensorData.from_numpy(q)
        return logprobs


class TopKSignal(TeacherSignal):
    """Trains on what :class:`TopKTeacher` left; the advantages only say whether there is any.

    The metrics are those of the sampled tokens, as with any other teacher.
    """

    def submit(
        self, client: TrainingClient, data_D: Sequence[tinker.Datum], config: PolicyTrainingConfig
    ) -> Future[types.ForwardBackwardOutput]:
        """One pass under autograd."""
        data = [_with_targets(datum) for datum in data_D]
        return client.forward_backward_custom(data, TopKReverseKL(self._coef))

    def trained_logprobs(self, output: types.ForwardBackwardOutput) -> list[Any]:
        """Of the sampled tokens, which stand behind the teacher's."""
        return [values.to_numpy()[:, -1] for values in super().trained_logprobs(output)]


def _with_targets(datum: tinker.Datum) -> tinker.Datum:
    """Returns ``target_tokens`` [T, K + 1]: the teacher's, and the sampled one, which has no
    weight."""
    inputs = datum.loss_fn_inputs
    sampled = inputs["target_tokens"].to_numpy()[:, None]
    ids, q = inputs[_IDS].to_numpy(), inputs[_PROBABILITIES].to_numpy()
    fields = {
        "target_tokens": np.concatenate([ids, sampled], axis=1),
        "weights": np.concatenate([q, np.zeros_like(q[:, :1])], axis=1),
    }
    arrays = {name: tinker.TensorData.from_numpy(array) for name, array in fields.items()}
    return replace(datum, loss_fn_inputs=arrays)


class TopKReverseKL:
    """The loss above, for ``forward_backward_custom``; ``weights`` [T, K] are ``q``, 0 for none."""

    group_size = 1
    trained_only = True

    def __init__(self, coef: float = 1.0) -> None:
        self._coef = coef

    def __call__(
        self, data: list[tinker.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Returns the loss of these datums, summed over their positions."""
        total = logprobs[0].new_zeros(())
        for datum, log_p in zip(data, logprobs, strict=True):
            q = datum.loss_fn_inputs["weights"].to_torch().to(log_p.device)
            at = (q > 0).any(-1)
            total = total + _reverse_kl(log_p[at], q[at])
        return self._coef * total, {}


def _reverse_kl(log_p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Over the tokens that ``q`` [N, K] gives a probability, and one outcome for all others."""
    present = q > 0
    log_p = log_p.masked_fill(~present, 0.0)
    p = log_p.exp() * present
    inside = (p * (log_p - torch.where(present, q, 1.0).log())).sum()
    # All tokens outside the top K count as one more outcome.
    p_rest = (1 - p.sum(-1)).clamp_min(_LEAST)
    q_rest = (1 - q.sum(-1)).clamp_min(_LEAST)
    return inside + (p_rest * (p_rest / q_rest).log()).sum()
