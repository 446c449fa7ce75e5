"""Element-wise kernels of a decoder layer, one pass each (``elementwise.c``).

torch's operators take seven passes over memory for a norm and twelve for rotary embeddings. With
the few hundred tokens of a micro-batch these calls are half of a training step.
"""

from __future__ import annotations

import ctypes

import torch

from tinker_cookbook.engine.kernels.cpu.build import library

_int64, _pointer, _int32 = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32

_ALONE = 1 << 14
"""Elements up to which a second thread costs more than it saves."""


class _Norm(ctypes.Structure):
    """Mirrors ``struct Norm`` of elementwise.c; the next two classes mirror theirs."""

    _fields_ = (
        *((name, _int64) for name in ("rows", "width", "threads")),
        *((name, _pointer) for name in ("x", "upstream", "weight", "out", "inverse")),
        ("eps", ctypes.c_float),
        *((name, _int32) for name in ("half", "rounds")),
    )


class _Gate(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("count", "threads")),
        *((name, _pointer) for name in ("gate", "up", "upstream", "out", "d_gate", "d_up")),
        ("half", _int64),
    )


class _Rotation(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("tokens", "heads", "width", "threads")),
        ("stride", _int64 * 2),
        ("angles", _int64),
        *((name, _pointer) for name in ("x", "cosine", "sine", "out")),
        *((name, _int32) for name in ("half", "backward")),
    )


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, rounds: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes ``x / sqrt(mean(x^2) + eps) * weight`` along the last axis; also returns the inverse
    root.

    ``weight`` is fp32; ``rounds``: round the normalised value to the dtype of ``x`` before the
    product.
    """
    x = x.contiguous()
    out, inverse = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    call = _norm(x, weight, out, inverse)
    call.eps, call.rounds = eps, rounds
    _routines().tinker_norm(ctypes.byref(call))
    return out, inverse


def norm_back(
    upstream: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor
) -> torch.Tensor:
    """Computes the gradient of ``x``."""
    x, upstream = x.contiguous(), upstream.contiguous()
    out = torch.empty_like(x)
    call = _norm(x, weight, out, inverse)
    call.upstream = upstream.data_ptr()
    _routines().tinker_norm_back(ctypes.byref(call))
    return out


def gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Computes ``silu(gate) * up``."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    call = _gate(gate, up)
    call.out = out.data_ptr()
    _routines().tinker_gate(ctypes.byref(call))
    return out


def gate_back(
    upstream: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the gradients of ``gate`` and ``up``."""
    gate, up, upstream = gate.contiguous(), up.contiguous(), upstream.contiguous()
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(gate)
    call = _gate(gate, up)
    call.upstream, call.d_gate, call.d_up = (
        upstream.data_ptr(),
        d_gate.data_ptr(),
        d_up.data_ptr(),
    )
    _routines().tinker_gate_back(ctypes.byref(call))
    return d_gate, d_up


def rotate(
    x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, *, backward: bool = False
) -> torch.Tensor:
    """Applies rotary embeddings to ``x`` [B, heads, L, D]; with ``backward`` the inverse rotation.

    ``cosine`` and ``sine`` are [B or 1, L, D]. The result is stored as [B, L, heads, D].
    """
    batch, heads, length, width = x.shape
    x = x.transpose(1, 2).reshape(batch * length, heads, width)
    if x.stride(2) != 1:
        x = x.contiguous()
    cosine, sine = cosine.contiguous(), sine.contiguous()
    out = x.new_empty(batch, length, heads, width)
    call = _Rotation(*x.shape, _threads(x), (_int64 * 2)(*x.stride()[:2]))
    call.angles = cosine.shape[0] * length
    call.x, call.out = x.data_ptr(), out.data_ptr()
    call.cosine, call.sine = cosine.data_ptr(), sine.data_ptr()
    call.half, call.backward = _half(x), backward
    _routines().tinker_rotate(ctypes.byref(call))
    return out.transpose(1, 2)


def _norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, inverse: torch.Tensor) -> _Norm:
    call = _Norm(x.numel() // x.shape[-1], x.shape[-1], _threads(x))
    call.x, call.weight, call.out = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    call.inverse, call.half = inverse.data_ptr(), _half(x)
    return call


def _gate(gate: torch.Tensor, up: torch.Tensor) -> _Gate:
    call = _Gate(gate.numel(), _threads(gate), gate.data_ptr(), up.data_ptr())
    call.half = _half(gate)
    return call


def _half(x: torch.Tensor) -> bool:
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"x: got {x.dtype}, expected float32 or bfloat16")
    return x.dtype == torch.bfloat16


def _threads(x: torch.Tensor) -> int:
    return torch.get_num_threads() if x.numel() > _ALONE else 1


def _routines() -> ctypes.CDLL:
    routines = library("elementwise")
    assert routines is not None, "whoever fuses has asked"
    return routines
