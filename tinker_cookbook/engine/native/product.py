"""Products with a frozen matrix in panels: a product of few rows reads it once and in order.

For what the layout is, and why a row's result is the same in any company, see ``product.c``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch.nn import functional as F  # noqa: N812

from tinker_cookbook.engine.low_rank import LowRank, Part
from tinker_cookbook.engine.native.build import library

_int64, _pointer = ctypes.c_int64, ctypes.c_void_p

_ALONE = 1 << 17
"""Multiplications up to which a second thread costs more than it does."""


class _Term(ctypes.Structure):
    """``Term`` of product.c, in its order; so are the next two."""

    _fields_ = (
        *((name, _int64) for name in ("inputs", "x_stride", "half")),
        *((name, _pointer) for name in ("x", "panels")),
    )


class _Sum(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("terms", "outputs", "goes_on")),
        ("result", _pointer),
        ("term", _Term * 2),
    )


class _Call(ctypes.Structure):
    _fields_ = (*((name, _int64) for name in ("rows", "sums", "threads")), ("sum", _Sum * 2))


class Panels:
    """A matrix ``W`` [out, in] of float32 or bfloat16 in panels of outputs, with its products.

    They are summed in fp32, and rounded to the dtype at the end.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._outputs, self._inputs = weight.shape
        width = _routines().tinker_panel()
        if surplus := -self._outputs % width:
            weight = F.pad(weight, (0, 0, 0, surplus))
        panels = weight.reshape(-1, width, self._inputs)
        self._panels = panels.transpose(1, 2).contiguous()  # [out / width, in, width]

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x W^T + bias`` in the matrix's dtype, for ``x`` [T, in] of that dtype: [T, out]."""
        return self.adapted(x, bias, ())

    def product_fp32(self, x: torch.Tensor) -> torch.Tensor:
        """``x W^T`` in fp32."""
        x = _in_rows(x)
        out = x.new_empty(x.shape[0], self._outputs)
        _add(x.shape[0], [_sum(out, self._term(x))])
        return out

    def adapted(
        self, x: torch.Tensor, bias: torch.Tensor | None, parts: Sequence[Part]
    ) -> torch.Tensor:
        """``product`` with low-rank terms, each for its rows."""
        x = _in_rows(x)
        if len(parts) == 1 and parts[0][1] is None:
            out, _ = self._with_low_rank(x, parts[0][0])
        else:
            out = self.product_fp32(x)
            for low_rank, rows in parts:
                own = out if rows is None else out[rows]
                _add_low_rank(low_rank, x if rows is None else x[rows], own)
                if rows is not None:
                    out[rows] = own
        if bias is not None:
            out += bias
        return out.to(self._panels.dtype)

    def trained(
        self, x: torch.Tensor, bias: torch.Tensor | None, term: LowRank
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``product`` with one term, and its ``x A^T`` in fp32, filled up to whole panels."""
        out, low = self._with_low_rank(_in_rows(x), term)
        if bias is not None:
            out += bias
        return out.to(self._panels.dtype), low

    def dense(self) -> torch.Tensor:
        """The matrix in the plain layout, a copy."""
        plain = self._panels.transpose(1, 2).reshape(-1, self._inputs)
        return plain[: self._outputs]

    def _term(self, x: torch.Tensor) -> _Term:
        half = self._panels.dtype == torch.bfloat16
        return _Term(self._inputs, x.stride(0), half, x.data_ptr(), self._panels.data_ptr())

    def _with_low_rank(
        self, x: torch.Tensor, low_rank: LowRank
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The product of ``x`` [T, in] with the term in it, fp32, and the term's ``x A^T``."""
        out = x.new_empty(x.shape[0], self._outputs)
        return out, _add_low_rank(low_rank, x, out, self._term(x))


def _add_low_rank(
    low_rank: LowRank, x: torch.Tensor, out: torch.Tensor, first: _Term | None = None
) -> torch.Tensor:
    """``(x A^T) B^T``, added to the first term or, without one, to what ``out`` holds.

    Returns ``x A^T`` [T, r], filled up to whole panels with zeros.
    """
    a, b = low_rank.packed(Panels)
    low = x.new_empty(x.shape[0], a._panels.shape[0] * a._panels.shape[2])
    terms = [b._term(low)] if first is None else [first, b._term(low)]
    _add(x.shape[0], [_sum(low, a._term(x)), _sum(out, *terms, goes_on=first is None)])
    return low


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x if x.stride(1) == 1 else x.contiguous()


def _sum(result: torch.Tensor, *terms: _Term, goes_on: bool = False) -> _Sum:
    return _Sum(len(terms), result.shape[1], goes_on, result.data_ptr(), (_Term * 2)(*terms))


def _add(rows: int, sums: list[_Sum]) -> None:
    last = sums[-1]
    multiplications = rows * last.outputs * last.term[0].inputs
    threads = torch.get_num_threads() if multiplications > _ALONE else 1
    _routines().tinker_add(ctypes.byref(_Call(rows, len(sums), threads, (_Sum * 2)(*sums))))


def _routines() -> ctypes.CDLL:
    routines = library("product")
    assert routines is not None, "whoever packs has asked"
    return routines
