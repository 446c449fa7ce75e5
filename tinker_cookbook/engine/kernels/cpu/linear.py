"""Products with frozen weight matrices, in the fastest memory layout for their device.

A frozen matrix is reordered once at load. Panels (``product.c``) are read once and
in order for a few rows, and are as fast as oneDNN and MKL for many rows. In bfloat16, processors
with AMX, and machines without a compiler, use oneDNN's blocked layout. In both layouts, a row's
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
from tinker_cookbook.engine.kernels.cpu.build import KernelCall, library
from tinker_cookbook.engine.kernels.cpu.huge_pages import in_huge_pages
from tinker_cookbook.engine.model.low_rank import LowRank, Part, add_together

SMALLEST = 1 << 9
"""Number of elements from which matrices are packed. A call of its own is up to 5 us slower below
1 << 16, but a sampling step needs packed matrices to be one call."""

_SPARE_BYTES = 4 << 30
"""Memory that copies for the backward pass must leave free for activations and other programs."""

ONE_THREAD = 1 << 17
"""Number of multiplications up to which a second thread costs more than it saves."""

_PAIRS = 2
"""Kind of panels in product.c; 0 is float32, 1 bfloat16."""

_ONEDNN: Any = torch.ops.mkldnn
"""oneDNN's operators, which torch.compile also uses for frozen models on a CPU."""


class Layout(ABC):
    """A matrix ``W`` [out, in] prepared for ``x W^T`` with ``x`` [T, in]."""

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


