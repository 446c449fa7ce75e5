"""Low-rank terms of adapters, applied to all tokens of a batch or to some of them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


def drop(low: Tensor, dropped: Tensor | None) -> Tensor:
    """Returns ``low`` [T, r] with zeros where ``dropped`` [T, r] is set."""
    return low if dropped is None else low.masked_fill_(dropped, 0)


class LowRank:
    """``(x A^T) B^T`` of one layer, for ``A`` [r, in] and ``B`` [out, r] with its scaling.

    For stacked adapters of several runs, ``dropped`` [T, r] marks the ranks of other runs.
    """

    def __init__(self, a: Tensor, b: Tensor, dropped: Tensor | None = None) -> None:
        self.a, self.b, self.dropped = a, b, dropped
        self.packed: Any = None  # both in a kernel's layout, created once by the kernel
        self.stack: tuple[tuple[weakref.ref[LowRank], ...], LowRank] | None = None
        self._by_expert: ExpertTerm | None = None

    def by_expert(self, count: int) -> ExpertTerm:
        """Splits the term into ``count`` experts, stacked as in peft:
        ``A`` [count * r, in], and ``B`` [out, r * count] with the expert as its last index."""
        if self._by_expert is None:
            a, b = self.a.detach(), self.b.detach()
            split = b.reshape(len(b), -1, count).permute(2, 0, 1).contiguous()
            self._by_expert = ExpertTerm(a.reshape(count, -1, a.shape[1]), split)
        return self._by_expert

    @cached_property
    def back(self) -> LowRank:
        """The term of the backward pass: ``(y B) A``."""
        return LowRank(self.b.detach().t(), self.a.detach().t(), self.dropped)

    def add_keeping(self, out: Tensor, x: Tensor) -> Tensor:
        """Adds the term for ``x`` [T, in] to ``out``; returns ``x A^T`` [T, r] for the
        gradients."""
        low = drop(F.linear(x, self.a), self.dropped)
        out.addmm_(low, self.b.t())  # in place, to avoid another [T, out]
        return low

    def add_selected(self, out: Tensor, x: Tensor, dropped: Tensor | None = None) -> None:
        """Adds the term as training does; ``dropped`` [T, r] masks ranks of other rows'
        adapters."""
        low = drop(F.linear(x, self.a), dropped)
        if out.dtype == low.dtype:
            out.addmm_(low, self.b.t())
        else:  # logits are fp32
            out.addmm_(low.to(out.dtype), self.by_column[1].t())

    def add(self, out: Tensor, x: Tensor) -> None:
        """Adds the term for ``x`` [T, in] to ``out``, computed in fp32 with values of the model's
        dtype: on a CPU products of few rows are faster in fp32."""
        a, b = self.by_column
        count, x = len(x), x.float()
        if surplus := filling(count):
            x = F.pad(x, (0, 0, 0, surplus))
        low = F.linear(x, a)
        # In place if there is no padding to cut off and no rounding.
        if out.dtype == torch.float32 and not surplus:
            out.addmm_(low, b.t())
        else:
            out.add_(F.linear(low, b)[:count])

    @cached_property
    def by_column(self) -> tuple[Tensor, Tensor]:
        """``A`` and ``B`` in fp32, contiguous by column."""
        # Layers multiply with the transposes. For the few rows of decoding a product with a matrix
        # that is contiguous by row takes only a third to a half of the time.
        return self.a.float().t().contiguous().t(), self.b.float().t().contiguous().t()


class ExpertTerm:
    """Low-rank terms of E experts: ``A`` [E, r, in], and ``B`` [E, out, r] with its scaling."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a, b
        self._each: dict[int, LowRank] = {}

    def of(self, expert: int) -> LowRank:
        """Returns the term of one expert, created once together with its kernel layouts."""
        if expert not in self._each:
            self._each[expert] = LowRank(self.a[expert], self.b[expert])
        return self._each[expert]

    @cached_property
    def aligned(self) -> tuple[Tensor, Tensor]:
        """``A`` and ``B``, zero-padded to a rank that torch's grouped product supports."""
        surplus = -self.a.shape[1] % 8
        return F.pad(self.a, (0, 0, 0, surplus)), F.pad(self.b, (0, surplus))


Part = tuple[LowRank, int, int]
"""A term, and the half-open range of its rows."""

MOST_RANKS = 512
"""Maximum sum of the ranks of adapters that share a product on a GPU. Each row computes all of
them, which is faster than one product per adapter unless the sum is close to the layer's width."""


def add_together(out: Tensor, x: Tensor, parts: Sequence[Part]) -> None:
    """Adds the terms of ``parts``, consecutive rows of ``x`` [T, in], to ``out`` [T, out].

    For a GPU, where the number of kernel launches matters: several adapters share one product.
    """
    bunch: list[Part] = []
    for part in parts:
        terms = {term for term, _, _ in (*bunch, part)}
        if bunch and sum(len(term.a) for term in terms) > MOST_RANKS:
            _add_bunch(out, x, bunch)
            bunch = []
        bunch.append(part)
    if bunch:
        _add_bunch(out, x, bunch)


