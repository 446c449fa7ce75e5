"""Samples the next token of each running sequence, with its own sampling parameters.

A token is found by inverting the cumulative distribution at one uniform number per row, so the rest
of the batch has no influence. The sum over a vocabulary must be precise; with the sums
of blocks computed first, only one block of a row is summed token by token in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

from tinker_cookbook.engine.kernels.cpu.build import library
from tinker_cookbook.engine.kernels.cpu.elementwise import exponentials
from tinker_cookbook.engine.sampling.adjust_logits import adjusted_logits
from tinker_cookbook.engine.sampling.requests import SampledSequence
from tinker_cookbook.engine.sampling.sampler import segments_of
from tinker_cookbook.exceptions import ConfigurationError

_BLOCK = 256
_LEAST, _LEAST_EXP = -87.0, 1.65e-38
"""Below this, the exponential is subnormal in fp32; tokens with such weights are never sampled."""
_COLDEST = 1e-30
"""Below this temperature a quotient may overflow; sampling is greedy there anyway."""


@dataclass(frozen=True)
class BatchSamplingParams:
    """Sampling parameters of each row, arrays [R].

    ``temperature`` 0 is greedy; ``top_k`` is the number of most probable
    tokens that may be sampled, -1 for all (all ties at the cutoff are included); ``top_p`` in (0,
    1] excludes tokens once more probable ones have this mass; ``uniform`` float64 in [0, 1)
    selects the token; ``min_p`` excludes tokens below this share of the highest probability.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    uniform: np.ndarray
    min_p: np.ndarray | None = None

    def of_rows(self, rows: np.ndarray) -> BatchSamplingParams:
        """Returns the parameters of some rows."""
        temperature, top_k, top_p = self.temperature[rows], self.top_k[rows], self.top_p[rows]
        min_p = None if self.min_p is None else self.min_p[rows]
        return BatchSamplingParams(temperature, top_k, top_p, self.uniform[rows], min_p)


@dataclass(frozen=True)
class Exponentials:
    """``e^(z - max)`` of logits ``z`` [R, V] in blocks, shared by the normalizer and sampling.

    ``weights`` fp32 [R, blocks, 256], padded with zeros; ``sums`` float64 [R, blocks]; ``moments``
    float64 [R]: the sums of ``e^(z - max) * (z - max)``, which only the entropy needs.
    """

    top: torch.Tensor
    weights: torch.Tensor
    sums: torch.Tensor
    moments: torch.Tensor | None = None

    @classmethod
    def of(cls, logits: torch.Tensor, moments: bool = False) -> Exponentials:
        """Computes the exponentials of fp32 ``logits`` [R, V], and their ``moments`` if asked."""
        if logits.device.type == "cpu" and library() is not None:
            return cls(*exponentials(logits, _BLOCK, moments))
        top = logits.amax(-1, keepdim=True)
        weights = logits.sub(top)
        # A masked logit is -inf, whose product with 0 would be NaN.
        least = weights.clamp(min=_LEAST) if moments else None
        # For masked tokens, or at a low temperature. CPUs need up to 500 times as long for
        # subnormal exponentials in fp32.
        if weights.device.type == "cpu" and weights.amin() < _LEAST:
            weights = torch.threshold_(weights.clamp_(min=_LEAST).exp_(), _LEAST_EXP, 0.0)
        else:
            weights.exp_()
        products = None if least is None else least.mul_(weights).sum(-1, dtype=torch.float64)
        rest = -weights.shape[-1] % _BLOCK
        weights = F.pad(weights, (0, rest)) if rest else weights  # padding by 0 would copy
        weights = weights.view(len(weights), -1, _BLOCK)
        return cls(top, weights, weights.sum(-1).double(), products)

    def of_rows(self, rows: torch.Tensor) -> Exponentials:
        """Returns those of some rows, which may repeat."""
        moments = None if self.moments is None else self.moments[rows]
        return Exponentials(self.top[rows], self.weights[rows], self.sums[rows], moments)

    def entropies(self) -> list[float] | None:
        """Returns the entropy of each row's softmax in nats; ``None`` without ``moments``."""
        if self.moments is None:
            return None
        # -sum(p log p) with p = e^(z - max) / total.
        total = self.sums.sum(-1)
        return (total.log() - self.moments / total).tolist()


