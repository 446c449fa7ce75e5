"""Low-rank terms of adapters, applied to all tokens of a batch or to some of them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class AdapterIndex:
    """The adapter of each token, for stacked adapters of several runs.

    ``of_token`` [T] (ascending) is the index of a token's adapter; ``members`` are the index and
    the rank of each stacked adapter.
    """

    of_token: Tensor
    members: tuple[tuple[int, int], ...]

    @cached_property
    def dropped(self) -> Tensor:
        """Mask [T, sum of LoRA ranks] of those that are not of the token's adapter."""
        numbers, ranks = zip(*self.members, strict=True)
        of_rank = torch.from_numpy(np.repeat(numbers, ranks)).to(self.of_token.device)
        return self.of_token[:, None] != of_rank

    def at(self, rows: slice | Tensor) -> AdapterIndex:
        """Returns the owners of the tokens ``rows``, which must be in ascending order."""
        return AdapterIndex(self.of_token[rows], self.members)

    def parts(self) -> Iterator[tuple[slice, slice]]:
        """Yields the tokens and the ranks of each adapter that has tokens."""
        counts = self.of_token.bincount(minlength=1 + self.members[-1][0]).tolist()
        ends, rank = np.cumsum(counts).tolist(), 0
        for number, ranks in self.members:
            if counts[number]:
                rows = slice(ends[number] - counts[number], ends[number])
                yield rows, slice(rank, rank + ranks)
            rank += ranks


@dataclass(frozen=True)
class RowGroups:
    """Groups of consecutive rows, each with a matrix of its own. One call computes all groups.

    ``ends`` [G] (int32) has the end of each group's rows; ``complete``: each is known to have rows.
    """

    ends: Tensor
    complete: bool = False

    @cached_property
    def _empty(self) -> Tensor:
        """Whether a group has no rows, [G, 1, 1]."""
        return (self.ends == F.pad(self.ends[:-1], (1, 0)))[:, None, None]

    def product(self, x: Tensor, matrices: Tensor) -> Tensor:
        """Returns [T, out] for ``x`` [T, in] and ``matrices`` [G, in, out]."""
        return F.grouped_mm(x, matrices, offs=self.ends)

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """Returns ``left^T right`` of each group's rows, [G, m, n] of [T, m] and [T, n]."""
        out = F.grouped_mm(left.t(), right, offs=self.ends)
        # On Blackwell GPUs the result of a group without rows is undefined (pytorch #172439).
        return out if self.complete else out.masked_fill_(self._empty, 0)


