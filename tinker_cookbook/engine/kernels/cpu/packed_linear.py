"""Frozen weight matrices in the memory layout that is fastest on their device.

A matrix that never changes is reordered once at load. Our own panels (``product.c``) are read once
and in order for a few rows, and are as fast as oneDNN and MKL for many. With bfloat16 instructions,
or without a compiler, oneDNN's blocked layout is used. In both layouts a row's result does not
depend on other rows (batch invariance), which torch's plain products do not guarantee.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.nn import functional as F  # noqa: N812

from tinker_cookbook.engine.devices import cpu_bfloat16, free_memory_bytes
from tinker_cookbook.engine.kernels.cpu.build import library
from tinker_cookbook.engine.kernels.cpu.product import Panels, add_low_rank
from tinker_cookbook.engine.model.low_rank import LowRank, Part

SMALLEST = 1 << 16
"""Elements from which packing is faster; a call costs up to 10 us more than torch's."""

SPARE_BYTES = 4 << 30
"""Memory that backward copies must leave free for activations and other programs."""


class Layout(Protocol):
    """Layout of a matrix ``W`` [out, in] for products in one direction."""

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Returns ``x W^T + bias`` for ``x`` [T, in], as a new [T, out]."""
        ...

    def adapted(
        self, x: torch.Tensor, bias: torch.Tensor | None, parts: Sequence[Part]
    ) -> torch.Tensor:
        """Returns ``product`` with low-rank terms, each for its rows."""
        ...

    def trained(
        self, x: torch.Tensor, bias: torch.Tensor | None, term: LowRank
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``product`` with one term for all rows, and its ``x A^T`` [T, r or more]."""
        ...

    def product_fp32(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x W^T`` with fp32's precision, also where both are of half precision."""
        ...

    def dense(self) -> torch.Tensor:
        """Returns the matrix in the plain layout."""
        ...


class FrozenWeight(Layout, Protocol):
    """Matrix ``W`` [out, in] without a gradient."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    def back(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns ``gradient W`` for ``gradient`` [T, out], as a new [T, in]."""
        ...

    def trained_back(
        self, gradient: torch.Tensor, term: LowRank
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``back`` through ``trained``, and its ``gradient B`` [T, r or more]."""
        ...


class DenseWeight:
    """The plain layout."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self.shape = (weight.shape[0], weight.shape[1])
        self.dtype, self.device = weight.dtype, weight.device

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Returns ``x W^T + bias``, [T, out]."""
        return F.linear(x, self._weight, bias)

    def back(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns ``gradient W``, [T, in]."""
        return gradient @ self._weight

    def product_fp32(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x W^T`` in fp32: CUDA has such a product, a CPU gets what rounding lost by
        another."""
        if x.dtype == torch.float32:
            return self.product(x)
        if x.is_cuda:
            return torch.mm(x, self._weight.t(), out_dtype=torch.float32)
        rounded = self.product(x)
        lost = torch.addmm(rounded, x, self._weight.t(), beta=-1)
        return rounded.float().add_(lost)

    def adapted(
        self, x: torch.Tensor, bias: torch.Tensor | None, parts: Sequence[Part]
    ) -> torch.Tensor:
        """Returns ``product`` with low-rank terms, each for its rows."""
        return add_parts(self.product(x, bias), x, parts)

    def trained(
        self, x: torch.Tensor, bias: torch.Tensor | None, term: LowRank
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``product`` with one term, and its ``x A^T``."""
        out = self.product(x, bias)
        return out, term.add_keeping(out, x)

    def trained_back(
        self, gradient: torch.Tensor, term: LowRank
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``back`` through ``trained``, and its ``gradient B``."""
        out = self.back(gradient)
        return out, term.back.add_keeping(out, gradient)

    def dense(self) -> torch.Tensor:
        """Returns the matrix in the plain layout."""
        return self._weight


class OneDnn:
    """oneDNN's blocked layout."""

    _ROWS = 256  # what oneDNN chooses the layout for; others multiply it as well

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = _ops()._reorder_linear_weight(weight.contiguous(), self._ROWS)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Returns ``x W^T + bias``, [T, out]."""
        return _ops()._linear_pointwise(x, self._packed, bias, "none", [], "")

    def product_fp32(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x W^T``; in half precision by a second product, of what rounding the first
        lost."""
        rounded = self.product(x)
        if x.dtype == torch.float32:
            return rounded
        lost = _ops()._linear_pointwise.binary(x, rounded, self._packed, None, "sub")
        return rounded.float().add_(lost)

    def adapted(
        self, x: torch.Tensor, bias: torch.Tensor | None, parts: Sequence[Part]
    ) -> torch.Tensor:
        """Returns ``product`` with low-rank terms, each for its rows."""
        return add_parts(self.product(x, bias), x, parts)

    def trained(
        self, x: torch.Tensor, bias: torch.Tensor | None, term: LowRank
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``product`` with one term, and its ``x A^T``."""
        out = self.product(x, bias)
        return out, term.add_keeping(out, x)

    def dense(self) -> torch.Tensor:
        """Returns the matrix in the plain layout."""
        return self._packed.to_dense()


class PackedWeight:
    """Packed matrix with one copy for each direction.

    The backward copy is made at first use and kept if memory allows.
    """

    def __init__(self, weight: torch.Tensor, layout: Callable[[torch.Tensor], Layout]) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.dtype, self.device = weight.dtype, weight.device
        self._layout = layout
        self._forward = layout(weight)
        self._backward: Layout | None = None

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Returns ``x W^T + bias``, [T, out]."""
        return self._forward.product(x, bias)

    def back(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns ``gradient W``, [T, in]."""
        return self._transposed().product(gradient)

    def trained(
        self, x: torch.Tensor, bias: torch.Tensor | None, term: LowRank
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``product`` with one term, and its ``x A^T``."""
        return self._forward.trained(x, bias, term)

    def trained_back(
        self, gradient: torch.Tensor, term: LowRank
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``back`` through ``trained``, and its ``gradient B``."""
        return self._transposed().trained(gradient, None, term.back)

    def adapted(
        self, x: torch.Tensor, bias: torch.Tensor | None, parts: Sequence[Part]
    ) -> torch.Tensor:
        """Returns ``product`` with low-rank terms, each for its rows."""
        return self._forward.adapted(x, bias, parts)

    def product_fp32(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x W^T`` with fp32's precision."""
        return self._forward.product_fp32(x)

    def dense(self) -> torch.Tensor:
        """Returns the matrix in the plain layout."""
        return self._forward.dense()

    def _transposed(self) -> Layout:
        packed = self._backward
        if packed is None:
            packed = self._layout(self.dense().t())
            if free_memory_bytes(self.device) > SPARE_BYTES:
                self._backward = packed  # else made anew each time: slower, and the same bits
        return packed


def frozen(weight: torch.Tensor) -> FrozenWeight:
    """Returns the fastest layout for the tensor's device and dtype."""
    weight = weight.detach()
    layout = _layout(weight)
    return DenseWeight(weight) if layout is None else PackedWeight(weight, layout)


def _layout(weight: torch.Tensor) -> Callable[[torch.Tensor], Layout] | None:
    """Returns the packed layout for the matrix; ``None``: plain layout."""
    if weight.numel() < SMALLEST or weight.device.type != "cpu":
        return None
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    half = weight.dtype == torch.bfloat16
    if not (half or weight.dtype == torch.float32):
        return None
    if not (half and cpu_bfloat16()) and library("product") is not None:
        return Panels
    if not (torch.backends.mkldnn.is_available() and hasattr(_ops(), "_linear_pointwise")):
        return None
    return OneDnn if not half or _ops()._is_mkldnn_bf16_supported() else None


def add_parts(out: torch.Tensor, x: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
    """Adds low-rank terms of ``x`` [T, in] to ``out`` [T, out], each for its rows."""
    if not parts:
        return out
    if out.device.type == "cpu" and library("product") is not None:
        wide = out.float()
        add_low_rank(wide, x, parts)
        return wide.to(out.dtype)
    for low_rank, first, end in parts:
        low_rank.add(out[first:end], x[first:end])
    return out


def _ops() -> Any:
    """Returns oneDNN's operators, which torch.compile also uses for frozen models on a CPU."""
    return torch.ops.mkldnn
