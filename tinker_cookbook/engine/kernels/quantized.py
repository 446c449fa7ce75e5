"""Frozen matrices in 4 or 8 bits, by bitsandbytes (extra ``quantized``).

Sampling and both passes of training read the same quantised weights, and each product dequantises
them to the model's dtype first, so all use the same numbers.

Sources: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs" (arXiv 2305.14314)
for ``nf4``; Dettmers et al. 2022, "LLM.int8()" (arXiv 2208.07339) for ``int8``, from which
the weight scales are used; inputs are not quantised.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tinker_cookbook.engine.device_names import NF4_BLOCK
from tinker_cookbook.engine.kernels.cpu.linear import (
    Layout,
    MakeLayout,
    _Panels,
    _routines,
    fastest_layout,
)
from tinker_cookbook.exceptions import ConfigurationError


def quantized_layout(base_dtype: str) -> MakeLayout | None:
    """Returns the function that creates the layout for ``nf4`` or ``int8``; ``None`` for ``auto``.

    Raises:
        ConfigurationError: bitsandbytes is not installed.
    """
    if base_dtype == "auto":
        return None
    try:
        import_module("bitsandbytes")
    except ImportError as error:
        raise ConfigurationError(
            f"base_dtype: got {base_dtype!r}, which needs the package bitsandbytes ({error}); "
            "install it with pip install 'tinker_cookbook[quantized]', or leave base_dtype out"
        ) from error
    return {"nf4": _nf4, "int8": _Int8}[base_dtype]


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


class _NF4(_Dequantized):
    """4-bit normal floats with one scale per 64 weights."""

    def __init__(self, weight: Tensor) -> None:
        self._shape = weight.shape
        # bitsandbytes 0.50 dequantises wrongly on a CPU where a block of 64 crosses rows.
        rows = F.pad(weight.flatten(), (0, -weight.numel() % NF4_BLOCK)).view(-1, NF4_BLOCK)
        self._codes, self._state = _quantize(rows)

    def dense(self) -> Tensor:
        flat = _functional().dequantize_4bit(self._codes, self._state).flatten()
        return flat[: self._shape.numel()].view(self._shape)


class _NF4Panels(_Panels):
    """``nf4`` in the panels of ``product.c``, which reads 4-bit weights from memory and converts
    them to float32 in the cache."""

    copies = False

    def __init__(self, weight: Tensor) -> None:
        self._outputs, self._inputs = weight.shape
        found, state = _quantize(weight.contiguous())
        bytes_ = found.flatten()
        codes = torch.stack([bytes_ >> 4, bytes_ & 15], 1).view(self._outputs, self._inputs)
        width = _routines().tinker_panel()
        surplus = -self._outputs % width  # their scale is 0
        codes = F.pad(codes, (0, 0, 0, surplus)).view(-1, width, self._inputs).transpose(1, 2)
        self.panels = (codes[:, ::2] | codes[:, 1::2] << 4).contiguous()
        scales = F.pad(state.absmax.view(self._outputs, -1), (0, 0, 0, surplus))
        self._scales = scales.view(len(self.panels), width, -1).transpose(1, 2).contiguous()
        self._values = state.code.float().contiguous()
        # The fields of ``struct Codes`` of product.c.
        self._struct = array("q", (self._values.data_ptr(), self._scales.data_ptr()))
        self._codes = self._struct.buffer_info()[0]

    @staticmethod
    def suits(weight: Tensor) -> bool:
        """Returns whether no scale covers two rows, and these panels are the fastest layout."""
        return (
            weight.dtype == torch.float32
            and weight.shape[1] % NF4_BLOCK == 0
            and fastest_layout(weight) is _Panels
        )

    def dense(self) -> Tensor:
        out = torch.empty(self._outputs, self._inputs)
        _routines().tinker_decode(
            self._codes,
            self.panels.data_ptr(),
            self._outputs,
            self._inputs,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def transposed(self) -> Layout:
        return _Transposed(self)

    def _rounded(self, out: Tensor, bias: Tensor | None) -> Tensor:
        return out if bias is None else out.add_(bias)


def _nf4(weight: Tensor) -> Layout:
    return _NF4Panels(weight) if _NF4Panels.suits(weight) else _NF4(weight)


class _Int8(_Dequantized):
    """8-bit integers with one scale per row."""

    def __init__(self, weight: Tensor) -> None:
        # The scales are computed from float16, whose range covers the weights of all usual models.
        codes, largest, _ = _functional().int8_vectorwise_quant(weight.to(torch.float16))
        self._codes, self._scales = codes, (largest / 127)[:, None].to(weight.dtype)

    def dense(self) -> Tensor:
        return self._codes.to(self._scales.dtype) * self._scales