def sample_sequences(
    hidden: torch.Tensor, outputs: Sequence[tuple[int, SampledSequence]]
) -> list[SampledSequence]:
    """Samples a token for each (index, row) of ``outputs``; returns the rows that end with it.

    A row uses ``hidden[index]``, which samples of one prompt share. A row whose
    log-probabilities are not finite, or whose token cannot be appended, fails alone: its request
    gets the error.
    """
    if not outputs:  # a step with prefill only
        return []
    indices, rows = zip(*outputs, strict=True)
    # fp32 logits, once for each hidden state, with the owners' adapters.
    once, first, which = np.unique(indices, return_index=True, return_inverse=True)
    owners = [rows[i].request.sampler for i in first]
    base, at = owners[0].base, torch.from_numpy(once).to(hidden.device)
    logits = segments_of(owners).apply(base.unembed_name, hidden[at], base.head.logits_of_parts)
    if hidden.device.type == "mps":  # MPS has no float64
        logits = logits.cpu()
    known = Exponentials.of(logits, any(row.request.entropy for row in rows))
    if len(once) < len(rows):
        which = torch.from_numpy(which).to(logits.device)
        logits, known = logits[which], known.of_rows(which)
    # Reported log-probabilities and entropies are at temperature 1 over the whole vocabulary.
    entropies = known.entropies()
    normalizer = known.top + known.sums.sum(-1, keepdim=True).log().float()
    settings = [row.request.settings for row in rows]
    params = BatchSamplingParams(
        temperature=np.array([one.temperature for one in settings]),
        top_k=np.array([one.top_k for one in settings]),
        top_p=np.array([one.top_p for one in settings]),
        uniform=np.array([row.uniform() for row in rows]),
        min_p=np.array([one.min_p for one in settings]),
    )
    adjusted = [i for i, row in enumerate(rows) if row.adjuster is not None and row.adjuster.active]
    if adjusted:
        sampled, errors = _sample_adjusted(logits, params, known, rows, np.array(adjusted))
        for i, error in errors.items():
            rows[i].request.fail(error)
    else:
        sampled = sample_tokens(logits, params, known)
    logprobs = (logits.gather(1, sampled[:, None]) - normalizer)[:, 0].tolist()
    # Each k by itself, because the order of ties may depend on k.
    top = {}
    for k in {row.request.topk for row in rows} - {0}:
        best = (logits - normalizer).topk(k, dim=-1)
        top[k] = best.indices.cpu().numpy(), best.values.cpu().numpy()
    # Everything that may fail for all rows is done; from here on, each row fails separately.
    ended = []
    for i, (row, token) in enumerate(zip(rows, sampled.tolist(), strict=True)):
        k = row.request.topk
        best = (top[k][0][i], top[k][1][i]) if k else None
        entropy = entropies[i] if entropies is not None and row.request.entropy else None
        if _add(row, token, logprobs[i], best, entropy):
            ended.append(row)
    return ended


def _sample_adjusted(
    logits: torch.Tensor,
    params: BatchSamplingParams,
    known: Exponentials,
    rows: Sequence[SampledSequence],
    which: np.ndarray,
) -> tuple[torch.Tensor, dict[int, Exception]]:
    """Samples all rows; rows in ``which`` from logits changed by their options.

    Returns the tokens [R] and the errors of rows; ``logits`` stay the model's own.
    """
    index = torch.from_numpy(which).to(logits.device)
    changed = logits[index]  # a copy
    adjusters = [adjuster for i in which if (adjuster := rows[i].adjuster) is not None]
    found = adjusted_logits(changed, adjusters)
    errors = {int(which[i]): error for i, error in found.items()}
    tokens = sample_tokens(changed, params.of_rows(which))
    # If the options leave no token, the sampled one is excluded too.
    possible = changed.gather(1, tokens[:, None])[:, 0] > -torch.inf
    for i, ok in zip(which.tolist(), possible.tolist(), strict=True):
        if not ok and i not in errors:
            errors[i] = ConfigurationError(
                f"token_mask: no token is allowed after {len(rows[i].sample.tokens)} sampled "
                f"tokens ({', '.join(rows[i].request.settings.in_effect)})"
            )
    if len(which) == len(rows):
        return tokens, errors
    # Other rows are sampled as usual, without a copy of their logits.
    sampled = sample_tokens(logits, params, known)
    sampled[index] = tokens
    return sampled, errors