class ShardableLayout(Layout):
    """A layout that FSDP can shard among processes, because it consists of a few tensors."""

    copies = False
    _stored: tuple[str, ...]
    """Attributes with these tensors."""

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors with the contents of the matrix."""
        return [getattr(self, name) for name in self._stored]

    def of(self, tensors: Sequence[Tensor]) -> ShardableLayout:
        """Returns the same matrix with other copies of its tensors."""
        other = copy(self)
        for name, tensor in zip(self._stored, tensors, strict=True):
            setattr(other, name, tensor)
        return other


MakeShardable = Callable[[Tensor], ShardableLayout]


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
    # Panels are at least as fast as oneDNN, except that AMX multiplies whole tiles of bfloat16.
    # Without the processor's instructions for it oneDNN took 2.7 to 4 times as long.
    if library() is not None and (not (half and cpu_bfloat16()) or _multiplies_pairs(weight)):
        return _Panels
    if not (torch.backends.mkldnn.is_available() and hasattr(_ONEDNN, "_linear_pointwise")):
        return _Plain
    # In bfloat16, only if oneDNN supports the processor.
    return _OneDnn if not half or _ONEDNN._is_mkldnn_bf16_supported() else _Plain


class _Plain(ShardableLayout):
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
        return _ONEDNN._linear_pointwise(_whole(x), self._packed, bias, "none", [], "")[: len(x)]

    def product_fp32(self, x: Tensor) -> Tensor:
        x, count = _whole(x), len(x)
        rounded = self.product(x)
        if x.dtype == torch.float32:
            return rounded[:count]
        # As in ``_Plain``: oneDNN rounds only after the subtraction, so this is the rounding error.
        lost = _ONEDNN._linear_pointwise.binary(x, rounded, self._packed, None, "sub")
        return rounded.float().add_(lost)[:count]

    def adapted(self, x: Tensor, bias: Tensor | None, parts: Sequence[Part]) -> Tensor:
        if not parts:
            return self.product(x, bias)
        terms = add_low_rank(x.new_zeros(len(x), self._packed.shape[0]), x, parts)
        return self._plus(terms, x, bias)

    def trained(self, x: Tensor, bias: Tensor | None, term: LowRank) -> tuple[Tensor, Tensor]:
        low = term.low(x)
        return self._plus(F.linear(low, term.b), x, bias), low

    def _plus(self, added: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        # Rounded once, as in ``_Panels``: a small term would be lost in a rounded product.
        return _ONEDNN._linear_pointwise.binary(x, added, self._packed, bias, "add")

    def dense(self) -> Tensor:
        return self._packed.to_dense()


def _whole(x: Tensor) -> Tensor:
    """Pads ``x`` [T, in] to a multiple of 8 rows."""
    # oneDNN uses other kernels for products of a few rows, which round differently, but a sample
    # must not depend on the rest of its batch. For multiples of 4 a row's result was bit-identical.
    # Also, oneDNN compiles a kernel for each number of rows that occurs.
    return F.pad(x, (0, 0, 0, surplus)) if (surplus := -len(x) % 8) else x


class _Panels(Layout):
    """Panels of a few outputs each (``product.c``), for float32 and bfloat16. All sums are fp32,
    and low-rank terms are added in the same call."""

    pairs = False
    codes = 0
    """Address of ``struct Codes`` for panels in 4 bits."""

    def __init__(self, weight: Tensor) -> None:
        self.outputs, self.inputs = weight.shape
        self.dtype, self.pairs = weight.dtype, _multiplies_pairs(weight)
        self.panels = in_huge_pages(_panels(weight, self.pairs))

    @property
    def fields(self) -> dict[str, int]:
        """The matrix, in ``struct Product`` of product.c."""
        return {
            "inputs": self.inputs // 2 if self.pairs else self.inputs,
            "kind": _PAIRS if self.pairs else int(self.panels.dtype == torch.bfloat16),
            "outputs": self.outputs,
            "panels": self.panels.data_ptr(),
            "codes": self.codes,
        }

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._compute(x, bias, (), self.dtype)[0]

    def product_fp32(self, x: Tensor) -> Tensor:
        return self._compute(x, None, (), torch.float32)[0]

    def adapted(self, x: Tensor, bias: Tensor | None, parts: Sequence[Part]) -> Tensor:
        return self._compute(x, bias, parts, self.dtype)[0]

    def trained(self, x: Tensor, bias: Tensor | None, term: LowRank) -> tuple[Tensor, Tensor]:
        if term.owners is None:
            out, low = self._compute(x, bias, [(term, 0, len(x))], self.dtype)
            return out, low[:, : len(term.a)].contiguous()  # it is kept for the gradients
        own = list(term.owners.parts())
        parts = [(LowRank(term.a[r], term.b[:, r]), rows.start, rows.stop) for rows, r in own]
        out, found = self._compute(x, bias, parts, self.dtype)
        low = found.new_zeros(len(x), len(term.a))
        for rows, ranks in own:
            low[rows, ranks] = found[rows, : ranks.stop - ranks.start]
        return out, low

    def dense(self) -> Tensor:
        rows = self.panels.transpose(1, 2).flatten(0, 1)[: self.outputs]
        return rows.contiguous().view(self.dtype)

    def _compute(
        self, x: Tensor, bias: Tensor | None, parts: Sequence[Part], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        out = x.new_empty(x.shape[0], self.outputs, dtype=dtype)
        return out, _add(out, x, parts, self, bias)


def _multiplies_pairs(x: Tensor) -> bool:
    """Returns whether ``x`` [rows, in] is multiplied in pairs of bfloat16 numbers."""
    return x.dtype == torch.bfloat16 and x.shape[1] % 2 == 0 and _has_pairs()


@cache
def _has_pairs() -> bool:
    # Not with AMX: see ``fastest_layout``.
    wanted = cpu_bfloat16() == "avx512_bf16" and library() is not None
    return wanted and bool(_routines().tinker_pairs())


def _panels(weight: Tensor, pairs: bool) -> Tensor:
    """Returns a view of a matrix [out, in] as panels [out / width, in, width]; a pair of inputs is
    one element."""
    width = _routines().tinker_panel()
    # Pad to whole panels, so that the kernel loads full vectors.
    if surplus := -len(weight) % width:
        weight = F.pad(weight, (0, 0, 0, surplus))
    if pairs:
        weight = weight.contiguous().view(torch.int32)
    return weight.reshape(-1, width, weight.shape[1]).transpose(1, 2)


def add_low_rank(out: Tensor, x: Tensor, parts: Sequence[Part]) -> Tensor:
    """Returns ``out`` [T, out] (may be overwritten) plus low-rank terms of ``x`` [T, in],
    each for its rows."""
    if not parts:
        return out
    half_or_float = out.dtype in (torch.float32, torch.bfloat16)
    if out.device.type == "cpu" and half_or_float and library() is not None:
        out = out.contiguous()
        _add(out, x, parts)  # with sums in fp32
    else:
        add_together(out, x, parts)
    return out


class PackedTerm(NamedTuple):
    """``A`` and ``B`` of a term in panels, and the fields of ``struct LowRank`` of product.c."""

    a: int
    b: int
    rank: int
    width: int
    """The rank, rounded up to whole panels."""
    pairs: bool
    panels: tuple[Tensor, Tensor]


def packed_term(term: LowRank, pairs: bool) -> PackedTerm:
    """Packs a term once, for inputs in pairs or in fp32. The term keeps the tensors alive, because
    kernels get only addresses."""
    if term.packed is None or term.packed.pairs != pairs:
        a, b = term.a.detach(), term.b.detach()
        if not pairs:
            a, b = a.float(), b.float()
        elif len(a) % 2:
            b = F.pad(b, (0, 1))
        a, b = _panels(a, pairs).contiguous(), _panels(b, pairs).contiguous()
        width = a.shape[0] * a.shape[2]
        term.packed = PackedTerm(a.data_ptr(), b.data_ptr(), b.shape[1], width, pairs, (a, b))
    return term.packed


class CallOfProduct(KernelCall):
    """Mirrors ``struct Product`` of product.c."""

    kernel = 1
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "x_stride", "kind", "outputs")),
        *((name, ctypes.c_int64) for name in ("parts", "threads", "low_width", "half")),
        *((name, ctypes.c_void_p) for name in ("x", "panels", "codes", "bias", "out", "low")),
        *((name, ctypes.c_void_p) for name in ("part", "term")),
    )


def _add(
    out: Tensor,
    x: Tensor,
    parts: Sequence[Part],
    matrix: _Panels | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Computes ``out`` (contiguous) as ``x`` times the matrix plus the bias, if given, plus the
    terms of ``parts``.

    Returns ``x A^T`` of each part's rows [T, rank], zero-padded to whole panels.
    """
    pairs = _multiplies_pairs(x) if matrix is None else matrix.pairs
    # All sums are fp32, also for a matrix in bfloat16; inputs need unit stride.
    x = x.contiguous().view(torch.int32) if pairs else x.float()
    x = x if x.stride(1) == 1 else x.contiguous()
    bias = None if bias is None else bias.float().contiguous()
    (rows, inputs), outputs = x.shape, out.shape[1]
    multiplications = 0 if matrix is None else rows * inputs * outputs
    where, terms = array("q"), array("q")
    width = 0
    for low_rank, first, end in parts:
        packed = packed_term(low_rank, pairs)
        where.extend((first, end))
        terms.extend(packed[:3])
        width = max(width, packed.width)
        multiplications += (end - first) * packed.rank * (inputs + outputs)
    low = x.new_empty(rows, width, dtype=torch.bfloat16 if pairs else torch.float32)
    fields = {"inputs": inputs, "kind": _PAIRS * pairs, "outputs": outputs}
    call = CallOfProduct(rows, **(fields if matrix is None else matrix.fields))
    call.threads = torch.get_num_threads() if multiplications > ONE_THREAD else 1
    call.x, call.x_stride, call.out = x.data_ptr(), x.stride(0), out.data_ptr()
    call.half = out.dtype == torch.bfloat16
    call.bias = None if bias is None else bias.data_ptr()
    call.parts, call.low, call.low_width = len(parts), low.data_ptr(), width
    call.part, call.term = where.buffer_info()[0], terms.buffer_info()[0]
    call.run(call.threads)
    return low


@cache
def _routines() -> ctypes.CDLL:
    routines = library()
    assert routines is not None, "panels exist only where the library does"
    routines.tinker_decode.argtypes = [ctypes.c_int64] * 6
    return routines
