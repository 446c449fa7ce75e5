"""Products with frozen weight matrices, in the fastest memory layout for their device.

A frozen matrix is reordered once at load. Panels (``product.c``) are read once and
in order for a few rows, and are as fast as oneDNN and MKL for many rows. Processors with bfloat16
instructions, and machines without a compiler, use oneDNN's blocked layout. In both layouts, a row's
result does not depend on other rows (batch invariance); torch's plain products do not guarantee it.
"""

from __future__ import annotations

import ctypes
import platform
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tinker_cookbook.engine.devices import cpu_bfloat16, free_memory_bytes
from tinker_cookbook.engine.kernels.cpu.build import library
from tinker_cookbook.engine.model.low_rank import LowRank, Part, add_together

SMALLEST = 1 << 16
"""Number of elements from which packing is faster: its call overhead is up to 10 us higher."""

_SPARE_BYTES = 4 << 30
"""Memory that copies for the backward pass must leave free for activations and other programs."""

_ONE_THREAD = 1 << 17
"""Number of multiplications up to which a second thread costs more than it saves."""

_ONEDNN: Any = torch.ops.mkldnn
"""oneDNN's operators, which torch.compile also uses for frozen models on a CPU."""


class Layout(ABC):
    """A matrix ``W`` [out, in] prepared for ``x W^T`` with ``x`` [T, in]."""

    any_rows = False
    """Whether a row's result is bit-identical for any number of rows, not only for multiples
    of 8."""

    copies = True
    """Whether ``transposed`` allocates memory."""

    @abstractmethod
    def __init__(self, weight: Tensor) -> None: ...

    @abstractmethod
    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns ``x W^T + bias`` as a new [T, out] of the matrix's dtype."""

    @abstractmethod
    def product_fp32(self, x: Tensor) -> Tensor:
        """Returns ``x W^T`` [T, out] with fp32 precision, also for half-precision inputs."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Returns the plain matrix [out, in]."""

    def transposed(self) -> Layout:
        """Returns the layout of the transposed matrix."""
        return type(self)(self.dense().t())

    def adapted(self, x: Tensor, bias: Tensor | None, parts: Sequence[Part]) -> Tensor:
        """Returns ``product`` plus low-rank terms, each for its rows, without gradients."""
        return add_low_rank(self.product(x, bias), x, parts)

    def trained(self, x: Tensor, bias: Tensor | None, term: LowRank) -> tuple[Tensor, Tensor]:
        """Returns ``product`` plus one term for all rows, and the term's ``x A^T`` [T, r or
        more]."""
        out = self.product(x, bias)
        return out, term.add_keeping(out, x)


MakeLayout = Callable[[Tensor], Layout]
"""A layout class, or a function that chooses the layout of a matrix [out, in]."""


