"""Low-rank terms of adapters as layers apply them: for all tokens of a batch, or some of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812


class LowRank:
    """``(x A^T) B^T`` of one layer, for ``A`` [r, in] and ``B`` [out, r] with its scaling."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a, self.b = a, b
        self.packed: Any = None  # both in a kernel's layout, which the kernel makes once

    @cached_property
    def back(self) -> LowRank:
        """The way back: ``(y B) A``."""
        return LowRank(self.b.detach().t(), self.a.detach().t())

    def add_keeping(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Adds the term for ``x`` [T, in] to ``out``; returns ``x A^T`` [T, r] for gradients."""
        low = F.linear(x, self.a)
        out.addmm_(low, self.b.t())  # in place: another [T, out] would cost memory
        return low

    def add(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Adds the term for ``x`` [T, in] to ``out``.

        In fp32 whatever the dtype of the model, with values of that dtype: for the few rows of
        decoding the small products are faster so.
        """
        a, b = self.by_column
        count, x = len(x), x.float()
        if surplus := filling(count):
            x = F.pad(x, (0, 0, 0, surplus))
        low = F.linear(x, a)
        if out.dtype == torch.float32 and not surplus:
            out.addmm_(low, b.t())
        else:
            out.add_(F.linear(low, b)[:count])

    @cached_property
    def by_column(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both with one column after another in memory.

        Layers multiply with their transposes, and for the few rows of decoding a product with a
        matrix that lies row by row takes a third to a half of the time.
        """
        return self.a.float().t().contiguous().t(), self.b.float().t().contiguous().t()


Part = tuple[LowRank, int, int]
"""A term, and the rows that it is for: from the first to the one before the last number."""

PartsProduct = Callable[[torch.Tensor, list[Part]], torch.Tensor]
"""From inputs [T, in] and what is to be added to [T, out]."""

Terms = Mapping[str, LowRank]
"""Target name -> what an adapter adds there."""


@dataclass(frozen=True)
class Segments:
    """Which tokens of a batch have which adapter.

    ``stretches`` are (terms, first, end) of tokens side by side, once the batch is in ``order``
    [T]; ``back`` [T] is the way back. Without an order they are as they lie.
    """

    stretches: Sequence[tuple[Terms, int, int]]
    order: torch.Tensor | None = None
    back: torch.Tensor | None = None

    @classmethod
    def of_one(cls, terms: Terms) -> Segments:
        """All tokens have the same."""
        return cls([(terms, 0, sys.maxsize)])

    def apply(
        self,
        name: str,
        x: torch.Tensor,
        product: Callable[[torch.Tensor, list[Part]], torch.Tensor],
    ) -> torch.Tensor:
        """Returns ``product`` of the inputs ``x`` [T, in] of layer ``name`` and of what is
        added there."""
        parts = [
            (terms[name], first, min(end, len(x)))
            for terms, first, end in self.stretches
            if name in terms
        ]
        return product(x, parts) if self.order is None else product(x[self.order], parts)[self.back]


def filling(rows: int) -> int:
    """Rows of nothing to add to a product, so that it has a multiple of 8.

    torch's products of a few rows go through kernels of their own, which round otherwise, and what
    a sample draws must not depend on its company. Measured with MKL and oneDNN on x86: for
    multiples of 4 a row's result is the same to the bit. And of the kernels that oneDNN makes for
    each number of rows that occurs, an eighth is needed.
    """
    return -rows % 8
