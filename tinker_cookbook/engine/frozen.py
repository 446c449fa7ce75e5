"""Frozen weight matrices, laid out as their device multiplies them fastest.

A matrix that never changes is worth reordering once. On x86, oneDNN multiplies its own blocked
layout 1.1 to 2.4 times as fast as torch multiplies the plain one, most of all for the few rows of
decoding, and a row's result then hardly depends on how many rows stand beside it.
"""

from __future__ import annotations

import platform
from typing import Any, Protocol

import torch
from torch.nn import functional as F  # noqa: N812

from tinker_cookbook.engine.devices import free_memory_bytes

SMALLEST = 1 << 16
"""Elements from which on packing pays; a call of oneDNN costs some 10 us more than one of torch."""

SPARE_BYTES = 4 << 30
"""Memory that copies for the backward direction leave to activations and to other programs."""


class FrozenWeight(Protocol):
    """A matrix ``W`` [out, in] that takes no gradient."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x W^T + bias`` for ``x`` [T, in], as a new [T, out]."""
        ...

    def back(self, gradient: torch.Tensor) -> torch.Tensor:
        """``gradient W`` for ``gradient`` [T, out], as a new [T, in]."""
        ...

    def rounding_error(self, x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        """``x W^T - rounded``, summed in fp32 and rounded afterwards: what ``product`` lost."""
        ...

    def dense(self) -> torch.Tensor:
        """The matrix in the plain layout."""
        ...


class DenseWeight:
    """The plain layout."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self.shape = (weight.shape[0], weight.shape[1])
        self.dtype, self.device = weight.dtype, weight.device

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x W^T + bias``, [T, out]."""
        return F.linear(x, self._weight, bias)

    def back(self, gradient: torch.Tensor) -> torch.Tensor:
        """``gradient W``, [T, in]."""
        return gradient @ self._weight

    def rounding_error(self, x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        """``x W^T - rounded``."""
        return torch.addmm(rounded, x, self._weight.t(), beta=-1)

    def dense(self) -> torch.Tensor:
        """The matrix in the plain layout."""
        return self._weight


class PackedWeight:
    """oneDNN's layout, a copy for each direction.

    That for ``back`` is made when first needed, and kept where memory allows.
    """

    _ROWS = 256  # what oneDNN chooses the layout for; others multiply it as well

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.dtype, self.device = weight.dtype, weight.device
        self._forward = self._pack(weight)
        self._backward: torch.Tensor | None = None

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x W^T + bias``, [T, out]."""
        return _ops()._linear_pointwise(x, self._forward, bias, "none", [], "")

    def back(self, gradient: torch.Tensor) -> torch.Tensor:
        """``gradient W``, [T, in]."""
        packed = self._backward
        if packed is None:
            packed = self._pack(self.dense().t())
            if free_memory_bytes(self.device) > SPARE_BYTES:
                self._backward = packed  # else made anew each time: slower, and the same bits
        return _ops()._linear_pointwise(gradient, packed, None, "none", [], "")

    def rounding_error(self, x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        """``x W^T - rounded``."""
        return _ops()._linear_pointwise.binary(x, rounded, self._forward, None, "sub")

    def dense(self) -> torch.Tensor:
        """The matrix in the plain layout."""
        return self._forward.to_dense()

    def _pack(self, weight: torch.Tensor) -> torch.Tensor:
        return _ops()._reorder_linear_weight(weight.contiguous(), self._ROWS)


def frozen(weight: torch.Tensor) -> FrozenWeight:
    """The fastest form for the tensor's device and dtype."""
    weight = weight.detach()
    return PackedWeight(weight) if _packs(weight) else DenseWeight(weight)


def _packs(weight: torch.Tensor) -> bool:
    if weight.numel() < SMALLEST:
        return False
    if weight.device.type != "cpu" or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    if not (torch.backends.mkldnn.is_available() and hasattr(_ops(), "_linear_pointwise")):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(_ops()._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _ops() -> Any:
    """oneDNN's operators, those that torch's own compiler emits for frozen models on a CPU."""
    return torch.ops.mkldnn
