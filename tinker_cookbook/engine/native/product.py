"""Products with a frozen matrix in panels: a product of few rows reads it once and in order.

For what the layout is, and why a row's result is the same in any company, see ``product.c``.
"""

from __future__ import annotations

import ctypes

import torch
from torch.nn import functional as F  # noqa: N812

from tinker_cookbook.engine.native.build import library

_int64, _pointer = ctypes.c_int64, ctypes.c_void_p

_ALONE = 1 << 17
"""Multiplications up to which a second thread costs more than it does."""


class _Call(ctypes.Structure):
    """``Call`` of product.c, in its order."""

    _fields_ = (
        *((name, _int64) for name in ("rows", "inputs", "outputs", "x_stride", "threads", "half")),
        *((name, _pointer) for name in ("x", "panels", "result")),
    )


class Panels:
    """A matrix ``W`` [out, in] of float32 or bfloat16 in panels of outputs, with its products."""

    def __init__(self, weight: torch.Tensor) -> None:
        routines = library("product")
        assert routines is not None, "asked for by ``suits``"
        self._multiply = routines.tinker_multiply
        self._outputs, self._inputs = weight.shape
        width = routines.tinker_panel()
        if surplus := -self._outputs % width:
            weight = F.pad(weight, (0, 0, 0, surplus))
        panels = weight.reshape(-1, width, self._inputs)
        self._panels = panels.transpose(1, 2).contiguous()  # [out / width, in, width]

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x W^T + bias`` in the matrix's dtype, for ``x`` [T, in] of that dtype: [T, out]."""
        out = self.product_fp32(x)
        if bias is not None:
            out += bias
        return out.to(self._panels.dtype)

    def product_fp32(self, x: torch.Tensor) -> torch.Tensor:
        """``x W^T`` in fp32, which is what it is summed in."""
        x = x.float()
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        out = x.new_empty(rows, self._outputs)
        alone = rows * self._panels.numel() <= _ALONE
        call = _Call(
            rows=rows,
            inputs=self._inputs,
            outputs=self._outputs,
            x_stride=x.stride(0),
            threads=1 if alone else torch.get_num_threads(),
            half=self._panels.dtype == torch.bfloat16,
            x=x.data_ptr(),
            panels=self._panels.data_ptr(),
            result=out.data_ptr(),
        )
        self._multiply(ctypes.byref(call))
        return out

    def dense(self) -> torch.Tensor:
        """The matrix in the plain layout, a copy."""
        plain = self._panels.transpose(1, 2).reshape(-1, self._inputs)
        return plain[: self._outputs]
