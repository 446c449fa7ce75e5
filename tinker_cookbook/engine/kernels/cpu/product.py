"""Products with a frozen matrix in panels, read once and in order for a few rows.

``product.c`` describes the layout and why a row's result is batch-invariant.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812

from tinker_cookbook.engine.kernels.cpu.build import library
from tinker_cookbook.engine.model.low_rank import LowRank, Part

_ALONE = 1 << 17
"""Multiplications up to which a second thread costs more than it saves."""


class Panels:
    """Matrix ``W`` [out, in] of float32 or bfloat16 in panels of outputs.

    Products are summed in fp32 and rounded to the dtype at the end.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._outputs, self._inputs = weight.shape
        width = _routines().tinker_panel()
        if surplus := -self._outputs % width:
            weight = F.pad(weight, (0, 0, 0, surplus))
        panels = weight.reshape(-1, width, self._inputs)
        self._panels = panels.transpose(1, 2).contiguous()  # [out / width, in, width]

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Returns ``x W^T + bias`` in the matrix's dtype, for ``x`` [T, in] of that dtype: [T,
        out]."""
        return self.adapted(x, bias, ())

    def product_fp32(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x W^T`` in fp32."""
        return self._with_low_rank(_in_rows(x), ())[0]

    def adapted(
        self, x: torch.Tensor, bias: torch.Tensor | None, parts: Sequence[Part]
    ) -> torch.Tensor:
        """Returns ``product`` with low-rank terms, each for its rows."""
        out, _ = self._with_low_rank(_in_rows(x), parts)
        if bias is not None:
            out += bias
        return out.to(self._panels.dtype)

    def trained(
        self, x: torch.Tensor, bias: torch.Tensor | None, term: LowRank
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``product`` with one term, and its ``x A^T`` in fp32, filled up to whole
        panels."""
        out, low = self._with_low_rank(_in_rows(x), [(term, 0, len(x))])
        if bias is not None:
            out += bias
        return out.to(self._panels.dtype), low.view(len(x), -1)

    def dense(self) -> torch.Tensor:
        """Returns the matrix in the plain layout, a copy."""
        plain = self._panels.transpose(1, 2).reshape(-1, self._inputs)
        return plain[: self._outputs]

    def _with_low_rank(
        self, x: torch.Tensor, parts: Sequence[Part]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the product of ``x`` [T, in] with the terms in it, fp32, and what ``_add``
        returns."""
        out = x.new_empty(x.shape[0], self._outputs)
        return out, _add(out, x, parts, self._panels)


def add_low_rank(out: torch.Tensor, x: torch.Tensor, parts: Sequence[Part]) -> None:
    """Adds the terms for their rows of ``x`` [T, in] to ``out`` [T, out] in fp32."""
    _add(out, _in_rows(x), parts)


def _add(
    out: torch.Tensor, x: torch.Tensor, parts: Sequence[Part], panels: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes ``out`` from the matrix, or else adds to what it holds, with the terms.

    Returns the terms' ``x A^T`` one after the other, rows filled up to whole panels with zeros.
    """
    (rows, inputs), outputs = x.shape, out.shape[1]
    multiplications = 0 if panels is None else rows * inputs * outputs
    adapters: list[int] = []
    width = 0
    for low_rank, first, end in parts:
        packed, count = low_rank.packed(_pack), end - first
        adapters += (first, count, packed.rank, packed.a, packed.b)
        width += count * packed.width
        multiplications += count * packed.rank * (inputs + outputs)
    low = x.new_empty(width)
    call = (
        *(rows, inputs, x.stride(0), panels is not None and panels.dtype == torch.bfloat16),
        *(outputs, len(parts), torch.get_num_threads() if multiplications > _ALONE else 1),
        *(x.data_ptr(), 0 if panels is None else panels.data_ptr()),
        *(out.data_ptr(), low.data_ptr(), *adapters),
    )
    numbers = array("q", call)  # ``Call`` of product.c, in its order
    _routines().tinker_add(numbers.buffer_info()[0])
    return low


class _Packed(NamedTuple):
    """Packed ``A`` and ``B``; ``width`` is the rank rounded up to whole panels."""

    rank: int
    width: int
    a: int
    b: int
    panels: tuple[torch.Tensor, torch.Tensor]


def _pack(low_rank: LowRank) -> _Packed:
    a, b = (Panels(side.detach().float())._panels for side in (low_rank.a, low_rank.b))
    return _Packed(b.shape[1], a.shape[0] * a.shape[2], a.data_ptr(), b.data_ptr(), (a, b))


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x if x.stride(1) == 1 else x.contiguous()


@cache
def _routines() -> ctypes.CDLL:
    routines = library("product")
    assert routines is not None, "whoever packs has asked"
    routines.tinker_add.argtypes = [ctypes.c_void_p]
    return routines