def _add(
    row: SampledSequence,
    token: int,
    logprob: float,
    best: tuple[np.ndarray, np.ndarray] | None,
    entropy: float | None,
) -> bool:
    """Appends a sampled token; returns whether the row ends or has failed."""
    request = row.request
    if row.failed:  # or another row of its request has failed
        return True
    # NaN or infinity comes from the weights: only the requests of this sampler fail.
    if not math.isfinite(logprob):
        request.fail(request.sampler.diverged(row.length))
        return True
    request.sampler.base.sampled_tokens += 1
    try:  # decoding for stop strings, or the callback, may raise
        return row.add(token, logprob, best, entropy)
    except Exception as error:
        request.fail(error)
        return True


def sample_tokens(
    logits: torch.Tensor, params: BatchSamplingParams, known: Exponentials | None = None
) -> torch.Tensor:
    """Samples one token id per row, int64 [R], from fp32 ``logits`` [R, V]; ``known`` are their
    exponentials."""
    # Rows at temperature 0 use the maximum; softmax and sums are computed only for the others.
    hot = np.flatnonzero(params.temperature > 0)
    if len(hot) == 0:
        return logits.argmax(-1)
    if len(hot) == len(logits):
        return _sample_hot(logits, params, known)
    out = logits.argmax(-1)
    rows = torch.from_numpy(hot).to(logits.device)
    out[rows] = _sample_hot(logits[rows], params.of_rows(hot), None)
    return out


def _sample_hot(
    logits: torch.Tensor, params: BatchSamplingParams, known: Exponentials | None
) -> torch.Tensor:
    """Samples rows whose temperature is not 0."""
    device = logits.device

    def column(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.float32)).to(device)[:, None]

    scaled = logits
    if (params.temperature != 1).any():
        scaled = logits / column(np.maximum(params.temperature, _COLDEST))
    narrow = np.flatnonzero((params.top_k != -1) & (params.top_k < logits.shape[-1]))
    nucleus = np.flatnonzero(params.top_p < 1)
    likely = np.flatnonzero(params.min_p > 0) if params.min_p is not None else ()
    if scaled is not logits or len(narrow) or len(nucleus) or len(likely):
        # The known exponentials are of the plain logits. Copy, because log-probabilities need
        # those.
        known = None
        scaled = logits.clone() if scaled is logits else scaled
    if params.min_p is not None and len(likely):
        # p >= min_p * max(p), with logits.
        rows = torch.from_numpy(likely).to(device)
        part = scaled[rows]
        least = part.amax(-1, keepdim=True) + column(params.min_p[likely]).log()
        scaled[rows] = part.masked_fill(part < least, -torch.inf)
    if len(narrow):
        # One topk of the largest k serves rows of all k: each reads its own k-th value.
        rows, top_k = torch.from_numpy(narrow).to(device), params.top_k[narrow]
        part = scaled[rows]
        last = torch.from_numpy(top_k.astype(np.int64) - 1).to(device)
        least = part.topk(int(top_k.max()), dim=-1).values.gather(1, last[:, None])
        scaled[rows] = part.masked_fill(part < least, -torch.inf)
    if len(nucleus):
        rows = torch.from_numpy(nucleus).to(device)
        ranked, order = scaled[rows].softmax(-1).sort(dim=-1, descending=True)
        # A token is excluded if more probable ones already have the mass; the first is always kept.
        cut = ranked.cumsum(-1) - ranked >= column(params.top_p[nucleus])
        cut = torch.zeros_like(cut).scatter(1, order, cut)
        scaled[rows] = scaled[rows].masked_fill(cut, -torch.inf)
    # Inversion: first the block in which the cumulative sum exceeds the number, then the token.
    known = known or Exponentials.of(scaled)
    blocks = known.sums.cumsum(-1)
    uniform = torch.from_numpy(params.uniform).to(device)
    block, passed = _first_above(blocks, uniform * blocks[:, -1])
    row = torch.arange(len(blocks), device=device)
    token, _ = _first_above(known.weights[row, block].double().cumsum(-1), passed)
    # For a row of NaN, the block may be the last one, where a token may exceed the vocabulary.
    return (block * _BLOCK + token).clamp_(max=logits.shape[-1] - 1)


def _first_above(cumulative: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each row's first index whose sum exceeds ``at``, and the remainder of ``at``."""
    # Sums of sums differ in the last digit, so clamp to avoid an index past the end.
    at = torch.minimum(at, cumulative[:, -1] * (1 - 1e-15))
    index = torch.searchsorted(cumulative, at[:, None], right=True)
    # A row of NaN has no such index. It gets the last one, so that other rows are sampled.
    index.clamp_(max=cumulative.shape[-1] - 1)
    before = F.pad(cumulative, (1, 0)).gather(1, index)
    return index[:, 0], at - before[:, 0]
