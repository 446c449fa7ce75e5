"""Low-rank terms of adapters as layers apply them: for all tokens of a batch, or some of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch.nn import functional as F  # noqa: N812

T = TypeVar("T")


class LowRank:
    """``(x A^T) B^T`` of one layer, for ``A`` [r, in] and ``B`` [out, r] with its scaling."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a, self.b = a, b
        self._packed: tuple[Any, Any] | None = None

    def packed(self, layout: Callable[[torch.Tensor], T]) -> tuple[T, T]:
        """Both in the layout that the products of the batch have, made once, in fp32."""
        if self._packed is None:
            self._packed = layout(self.a.detach().float()), layout(self.b.detach().float())
        return self._packed

    @cached_property
    def back(self) -> LowRank:
        """The way back: ``(y B) A``."""
        return LowRank(self.b.detach().t(), self.a.detach().t())

    def add_keeping(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Adds the term for ``x`` [T, in] to ``out``; returns ``x A^T`` [T, r] for gradients."""
        low = F.linear(x, self.a)
        out.addmm_(low, self.b.t())  # in place: another [T, out] would cost memory
        return low

    def add(self, out: torch.Tensor, x: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Adds the term for inputs ``x`` [T, in], or some ``rows`` [R] of it, to ``out``.

        In fp32 whatever the dtype of the model, with values of that dtype: for the few rows of
        decoding the small products are faster so.
        """
        a, b = self.by_column
        if rows is not None:
            count = len(rows)
            part = F.pad(x[rows].float(), (0, 0, 0, filling(count)))
            added = F.linear(F.linear(part, a), b)[:count]
            out.index_copy_(0, rows, (out[rows] + added).to(out.dtype))
            return
        low = F.linear(x.float(), a)
        if out.dtype == torch.float32:
            out.addmm_(low, b.t())
        else:
            out.add_(F.linear(low, b))

    @cached_property
    def by_column(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both with one column after another in memory.

        Layers multiply with their transposes, and for the few rows of decoding a product with a
        matrix that lies row by row takes a third to a half of the time.
        """
        return self.a.float().t().contiguous().t(), self.b.float().t().contiguous().t()


Part = tuple[LowRank, torch.Tensor | None]
"""A term, and the rows [R] that it is for; none is all."""

Terms = Mapping[str, LowRank]
"""Target name -> what an adapter adds there."""


@dataclass(frozen=True)
class Segment:
    """Tokens of a batch that have an adapter in common; ``rows`` [R] indexes them, none is all."""

    terms: Terms
    rows: torch.Tensor | None = None


def parts_of(segments: Sequence[Segment], name: str) -> list[Part]:
    """What is to be added in layer ``name``."""
    return [(s.terms[name], s.rows) for s in segments if name in s.terms]


def filling(rows: int) -> int:
    """Rows of nothing to add to a product, so that it has a multiple of 8.

    torch's products of a few rows go through kernels of their own, which round otherwise, and what
    a sample draws must not depend on its company. Measured with MKL and oneDNN on x86: for
    multiples of 4 a row's result is the same to the bit. And of the kernels that oneDNN makes for
    each number of rows that occurs, an eighth is needed.
    """
    return -rows % 8