def _add_bunch(out: Tensor, x: Tensor, parts: Sequence[Part]) -> None:
    first, end = parts[0][1], parts[-1][2]
    # A fixed order, so that the stack of the same adapters is reused in many steps.
    terms = sorted({term for term, _, _ in parts}, key=id)
    covered = sum(end - first for _, first, end in parts)
    if len(terms) == 1 and covered == end - first:
        terms[0].add_selected(out[first:end], x[first:end])
        return
    ranks = tuple(len(term.a) for term in terms)
    rows = tuple((terms.index(term), start - first, stop - first) for term, start, stop in parts)
    dropped = _dropped(ranks, rows, end - first, x.device)
    _stacked(terms).add_selected(out[first:end], x[first:end], dropped)


@lru_cache(maxsize=16)  # all layers of a step use the same few masks
def _dropped(
    ranks: tuple[int, ...], rows: tuple[tuple[int, int, int], ...], count: int, device: torch.device
) -> Tensor:
    """Returns [T, sum of ranks]: whether a rank belongs to another adapter than the row."""
    owner = np.full(count, -1)
    for number, start, stop in rows:
        owner[start:stop] = number
    of_rank = np.repeat(np.arange(len(ranks)), ranks)
    return torch.from_numpy(owner[:, None] != of_rank).to(device)


def _stacked(terms: Sequence[LowRank]) -> LowRank:
    """Concatenates the terms along the rank; cached while the terms live."""
    known = terms[0].stack
    if known is not None and [ref() for ref in known[0]] == list(terms):
        return known[1]
    a, b = torch.cat([term.a for term in terms]), torch.cat([term.b for term in terms], 1)
    # Zero times NaN is NaN: a diverged adapter must not affect the rows of other adapters.
    # In ``A`` it cannot, because other adapters' ranks are masked, so move NaNs of ``B`` there.
    broken = ~b.isfinite().all(0)
    stack = LowRank(a.masked_fill(broken[:, None], torch.nan), b.nan_to_num(0, 0, 0))
    terms[0].stack = tuple(map(weakref.ref, terms)), stack
    return stack


Terms = Mapping[str, LowRank]
"""Target name -> term of an adapter."""


@dataclass(frozen=True)
class Segments:
    """The adapter of each token of a batch.

    ``stretches`` are (terms, first, end) of consecutive tokens, once the batch is in ``order``
    [T]; ``back`` [T] is the inverse. Without ``order`` the batch is not permuted.
    """

    stretches: Sequence[tuple[Terms, int, int]]
    order: Tensor | None = None
    back: Tensor | None = None

    @classmethod
    def of_one(cls, terms: Terms) -> Segments:
        """Returns segments in which all tokens have the same adapter."""
        return cls([(terms, 0, sys.maxsize)])

    def apply(
        self, name: str, x: Tensor, product: Callable[[Tensor, list[Part]], Tensor]
    ) -> Tensor:
        """Returns ``product`` of the inputs ``x`` [T, in] of layer ``name`` and of its terms."""
        # The last stretch may end beyond the batch (``of_one``).
        parts = [
            (terms[name], first, min(end, len(x)))
            for terms, first, end in self.stretches
            if name in terms
        ]
        return product(x, parts) if self.order is None else product(x[self.order], parts)[self.back]

    def terms_of(self, name: str) -> list[LowRank | None]:
        """Returns the terms of layer ``name``, one for each stretch."""
        return [terms.get(name) for terms, _, _ in self.stretches] or [None]

    def numbers(self, count: int) -> Tensor | None:
        """Returns the index of the stretch of each of ``count`` tokens, [count]; ``None`` if there
        is only one."""
        if len(self.stretches) < 2:
            return None
        # Tokens after the last stretch are padding, which may have any adapter.
        ends = [0, *(end for _, _, end in self.stretches[:-1]), count]
        lengths = torch.tensor([end - first for first, end in pairwise(ends)])
        numbers = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return numbers if self.back is None else numbers.to(self.back.device)[self.back]


def outer(left: Tensor, right: Tensor) -> Tensor:
    """Returns ``left^T right`` [m, n] of [T, m] and [T, n]; in fp32 if either is."""
    dtype = torch.promote_types(left.dtype, right.dtype)
    return left.to(dtype).t() @ right.to(dtype)


def filling(rows: int) -> int:
    """Returns the number of padding rows that make ``rows`` a multiple of 8."""
    # torch uses other kernels for products of a few rows, which round differently, but a
    # sample must not depend on the rest of its batch. Measured with MKL and oneDNN on x86: for
    # multiples of 4 a row's result is bit-identical. Also, oneDNN compiles a kernel for each
    # number of rows that occurs; padding reduces these to an eighth.
    return -rows % 8
