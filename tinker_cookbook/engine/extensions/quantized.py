"""Frozen matrices in 4 or 8 bits, by bitsandbytes (extra ``quantized``); embeddings in 8 bits.

Sampling and both passes of training read the same quantised weights, and each product dequantises
them to the model's dtype first, so all use the same numbers.

Sources: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs" (arXiv 2305.14314)
for ``nf4``; Dettmers et al. 2022, "LLM.int8()" (arXiv 2208.07339) for ``int8``, from which
the weight scales are used; inputs are not quantised.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from copy import copy
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tinker_cookbook.engine.device_names import NF4_BLOCK
from tinker_cookbook.engine.kernels.cpu.huge_pages import in_huge_pages
from tinker_cookbook.engine.kernels.cpu.linear import (
    FrozenWeight,
    Layout,
    MakeLayout,
    MakeShardable,
    ShardableLayout,
    _has_pairs,
    _Panels,
    _panels,
    _Plain,
    _routines,
    fastest_layout,
)
from tinker_cookbook.exceptions import ConfigurationError, install_command

_PART_BYTES_CPU, _PART_BYTES_GPU = 2 << 20, 64 << 20
"""Size of the part of a table that is converted at a time. On a CPU it stays in the cache, so a
decode step takes as long as with a table in bfloat16."""
_WHOLE = 48
"""A part has a multiple of this number of rows: whole panels of any width."""


def quantized_layout(base_dtype: str) -> MakeLayout:
    """Returns the function that creates the layout for ``nf4`` or ``int8``.

    Raises:
        ConfigurationError: bitsandbytes is not installed.
    """
    try:
        import_module("bitsandbytes")
    except ImportError as error:
        raise ConfigurationError(
            f"base_dtype: got {base_dtype!r}, which needs the package bitsandbytes ({error}); "
            f"install it with {install_command('quantized')}, or leave base_dtype out"
        ) from error
    return {"nf4": _nf4, "int8": _int8}[base_dtype]


def shardable_layout(base_dtype: str) -> MakeShardable:
    """Like ``quantized_layout``, for a base model that is sharded among processes; torch's own
    layout for ``auto``."""
    if base_dtype != "auto":
        quantized_layout(base_dtype)  # raises if the package is missing
    return {"auto": _Plain, "nf4": _NF4, "int8": _Int8}[base_dtype]


def _functional() -> Any:
    # Imported late: optional, and its import takes seconds.
    return import_module("bitsandbytes.functional")


def _quantize(weight: Tensor) -> Any:
    return _functional().quantize_4bit(
        weight, blocksize=NF4_BLOCK, quant_type="nf4", compress_statistics=False
    )


class _Dequantized(Layout):
    """A matrix that is dequantised by ``dense`` for each product."""

    copies = False

    @abstractmethod
    def dense(self) -> Tensor: ...

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.dense(), bias)

    def product_fp32(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.dense().float())

    def transposed(self) -> Layout:
        return _Transposed(self)


class _Transposed(_Dequantized):
    """The same quantised weights for the backward pass."""

    def __init__(self, of: Layout) -> None:
        self._of = of

    def dense(self) -> Tensor:
        return self._of.dense().t()


class _NF4(_Dequantized, ShardableLayout):
    """4-bit normal floats with one scale per 64 weights."""

    _stored = ("_codes", "_scales")

    def __init__(self, weight: Tensor) -> None:
        self._shape = weight.shape
        # bitsandbytes 0.50 dequantises wrongly on a CPU where a block of 64 crosses rows.
        rows = F.pad(weight.flatten(), (0, -weight.numel() % NF4_BLOCK)).view(-1, NF4_BLOCK)
        self._codes, self._state = _quantize(rows)
        self._scales = self._state.absmax

    def of(self, tensors: Sequence[Tensor]) -> _NF4:
        """See ``ShardableLayout.of``."""
        other = cast("_NF4", super().of(tensors))
        other._state = copy(self._state)  # bitsandbytes reads the scales from here
        other._state.absmax = other._scales
        return other

    def dense(self) -> Tensor:
        flat = _functional().dequantize_4bit(self._codes, self._state).flatten()
        return flat[: self._shape.numel()].view(self._shape)


class _NF4Panels(_Panels):
    """``nf4`` in the panels of ``product.c``, which reads 4-bit weights from memory and converts
    them to float32 in the cache."""

    copies = False

    def __init__(self, weight: Tensor) -> None:
        self.outputs, self.inputs = weight.shape
        self.dtype = weight.dtype
        found, state = _quantize(weight.contiguous())
        bytes_ = found.flatten()
        codes = torch.stack([bytes_ >> 4, bytes_ & 15], 1).view(self.outputs, self.inputs)
        width = _routines().tinker_panel()
        surplus = -self.outputs % width  # their scale is 0
        codes = F.pad(codes, (0, 0, 0, surplus)).view(-1, width, self.inputs).transpose(1, 2)
        self.panels = (codes[:, ::2] | codes[:, 1::2] << 4).contiguous()
        scales = F.pad(state.absmax.view(self.outputs, -1), (0, 0, 0, surplus))
        self._scales = scales.view(len(self.panels), width, -1).transpose(1, 2).contiguous()
        self._values = state.code.float().contiguous()
        # The fields of ``struct Codes`` of product.c.
        self._struct = array("q", (self._values.data_ptr(), self._scales.data_ptr()))
        self.codes = self._struct.buffer_info()[0]

    @staticmethod
    def suits(weight: Tensor) -> bool:
        """Returns whether no scale covers two rows, and these panels are the fastest layout."""
        return (
            weight.dtype == torch.float32
            and weight.shape[1] % NF4_BLOCK == 0
            and fastest_layout(weight) is _Panels
        )

    def dense(self) -> Tensor:
        out = torch.empty(self.outputs, self.inputs)
        _routines().tinker_decode(
            self.codes,
            self.panels.data_ptr(),
            self.outputs,
            self.inputs,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def transposed(self) -> Layout:
        return _Transposed(self)


def _nf4(weight: Tensor) -> Layout:
    return _NF4Panels(weight) if _NF4Panels.suits(weight) else _NF4(weight)


class _Int8Panels(_Panels):
    """8-bit integers in the panels of ``product.c``, with one scale for each output's sum."""

    copies = False

    def __init__(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        (self.outputs, self.inputs), self.dtype = codes.shape, dtype
        self.pairs = dtype == torch.bfloat16 and self.inputs % 2 == 0 and _has_pairs()
        self.panels = in_huge_pages(_panels(codes, pairs=False))
        rows = self.panels.shape[0] * self.panels.shape[2]
        self._scales = F.pad(scales.flatten().float(), (0, rows - self.outputs))
        self._struct = array("q", (0, self._scales.data_ptr()))  # ``struct Codes``
        self.codes = self._struct.buffer_info()[0]

    def code_rows(self, at: Tensor) -> Tensor:
        """Returns the codes of rows, [..., in]."""
        width = self.panels.shape[2]
        return self.panels[at // width, :, at % width]

    def code_part(self, rows: slice) -> Tensor:
        """Returns the codes of consecutive rows from the first one of a panel on, [n, in]."""
        first, end = rows.start // self.panels.shape[2], -(-rows.stop // self.panels.shape[2])
        # The transpose, which the backward pass multiplies with, is copied in order.
        columns = self.panels[first:end].transpose(0, 1).flatten(1)
        return columns[:, : rows.stop - rows.start].t()

    def dense(self) -> Tensor:
        scales = self._scales[: self.outputs, None]
        return (self.code_part(slice(0, self.outputs)) * scales).to(self.dtype)

    def transposed(self) -> Layout:
        return _Transposed(self)


def _int8(weight: Tensor) -> Layout:
    if fastest_layout(weight) is not _Panels:
        return _Int8(weight)
    return _Int8Panels(*_int8_codes(weight), weight.dtype)


def _int8_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes [out, in] and scales [out, 1]."""
    # The scales are computed from float16, whose range covers the weights of all usual models.
    codes, largest, _ = _functional().int8_vectorwise_quant(weight.to(torch.float16))
    return codes, (largest / 127)[:, None].to(weight.dtype)


class _Int8(_Dequantized, ShardableLayout):
    """8-bit integers with one scale per row."""

    _stored = ("_codes", "_scales")

    def __init__(self, weight: Tensor) -> None:
        self._codes, self._scales = _int8_codes(weight)

    def dense(self) -> Tensor:
        return self._codes.to(self._scales.dtype) * self._scales


class Int8Table(_Dequantized):
    """Embeddings in 8-bit integers with one scale per row, for the input layer and the head.

    Products dequantise a part of the rows at a time, because the table is the largest matrix of a
    model. The error of a weight is at most 1/254 of the largest one of its row.
    """

    def __init__(self, weight: Tensor) -> None:
        self.shape = weight.shape
        self._codes = torch.empty_like(weight, dtype=torch.int8)
        self._scales = weight.abs().amax(1, keepdim=True).div_(127)
        for rows in self._parts():
            # A row of zeros has the scale 0.
            scaled = weight[rows].float() / self._scales[rows].float().clamp(min=1e-30)
            self._codes[rows] = scaled.round_().clamp_(-127, 127).to(torch.int8)
        self._panels: _Int8Panels | None = None
        if fastest_layout(weight) is _Panels:
            self._panels = _Int8Panels(self._codes, self._scales, weight.dtype)
            self._codes = self._codes[:0]

    def rows(self, at: Tensor) -> Tensor:
        """Returns the embeddings of the token ids ``at``, [..., H]."""
        codes = self._codes[at] if self._panels is None else self._panels.code_rows(at)
        return codes.to(self._scales.dtype) * self._scales[at]

    def dense(self) -> Tensor:
        """Returns the whole table."""
        return self.rows(torch.arange(len(self._scales), device=self._scales.device))

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``Layout.product``."""
        out = self.product_fp32(x).to(x.dtype)
        return out if bias is None else out.add_(bias)

    def product_fp32(self, x: Tensor) -> Tensor:
        """See ``Layout.product_fp32``."""
        if self._panels is not None:
            return self._panels.product_fp32(x)
        out = x.new_empty(len(x), self.shape[0], dtype=torch.float32)
        for part in self._parts():
            # The scales are applied to the sums, which are fewer than the codes. Bfloat16 holds
            # the codes exactly.
            codes = self._converted(part)
            out[:, part] = _Plain(codes).product_fp32(x.to(codes.dtype))
        return out.mul_(self._scales.float().t())

    def transposed(self) -> Layout:
        """Returns the same table for products with ``[T, rows]``."""
        return _TransposedTable(self)

    def _parts(self) -> Iterator[slice]:
        count, width = self.shape
        size = _PART_BYTES_CPU if self._codes.device.type == "cpu" else _PART_BYTES_GPU
        size = max(_WHOLE, size // (4 * width) // _WHOLE * _WHOLE)
        return (slice(start, min(start + size, count)) for start in range(0, count, size))

    def _converted(self, part: slice) -> Tensor:
        # CPUs convert integers to float32 faster than to bfloat16.
        on_cpu = self._codes.device.type == "cpu"
        codes = self._codes[part] if self._panels is None else self._panels.code_part(part)
        return codes.to(torch.float32 if on_cpu else self._scales.dtype)


class _TransposedTable(_Transposed):
    """The same table for the gradient of the hidden states."""

    _of: Int8Table

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        table = self._of
        total = x.new_zeros(len(x), table.shape[1], dtype=torch.float32)
        for part in table._parts():
            codes = table._converted(part)
            total += (x[:, part] * table._scales[part].t()).to(codes.dtype) @ codes
        return total.to(x.dtype) if bias is None else total.to(x.dtype).add_(bias)


class QuantizedEmbedding(nn.Module):
    """Reads rows of a table; ``scale`` multiplies them, as Gemma does."""

    def __init__(self, embedding: nn.Embedding, table: Int8Table) -> None:
        super().__init__()
        self._table = table
        self._scale = _scale_of(embedding)
        # Transformers and the kernels look at its dtype and device.
        self.weight = _emptied(embedding.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns embeddings [..., H] of token ids [...]."""
        rows = self._table.rows(tokens)
        return rows if self._scale is None else rows * self._scale.to(rows.dtype)


def quantize_tables(model: Any, make: type[Int8Table] = Int8Table) -> FrozenWeight:
    """Replaces the embeddings of a model by 8-bit ones, frees the head's matrix, and returns it in
    8 bits. A head that is tied to the embeddings shares their table."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    weight = FrozenWeight(head.weight, make)
    # Embeddings that compute something else are kept as they are.
    if type(embedding).forward is nn.Embedding.forward or _scale_of(embedding) is not None:
        table = weight.forward if tied else make(embedding.weight.detach())
        assert isinstance(table, make)
        model.set_input_embeddings(QuantizedEmbedding(embedding, table))
    head.weight = _emptied(head.weight)
    return weight


def _scale_of(embedding: nn.Embedding) -> Tensor | None:
    scale = getattr(embedding, "embed_scale", None)
    return scale if isinstance(scale, Tensor) else None


def _emptied(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(weight[:0, :0]), requires_grad=False)
