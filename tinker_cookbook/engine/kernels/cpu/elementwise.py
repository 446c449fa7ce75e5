"""Norms, gates and rotary embeddings, each in one pass over memory (``elementwise.c``).

torch's operators need seven passes over memory for a norm and twelve for rotary embeddings. With
the few hundred tokens of a micro-batch, these calls take half of a training step. ``fusing``
installs the kernels in a model.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tinker_cookbook.engine.kernels.cpu.build import KernelCall, library
from tinker_cookbook.engine.kernels.fusing import Elementwise

_DTYPES = (torch.float32, torch.bfloat16)

_ONE_THREAD = 1 << 14
"""Number of elements up to which a second thread costs more than it saves."""

_int64, _pointer, _int32 = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32


class CallOfNorm(KernelCall):
    """Mirrors ``struct Norm`` of elementwise.c."""

    kernel = 0
    _fields_ = (
        *((name, _int64) for name in ("rows", "width")),
        *((name, _pointer) for name in ("x", "added", "upstream", "weight", "out", "inverse")),
        ("eps", ctypes.c_float),
        *((name, _int32) for name in ("half", "rounds")),
    )


class CallOfGate(KernelCall):
    """Mirrors ``struct Gate``."""

    kernel = 4
    _fields_ = (
        ("count", _int64),
        *((name, _pointer) for name in ("gate", "up", "upstream", "out", "d_gate", "d_up")),
        *((name, _int32) for name in ("half", "gelu")),
    )


class CallOfRotation(KernelCall):
    """Mirrors ``struct Rotation``."""

    kernel = 2
    _fields_ = (
        *((name, _int64) for name in ("tokens", "heads", "width")),
        ("stride", _int64 * 2),
        ("angles", _int64),
        *((name, _pointer) for name in ("x", "cosine", "sine", "out")),
        *((name, _int32) for name in ("half", "backward")),
    )


class CallOfExponentials(KernelCall):
    """Mirrors ``struct Exponentials``."""

    kernel = 5
    _fields_ = (
        *((name, _int64) for name in ("rows", "width", "block")),
        *((name, _pointer) for name in ("logits", "top", "weights", "sums", "moments")),
    )


def exponentials(
    logits: Tensor, block: int, moments: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Computes ``e^(z - top)`` of fp32 ``logits`` [R, V] in blocks.

    Returns ``top`` [R, 1], the weights [R, blocks, block], padded by zeros, their sums, float64
    [R, blocks], and if asked for the sums of ``e^(z - top) * (z - top)``, float64 [R]. torch needs
    five passes over memory and twice the time.
    """
    logits = logits.contiguous()
    (rows, width), blocks = logits.shape, -(-logits.shape[1] // block)
    top, weights = logits.new_empty(rows, 1), logits.new_empty(rows, blocks, block)
    sums = logits.new_empty(rows, blocks, dtype=torch.float64)
    products = sums.new_empty(rows) if moments else None
    call = CallOfExponentials(rows, width, block)
    tensors = {"logits": logits, "top": top, "weights": weights, "sums": sums, "moments": products}
    for name, tensor in tensors.items():
        setattr(call, name, None if tensor is None else tensor.data_ptr())
    call.run(torch.get_num_threads() if rows > 1 else 1)
    return top, weights, sums, products


def _run(call: Any, x: Tensor, /, **tensors: Tensor) -> None:
    """Runs a kernel over the elements of ``x``; ``call`` gets the addresses of contiguous tensors
    of its dtype."""
    if x.dtype not in _DTYPES:
        raise TypeError(f"x: got {x.dtype}, expected float32 or bfloat16")
    for name, tensor in tensors.items():
        setattr(call, name, tensor.data_ptr())
    call.half = x.dtype == torch.bfloat16
    call.run(torch.get_num_threads() if x.numel() > _ONE_THREAD else 1)


class _Norm(torch.autograd.Function):
    """``x / sqrt(mean(x^2) + eps) * weight`` along the last axis, with a gradient for ``x``.

    ``weight`` is fp32; ``rounds``: round the normalized value to the dtype of ``x`` before the
    product.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, eps: float, rounds: bool, x: Tensor) -> Tensor:
        x = x.contiguous()
        out, inverse = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        call = CallOfNorm(inverse.numel(), x.shape[-1], eps=eps, rounds=rounds)
        _run(call, x, x=x, weight=weight, out=out, inverse=inverse)
        # ``inverse`` [rows] saves a pass over ``x`` in the backward pass.
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        gradient, out = upstream[0].contiguous(), torch.empty_like(x)
        tensors = {"x": x, "upstream": gradient, "weight": weight, "out": out, "inverse": inverse}
        _run(CallOfNorm(inverse.numel(), x.shape[-1]), x, **tensors)
        # The weight is frozen, so it gets no gradient.
        return None, None, None, out


class _Gated(torch.autograd.Function):
    """``silu(gate) * up``, or with gelu by tanh, with gradients for both; torch would also keep the
    activation."""

    @staticmethod
    def forward(ctx: Any, gelu: bool, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        # The activation is recomputed in the backward pass, which saves memory for few operations.
        ctx.save_for_backward(gate, up)
        ctx.gelu, out = gelu, torch.empty_like(gate)
        call = CallOfGate(gate.numel(), gelu=gelu)
        _run(call, gate, gate=gate, up=up, out=out)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        gradient = upstream[0].contiguous()
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(gate)
        tensors = {"gate": gate, "up": up, "upstream": gradient, "d_gate": d_gate, "d_up": d_up}
        _run(CallOfGate(gate.numel(), gelu=ctx.gelu), gate, **tensors)
        return None, d_gate, d_up


class _Rotated(torch.autograd.Function):
    """Rotary embeddings of ``q`` and ``k`` [B, heads, L, D], with gradients for both."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cosine: Tensor, sine: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cosine, sine)
        return rotate(q, cosine, sine), rotate(k, cosine, sine)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        angles = ctx.saved_tensors  # read only once, as activation checkpointing requires
        # A rotation is orthogonal, so the gradient is the inverse rotation.
        found = [rotate(g, *angles, backward=True) for g in upstream]
        return *found, None, None


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, *, backward: bool = False) -> Tensor:
    """Applies rotary embeddings to ``x`` [B, heads, L, D]; with ``backward``, the inverse rotation.

    ``cosine`` and ``sine`` are [B or 1, L, D]. The result is stored as [B, L, heads, D].
    """
    batch, heads, length, width = x.shape
    # The projections already have the layout [B, L, heads, D], so this is usually a view.
    x = x.transpose(1, 2).reshape(batch * length, heads, width)
    if x.stride(2) != 1:
        x = x.contiguous()
    cosine, sine = cosine.contiguous(), sine.contiguous()
    out = x.new_empty(batch, length, heads, width)
    call = CallOfRotation(*x.shape, backward=backward)
    call.stride[:] = x.stride()[:2]
    # One set of angles for all rows, or one per row.
    call.angles = cosine.shape[0] * length
    _run(call, x, x=x, cosine=cosine, sine=sine, out=out)
    return out.transpose(1, 2)


def elementwise(dtype: torch.dtype) -> Elementwise | None:
    """Returns the routines for ``dtype``; ``None`` if this machine has none.

    Norms and gates are partial functions: ``step`` reads their settings.
    """
    if dtype not in _DTYPES or library() is None:
        return None
    return Elementwise(
        norms=(partial(_norm_of, plus_one=False), partial(_norm_of, plus_one=True)),
        gates=(partial(_Gated.apply, False), partial(_Gated.apply, True)),
        rotate=_Rotated.apply,
    )


def _norm_of(weight: Tensor, eps: float, *, plus_one: bool) -> Any:
    # Llama multiplies the rounded value by the weight, Gemma the unrounded one by 1 + weight.
    factor = 1 + weight.float() if plus_one else weight.float().clone()
    return partial(_Norm.apply, factor, eps, not plus_one)
