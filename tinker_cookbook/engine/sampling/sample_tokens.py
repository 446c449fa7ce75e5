"""Samples tokens from logits, each row with its own temperature, top-k and top-p.

A token is found by inverting the cumulative distribution at one uniform number per row, so the rest
of the batch has no influence. The sum over a vocabulary must be exact to many digits;
summing blocks first leaves only one block a row to be summed token by token in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

_BLOCK = 256
_COLDEST = 1e-30


@dataclass(frozen=True)
class BatchSamplingParams:
    """Sampling parameters of each row, tensors [R].

    ``temperature`` 0 takes the most probable token; ``top_k`` is the number of most probable
    tokens that may be sampled, -1 for all (ties at the border are all included); ``top_p`` in (0,
    1] leaves tokens out once more probable ones hold this much; ``uniform`` float64 in [0, 1)
    decides.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    uniform: np.ndarray

    def take(self, rows: np.ndarray) -> BatchSamplingParams:
        """Returns the parameters of some rows."""
        return BatchSamplingParams(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.uniform[rows]
        )


@dataclass(frozen=True)
class Exponentials:
    """``e^(z - max)`` of logits ``z`` [R, V] in blocks, shared by the normalizer and sampling.

    ``weights`` fp32 [R, blocks, 256], filled up with zeros; ``sums`` float64 [R, blocks].
    """

    top: torch.Tensor
    weights: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor) -> Exponentials:
        """Computes the exponentials of fp32 ``logits`` [R, V]."""
        top = logits.amax(-1, keepdim=True)
        weights = logits.sub(top).exp_()
        rest = -weights.shape[-1] % _BLOCK
        weights = F.pad(weights, (0, rest)) if rest else weights  # padding by nothing copies
        weights = weights.view(len(weights), -1, _BLOCK)
        return cls(top, weights, weights.sum(-1).double())

    def normalizer(self) -> torch.Tensor:
        """Returns log-sum-exp of the logits, fp32 [R, 1]."""
        return self.top + self.sums.sum(-1, keepdim=True).log().float()

    def take(self, rows: torch.Tensor | slice) -> Exponentials:
        """Returns the exponentials of some rows."""
        return Exponentials(self.top[rows], self.weights[rows], self.sums[rows])


def sample_tokens(
    logits: torch.Tensor, how: BatchSamplingParams, known: Exponentials | None = None
) -> torch.Tensor:
    """Samples one token id per row, int64 [R], from fp32 ``logits`` [R, V]; ``known`` are their
    exponentials."""
    hot = np.flatnonzero(how.temperature > 0)
    if len(hot) == 0:
        return logits.argmax(-1)
    if len(hot) == len(logits):
        return _draw(logits, how, known)
    out = logits.argmax(-1)
    rows = torch.from_numpy(hot).to(logits.device)
    out[rows] = _draw(logits[rows], how.take(hot))
    return out


def _draw(
    logits: torch.Tensor, how: BatchSamplingParams, known: Exponentials | None = None
) -> torch.Tensor:
    scaled = logits
    if (how.temperature != 1).any():
        # Below this bound a quotient may overflow, and the draw is the most probable token anyway.
        scaled = logits / _column(np.maximum(how.temperature, _COLDEST), logits)
    narrow = np.flatnonzero((how.top_k != -1) & (how.top_k < logits.shape[-1]))
    nucleus = np.flatnonzero(how.top_p < 1)
    uniform = torch.from_numpy(how.uniform).to(logits.device)
    if scaled is logits and not len(narrow) and not len(nucleus):
        return _invert(known or Exponentials.of(logits), uniform, logits.shape[-1])
    if scaled is logits:
        scaled = logits.clone()
    if len(narrow):
        _keep_top_k(scaled, narrow, how.top_k[narrow])
    if len(nucleus):
        _keep_top_p(scaled, nucleus, how.top_p[nucleus])
    return _invert(Exponentials.of(scaled), uniform, logits.shape[-1])


def _keep_top_k(scaled: torch.Tensor, where: np.ndarray, top_k: np.ndarray) -> None:
    rows = torch.from_numpy(where).to(scaled.device)
    part = scaled[rows]
    index = torch.from_numpy(top_k.astype(np.int64) - 1).to(scaled.device)
    least = part.topk(int(top_k.max()), dim=-1).values.gather(1, index[:, None])
    scaled[rows] = part.masked_fill(part < least, -torch.inf)


def _keep_top_p(scaled: torch.Tensor, where: np.ndarray, top_p: np.ndarray) -> None:
    rows = torch.from_numpy(where).to(scaled.device)
    ranked, order = scaled[rows].softmax(-1).sort(dim=-1, descending=True)
    # A token is cut when those before it already hold the mass; the first always stays.
    cut = ranked.cumsum(-1) - ranked >= _column(top_p, scaled)
    cut = torch.zeros_like(cut).scatter(1, order, cut)
    scaled[rows] = scaled[rows].masked_fill(cut, -torch.inf)


def _invert(of: Exponentials, uniform: torch.Tensor, size: int) -> torch.Tensor:
    """Returns the index below ``size`` at which each row's cumulative distribution exceeds
    ``uniform``."""
    weights, blocks = of.weights, of.sums.cumsum(-1)
    block, passed = _pass(blocks, uniform * blocks[:, -1])
    tokens = weights[torch.arange(len(weights), device=weights.device), block].double().cumsum(-1)
    token, _ = _pass(tokens, passed)
    return (block * _BLOCK + token).clamp_(max=size - 1)  # a row of NaN ends in the filling


def _pass(cumulative: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each row's first index whose cumulative sum exceeds ``at``, and the remainder of
    ``at``."""
    # Sums of sums round apart in the last digit; past the end there would be nothing to draw.
    at = torch.minimum(at, cumulative[:, -1] * (1 - 1e-15))
    index = torch.searchsorted(cumulative, at[:, None], right=True)
    # A row of NaN has no such index. It gets the last one, so that the other rows can be drawn.
    index.clamp_(max=cumulative.shape[-1] - 1)
    before = F.pad(cumulative, (1, 0)).gather(1, index)
    return index[:, 0], at - before[:, 0]


def _column(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(like.device)[:, None]