class LowRank:
    """``(x A^T) B^T`` of one layer, for ``A`` [r, in] and ``B`` [out, r] with its scaling.

    For stacked adapters of several runs, with ``owners``, each token computes the ranks of all
    adapters, and those of other runs are set to 0.
    """

    def __init__(self, a: Tensor, b: Tensor, owners: AdapterIndex | None = None) -> None:
        self.a, self.b, self.owners = a, b, owners
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

    @staticmethod
    def of_experts(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tensors of experts, ``a`` [count, r, in] and ``b`` [count, out, r], in the
        shapes of ``A`` and ``B``."""
        return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)

    def at(self, rows: slice | Tensor) -> LowRank:
        """Returns the term for some of the rows, in ascending order."""
        return self if self.owners is None else LowRank(self.a, self.b, self.owners.at(rows))

    def members(self) -> Iterator[tuple[slice, slice]]:
        """Yields the rows and the ranks of each adapter."""
        everything = (slice(None), slice(None))
        return iter([everything]) if self.owners is None else self.owners.parts()

    def parts(self, count: int) -> list[Part]:
        """Returns a term of its own for each adapter's part of ``count`` rows. With a vocabulary as
        the output, computing the ranks of other adapters costs more than further kernels."""
        if self.owners is None:
            return [(self, 0, count)]
        own = ((LowRank(self.a[r], self.b[:, r]), rows) for rows, r in self.members())
        return [(term, rows.start, rows.stop) for term, rows in own]

    @cached_property
    def back(self) -> LowRank:
        """The term of the backward pass: ``(y B) A``."""
        return LowRank(self.b.detach().t(), self.a.detach().t(), self.owners)

    def low(self, x: Tensor) -> Tensor:
        """Returns ``x A^T`` [T, r] for ``x`` [T, in]."""
        low = F.linear(x, self.a)
        return low if self.owners is None else low.masked_fill_(self.owners.dropped, 0)

    def add_keeping(self, out: Tensor, x: Tensor) -> Tensor:
        """Adds the term for ``x`` [T, in] to ``out``; returns ``low(x)`` for the gradients."""
        low = self.low(x)
        out.addmm_(low, self.b.t())  # in place, to avoid another [T, out]
        return low

    def gradients(
        self, x: Tensor, low: Tensor, upstream: Tensor, d_low: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradients of ``A`` and ``B`` from ``low(x)``, the gradient ``upstream``
        [T, out], and ``back.low(upstream)``."""
        # The kernel pads the rank to whole panels with zeros.
        low, d_low = low[:, : len(self.a)], d_low[:, : len(self.a)]
        # Both forms are the same product. On a CPU, which one is faster depends on the dtype;
        # elsewhere only a contiguous result can be cast together with others.
        transposed = low.dtype != torch.float32 and low.device.type == "cpu"
        return outer(d_low, x), outer(low, upstream).t() if transposed else outer(upstream, low)

    def add_selected(self, out: Tensor, x: Tensor, dropped: Tensor | None = None) -> None:
        """Adds the term as training does; ``dropped`` [T, r] masks ranks of other rows'
        adapters."""
        low = F.linear(x, self.a)
        if dropped is not None:
            low.masked_fill_(dropped, 0)
        if out.dtype == low.dtype:
            out.addmm_(low, self.b.t())
        else:  # logits are fp32
            out.addmm_(low.to(out.dtype), self.b.to(out.dtype).t())


class GroupedLowRank(LowRank):
    """Terms of several adapters, each for its ``groups`` of rows: ``A`` [G, r, in] and ``B``
    [G, out, r]. Each token computes only the ranks of its own adapter."""

    def __init__(self, a: Tensor, b: Tensor, groups: RowGroups) -> None:
        super().__init__(a, b)
        self.groups = groups

    @cached_property
    def back(self) -> LowRank:
        """The term of the backward pass."""
        a, b = (side.detach().transpose(1, 2) for side in (self.a, self.b))
        return GroupedLowRank(b, a, self.groups)

    def low(self, x: Tensor) -> Tensor:
        """Returns ``x A^T`` [T, r], each row with its adapter's ``A``."""
        return self.groups.product(x, self.a.transpose(1, 2))

    def add_keeping(self, out: Tensor, x: Tensor) -> Tensor:
        """Adds the terms to ``out``; returns ``low(x)``."""
        low = self.low(x)
        out.add_(self.groups.product(low, self.b.transpose(1, 2)))
        return low

    def gradients(
        self, x: Tensor, low: Tensor, upstream: Tensor, d_low: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradients of ``A`` and ``B``, in their shapes."""
        return self.groups.outer(d_low, x), self.groups.outer(upstream, low)


class ExpertStack(LowRank):
    """Terms of routed experts and several adapters: ``A`` [E * G, r, in] and ``B``
    [E * G, out, r], where each expert has one matrix for each of the ``count`` adapters.

    ``of_token`` [T] is the index of a token's adapter.
    """

    def __init__(self, a: Tensor, b: Tensor, of_token: Tensor, count: int) -> None:
        super().__init__(a, b)
        self.of_token, self.count = of_token, count

    def by_expert(self, count: int) -> ExpertTerm:
        """Returns the terms as they are: one for each of ``count`` experts and each adapter."""
        return ExpertTerm(self.a.detach(), self.b.detach())

    @staticmethod
    def of_experts(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tensors as they are."""
        return a, b


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

    ``stretches`` are (terms, first, end) of consecutive tokens.
    """

    stretches: Sequence[tuple[Terms, int, int]]

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
        return product(x, parts)

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
        return torch.repeat_interleave(torch.arange(len(lengths)), lengths)


def outer(left: Tensor, right: Tensor) -> Tensor:
    """Returns ``left^T right`` [m, n] of [T, m] and [T, n]; in fp32 if either is."""
    dtype = torch.promote_types(left.dtype, right.dtype)
    return left.to(dtype).t() @ right.to(dtype)