class DivisibleLayout(Layout):
    """A layout that FSDP can divide among ranks, because it consists of a few tensors."""

    copies = False
    _stored: tuple[str, ...]
    """Attributes with these tensors."""

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors with the contents of the matrix."""
        return [getattr(self, name) for name in self._stored]

    def of(self, tensors: Sequence[Tensor]) -> DivisibleLayout:
        """Returns the same matrix with other copies of its tensors."""
        other = copy(self)
        for name, tensor in zip(self._stored, tensors, strict=True):
            setattr(other, name, tensor)
        return other


MakeDivisible = Callable[[Tensor], DivisibleLayout]


class FrozenWeight:
    """A frozen matrix ``W`` [out, in], in the fastest layout (or a given one) for each
    direction."""

    def __init__(self, weight: Tensor, layout: MakeLayout | None = None) -> None:
        weight = weight.detach()
        self.shape = (weight.shape[0], weight.shape[1])
        self.dtype, self.device = weight.dtype, weight.device
        self.forward = (layout or fastest_layout(weight))(weight)
        """For ``x W^T``."""
        self._backward: Layout | None = None

    @property
    def backward(self) -> Layout:
        """For ``gradient W``: a second copy, created at first use and kept if memory allows."""
        packed = self._backward
        if packed is None:
            packed = self.forward.transposed()
            # If memory is short, create the copy each time: slower, but with the same bits.
            if not packed.copies or free_memory_bytes(self.device) > _SPARE_BYTES:
                self._backward = packed
        return packed


def fastest_layout(weight: Tensor) -> type[Layout]:
    """Returns the layout for a matrix, from its size, dtype, device and this machine."""
    half = weight.dtype == torch.bfloat16
    if not (
        weight.numel() >= SMALLEST
        and weight.device.type == "cpu"
        and platform.machine().lower() in ("x86_64", "amd64")
        and (half or weight.dtype == torch.float32)
    ):
        return _Plain
    # In float32 panels are at least as fast as oneDNN. In bfloat16 without the processor's
    # instructions oneDNN took 2.7 to 4 times as long.
    if not (half and cpu_bfloat16()) and library("product") is not None:
        return _Panels
    if not (torch.backends.mkldnn.is_available() and hasattr(_ONEDNN, "_linear_pointwise")):
        return _Plain
    # In bfloat16, only if oneDNN supports the processor.
    return _OneDnn if not half or _ONEDNN._is_mkldnn_bf16_supported() else _Plain


class _Plain(DivisibleLayout):
    """torch's own layout. Its transpose is a view."""

    _stored = ("_weight",)

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self._weight, bias)

    def product_fp32(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return self.product(x)
        if x.is_cuda:
            return torch.mm(x, self._weight.t(), out_dtype=torch.float32)
        # CPUs have no such product: a second product computes the rounding error of the first.
        rounded = self.product(x)
        lost = torch.addmm(rounded, x, self._weight.t(), beta=-1)
        return rounded.float().add_(lost)

    def dense(self) -> Tensor:
        return self._weight


class _OneDnn(Layout):
    """oneDNN's blocked layout."""

    _ROWS = 256  # oneDNN chooses the layout for this number of rows; any number works

    def __init__(self, weight: Tensor) -> None:
        self._packed = _ONEDNN._reorder_linear_weight(weight.contiguous(), self._ROWS)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return _ONEDNN._linear_pointwise(x, self._packed, bias, "none", [], "")

    def product_fp32(self, x: Tensor) -> Tensor:
        rounded = self.product(x)
        if x.dtype == torch.float32:
            return rounded
        # As in ``_Plain``: oneDNN rounds only after the subtraction, so this is the rounding error.
        lost = _ONEDNN._linear_pointwise.binary(x, rounded, self._packed, None, "sub")
        return rounded.float().add_(lost)

    def dense(self) -> Tensor:
        return self._packed.to_dense()


class _Panels(Layout):
    """Panels of a few outputs each (``product.c``), for float32 and bfloat16. All sums are fp32,
    and low-rank terms are added in the same call."""

    any_rows = True
    _codes = 0
    """Address of ``struct Codes`` for panels in 4 bits."""

    def __init__(self, weight: Tensor) -> None:
        self._outputs, self._inputs = weight.shape
        width = _routines().tinker_panel()
        # Pad to whole panels, so that the kernel loads full vectors; ``dense`` drops the padding.
        if surplus := -self._outputs % width:
            weight = F.pad(weight, (0, 0, 0, surplus))
        panels = weight.reshape(-1, width, self._inputs)
        self.panels = panels.transpose(1, 2).contiguous()  # [out / width, in, width]

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.adapted(x, bias, ())

    def product_fp32(self, x: Tensor) -> Tensor:
        return self._compute(x, ())[0]

    def adapted(self, x: Tensor, bias: Tensor | None, parts: Sequence[Part]) -> Tensor:
        return self._rounded(self._compute(x, parts)[0], bias)

    def trained(self, x: Tensor, bias: Tensor | None, term: LowRank) -> tuple[Tensor, Tensor]:
        if term.owners is not None:  # the kernel has no mask
            return super().trained(x, bias, term)
        out, low = self._compute(x, [(term, 0, len(x))])
        return self._rounded(out, bias), low.view(len(x), -1)

    def dense(self) -> Tensor:
        return self.panels.transpose(1, 2).reshape(-1, self._inputs)[: self._outputs]

    def _compute(self, x: Tensor, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        # Sums stay fp32 until bias and adapters are added, and are rounded once.
        out = x.new_empty(x.shape[0], self._outputs, dtype=torch.float32)
        return out, _add(out, x, parts, self.panels, self._codes)

    def _rounded(self, out: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None:
            out += bias
        return out.to(self.panels.dtype)


def add_low_rank(out: Tensor, x: Tensor, parts: Sequence[Part]) -> Tensor:
    """Returns ``out`` [T, out] (may be overwritten) plus low-rank terms of ``x`` [T, in],
    each for its rows."""
    if not parts:
        return out
    if out.device.type != "cpu":
        add_together(out, x, parts)
        return out
    if library("product") is not None:
        # The kernel accumulates in fp32.
        wide = out.float()
        _add(wide, x, parts)
        return wide.to(out.dtype)
    for low_rank, first, end in parts:
        low_rank.add(out[first:end], x[first:end])
    return out


class _PackedTerm(NamedTuple):
    """``A`` and ``B`` of a term in panels, and their addresses."""

    rank: int
    width: int
    """The rank, rounded up to whole panels."""
    a: int
    b: int
    panels: tuple[Tensor, Tensor]


def _add(
    out: Tensor, x: Tensor, parts: Sequence[Part], panels: Tensor | None = None, codes: int = 0
) -> Tensor:
    """Computes ``out`` (fp32) as ``x`` times the matrix, if given, plus the terms of ``parts``.

    Returns the concatenated ``x A^T`` of all terms, with rows zero-padded to whole panels.
    """
    # All sums are fp32, also for a matrix in bfloat16; inputs need unit stride.
    x = x.float()
    x = x if x.stride(1) == 1 else x.contiguous()
    (rows, inputs), outputs = x.shape, out.shape[1]
    multiplications = 0 if panels is None else rows * inputs * outputs
    adapters: list[int] = []
    width = 0
    for low_rank, first, end in parts:
        # Each term is packed once. The term keeps the tensors alive, because only addresses are
        # passed.
        if low_rank.packed is None:
            a, b = (_Panels(side.detach().float()).panels for side in (low_rank.a, low_rank.b))
            filled = a.shape[0] * a.shape[2]
            low_rank.packed = _PackedTerm(b.shape[1], filled, a.data_ptr(), b.data_ptr(), (a, b))
        packed, count = low_rank.packed, end - first
        adapters += (first, count, packed.rank, packed.a, packed.b)
        width += count * packed.width
        multiplications += count * packed.rank * (inputs + outputs)
    low = x.new_empty(width)
    # Fields of ``struct Call`` of product.c, in order; each has 8 bytes.
    call = (
        *(rows, inputs, x.stride(0), panels is not None and panels.dtype == torch.bfloat16),
        *(outputs, len(parts), torch.get_num_threads() if multiplications > _ONE_THREAD else 1),
        *(x.data_ptr(), 0 if panels is None else panels.data_ptr(), codes),
        *(out.data_ptr(), low.data_ptr(), *adapters),
    )
    numbers = array("q", call)
    _routines().tinker_add(numbers.buffer_info()[0])
    return low


@cache
def _routines() -> ctypes.CDLL:
    routines = library("product")
    assert routines is not None, "panels exist only where the library does"
    routines.tinker_add.argtypes = [ctypes.c_void_p]
    routines.tinker_decode.argtypes = [ctypes.c_int64] * 6
    return routines
