"""Products of routed experts: each row of a batch is multiplied by the matrix of one expert.

Rows are sorted by expert, so that a product needs no gather of weights. If torch has
a grouped product for the device, one call computes all experts. On a CPU, each expert with rows
is one product with a packed matrix, which takes a third of the time of torch's grouped product.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tinker_cookbook.engine.kernels.cpu.linear import FrozenWeight, MakeLayout, _Plain
from tinker_cookbook.engine.model.low_rank import ExpertTerm, RowGroups, outer

_ALIGNED_BYTES = 16
"""torch's grouped product needs row strides of a multiple of this many bytes."""


@dataclass(frozen=True)
class ExpertRows:
    """Rows of a batch, sorted by expert and, within an expert, by adapter.

    ``ends`` [E * adapters] (int32) has the end of each group's rows.
    """

    ends: Tensor
    adapters: int = 1

    @cached_property
    def of_experts(self) -> RowGroups:
        """The rows of each of the E experts."""
        return RowGroups(self.ends[self.adapters - 1 :: self.adapters].contiguous())

    @cached_property
    def of_adapters(self) -> RowGroups:
        """The rows of each expert and adapter."""
        return RowGroups(self.ends)

    @cached_property
    def _bounds(self) -> list[int]:
        return [0, *self.ends.tolist()]

    def present(self) -> Iterator[tuple[int, int, list[int]]]:
        """Yields each expert that has rows: its number, its first row, and the ends of its
        adapters' rows, counted from the first."""
        bounds, adapters = self._bounds, self.adapters
        for expert in range((len(bounds) - 1) // adapters):
            first, *ends = bounds[expert * adapters : (expert + 1) * adapters + 1]
            if ends[-1] > first:
                yield expert, first, [end - first for end in ends]


GroupedGradients = tuple[Tensor | None, Tensor, Tensor]
"""Of ``x`` [S, in] (``None`` if not needed), of ``A`` [E, r, in] and ``B`` [E, out, r]."""


class FrozenExperts(ABC):
    """Frozen matrices ``W`` [E, out, in] and their optional biases [E, out].

    In all methods, ``x`` is [S, in], sorted as in ``rows``.
    """

    one_call = False
    """Whether one call computes all experts and adapters: ``trained`` and ``gradients`` then take a
    term with a matrix for each group of ``rows``."""

    @abstractmethod
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None: ...

    @abstractmethod
    def trained(
        self, x: Tensor, rows: ExpertRows, term: ExpertTerm | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns ``x W^T + bias`` plus the term [S, out], and the ``lows`` for ``gradients``."""

    @abstractmethod
    def gradients(
        self,
        upstream: Tensor,
        x: Tensor,
        lows: Sequence[Tensor],
        rows: ExpertRows,
        term: ExpertTerm,
        needs_x: bool,
    ) -> GroupedGradients:
        """Returns the gradients of ``trained``; ``lows`` is its second result."""

    @abstractmethod
    def input_gradient(self, upstream: Tensor, rows: ExpertRows) -> Tensor:
        """Returns the gradient of ``x`` if no term was added."""

    @abstractmethod
    def adapted(self, x: Tensor, rows: ExpertRows, terms: Sequence[ExpertTerm | None]) -> Tensor:
        """Returns the product plus a term for each adapter's rows, without gradients."""


class _EachExpert(FrozenExperts):
    """One packed matrix per expert, in the fastest layout or a given one."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, layout: MakeLayout | None = None
    ) -> None:
        self._weights = [FrozenWeight(one, layout) for one in weight.detach()]
        self._bias = bias
        self._outputs, self._dtype = weight.shape[1], weight.dtype

    def trained(
        self, x: Tensor, rows: ExpertRows, term: ExpertTerm | None
    ) -> tuple[Tensor, list[Tensor]]:
        outs, lows = [], []
        for expert, first, ends in rows.present():
            mine, layout = x[first : first + ends[-1]], self._weights[expert].forward
            if term is None:
                out = layout.product(mine, self._bias_of(expert))
            else:
                out, low = layout.trained(mine, self._bias_of(expert), term.of(expert))
                lows.append(low)
            outs.append(out)
        return self._joined(outs, x), lows

    def gradients(
        self,
        upstream: Tensor,
        x: Tensor,
        lows: Sequence[Tensor],
        rows: ExpertRows,
        term: ExpertTerm,
        needs_x: bool,
    ) -> GroupedGradients:
        # Experts without rows keep these zeros.
        d_a, d_b = torch.zeros_like(term.a), torch.zeros_like(term.b)
        d_xs = []
        rank = term.a.shape[1]
        for (expert, first, ends), low in zip(rows.present(), lows, strict=True):
            here = slice(first, first + ends[-1])
            gradient, low_rank = upstream[here], term.of(expert)
            if needs_x:
                layout = self._weights[expert].backward
                d_x, d_low = layout.trained(gradient, None, low_rank.back)
                d_xs.append(d_x)
            else:
                d_low = gradient @ low_rank.b.detach()
            # The kernel pads the rank to whole panels with zeros.
            d_a[expert] = outer(d_low[:, :rank], x[here])
            d_b[expert] = outer(gradient, low[:, :rank])
        return _cat(d_xs, x) if needs_x else None, d_a, d_b

    def input_gradient(self, upstream: Tensor, rows: ExpertRows) -> Tensor:
        outs = []
        for expert, first, ends in rows.present():
            layout = self._weights[expert].backward
            outs.append(layout.product(upstream[first : first + ends[-1]]))
        width = self._weights[0].shape[1]
        return _cat(outs, upstream.new_empty(0, width))

    def adapted(self, x: Tensor, rows: ExpertRows, terms: Sequence[ExpertTerm | None]) -> Tensor:
        outs = []
        for expert, first, ends in rows.present():
            mine, layout = x[first : first + ends[-1]], self._weights[expert].forward
            starts = [0, *ends[:-1]]
            parts = [
                (term.of(expert), start, end)
                for term, start, end in zip(terms, starts, ends, strict=True)
                if term is not None and end > start
            ]
            outs.append(layout.adapted(mine, self._bias_of(expert), parts))
        return self._joined(outs, x)

    def _bias_of(self, expert: int) -> Tensor | None:
        return None if self._bias is None else self._bias[expert]

    def _joined(self, outs: list[Tensor], x: Tensor) -> Tensor:
        return _cat(outs, x.new_empty(0, self._outputs, dtype=self._dtype))


class _OneCall(FrozenExperts):
    """torch's grouped product: one kernel for all experts, without device synchronisation."""

    one_call = True

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight.detach(), bias

    @staticmethod
    def suits(weight: Tensor) -> bool:
        """Returns whether torch's grouped product can be used for ``weight`` [E, out, in]."""
        return weight.is_cuda and all(
            width * weight.itemsize % _ALIGNED_BYTES == 0 for width in weight.shape[1:]
        )

    def trained(
        self, x: Tensor, rows: ExpertRows, term: ExpertTerm | None
    ) -> tuple[Tensor, list[Tensor]]:
        out, groups = self._product(x, rows), rows.of_adapters
        if term is None:
            return out, []
        a, b = term.aligned
        low = groups.product(x, a.transpose(1, 2))
        return out.add_(groups.product(low, b.transpose(1, 2))), [low]

    def gradients(
        self,
        upstream: Tensor,
        x: Tensor,
        lows: Sequence[Tensor],
        rows: ExpertRows,
        term: ExpertTerm,
        needs_x: bool,
    ) -> GroupedGradients:
        (a, b), groups, rank = term.aligned, rows.of_adapters, term.a.shape[1]
        d_low = groups.product(upstream, b)
        d_x = None
        if needs_x:
            d_x = self.input_gradient(upstream, rows).add_(groups.product(d_low, a))
        d_a = groups.outer(d_low, x)[:, :rank]
        d_b = groups.outer(upstream, lows[0])[:, :, :rank]
        return d_x, d_a, d_b

    def input_gradient(self, upstream: Tensor, rows: ExpertRows) -> Tensor:
        return rows.of_experts.product(upstream, self._weight)

    def adapted(self, x: Tensor, rows: ExpertRows, terms: Sequence[ExpertTerm | None]) -> Tensor:
        out, groups = self._product(x, rows), rows.of_experts
        for number, term in enumerate(terms):
            if term is None:
                continue
            a, b = term.aligned
            low = groups.product(x, a.transpose(1, 2))
            if len(terms) > 1:
                # Multiply the rows of other adapters by zero: cheaper than sorting again.
                low = low * (self._groups_of(rows, len(x)) % rows.adapters == number)[:, None]
            out.add_(groups.product(low, b.transpose(1, 2)))
        return out

    def _product(self, x: Tensor, rows: ExpertRows) -> Tensor:
        out = rows.of_experts.product(x, self._weight.transpose(1, 2))
        if self._bias is not None:
            out += self._bias[self._groups_of(rows, len(x)) // rows.adapters]
        return out

    @staticmethod
    def _groups_of(rows: ExpertRows, count: int) -> Tensor:
        """Returns the group of each row, [S]."""
        at = torch.arange(count, device=rows.ends.device, dtype=rows.ends.dtype)
        return torch.searchsorted(rows.ends, at, right=True)


def freeze_experts(
    weight: Tensor, bias: Tensor | None = None, layout: MakeLayout | None = None
) -> FrozenExperts:
    """Returns the fastest implementation for ``weight`` [E, out, in] on its device, or one matrix
    per expert in ``layout`` if it is given."""
    if layout is None and _OneCall.suits(weight):
        return _OneCall(weight, bias)
    return _EachExpert(weight, bias, layout)


def gathered_experts(weight: Tensor, bias: Tensor | None = None) -> FrozenExperts:
    """Like ``freeze_experts``, but without a copy of ``weight``, which FSDP frees after the
    layer."""
    return freeze_experts(weight, bias, None if _OneCall.suits(weight) else _Plain)


def _cat(parts: list[Tensor], empty: Tensor) -> Tensor:
    return torch.cat(parts) if parts else empty
