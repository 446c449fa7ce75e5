"""Norms, gates and rotary embeddings of a model in one pass over memory each (``elementwise.c``).

torch's operators take seven passes over memory for a norm and twelve for rotary embeddings. With
the few hundred tokens of a micro-batch these calls are half of a training step.

Architectures implement these layers in different ways. ``fuse`` compares each fused version with
the model's own and keeps transformers' module where they differ.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tinker_cookbook.engine.kernels.cpu.build import library

_ROTATES = "apply_rotary_pos_emb"
_MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Tolerance relative to the largest value: what rounding explains."""

_ONE_THREAD = 1 << 14
"""Elements up to which a second thread costs more than it saves."""

_int64, _pointer, _int32 = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32


class _NormCall(ctypes.Structure):
    """Mirrors ``struct Norm`` of elementwise.c; the next two classes mirror theirs."""

    _fields_ = (
        *((name, _int64) for name in ("rows", "width", "threads")),
        *((name, _pointer) for name in ("x", "upstream", "weight", "out", "inverse")),
        ("eps", ctypes.c_float),
        *((name, _int32) for name in ("half", "rounds")),
    )


class _GateCall(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("count", "threads")),
        *((name, _pointer) for name in ("gate", "up", "upstream", "out", "d_gate", "d_up")),
        ("half", _int64),
    )


class _RotationCall(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("tokens", "heads", "width", "threads")),
        ("stride", _int64 * 2),
        ("angles", _int64),
        *((name, _pointer) for name in ("x", "cosine", "sine", "out")),
        *((name, _int32) for name in ("half", "backward")),
    )


def _launch(routine: str, call: Any, x: Tensor, /, **tensors: Tensor) -> None:
    """Runs a routine over the numbers of ``x``; ``call`` gets the addresses of contiguous tensors
    of its dtype."""
    if x.dtype not in _TOLERANCES:
        raise TypeError(f"x: got {x.dtype}, expected float32 or bfloat16")
    for name, tensor in tensors.items():
        setattr(call, name, tensor.data_ptr())
    call.half = x.dtype == torch.bfloat16
    call.threads = torch.get_num_threads() if x.numel() > _ONE_THREAD else 1
    routines = library("elementwise")
    assert routines is not None, "modules are fused only where the library exists"
    getattr(routines, routine)(ctypes.byref(call))


class _Norm(torch.autograd.Function):
    """``x / sqrt(mean(x^2) + eps) * weight`` along the last axis, with a gradient for ``x``.

    ``weight`` is fp32; ``rounds``: round the normalized value to the dtype of ``x`` before the
    product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, rounds: bool) -> Tensor:
        x = x.contiguous()
        out, inverse = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        call = _NormCall(inverse.numel(), x.shape[-1], eps=eps, rounds=rounds)
        _launch("tinker_norm", call, x, x=x, weight=weight, out=out, inverse=inverse)
        # ``inverse`` [rows] saves a pass over ``x`` in the backward pass.
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        gradient, out = upstream[0].contiguous(), torch.empty_like(x)
        tensors = {"x": x, "upstream": gradient, "weight": weight, "out": out, "inverse": inverse}
        _launch("tinker_norm_back", _NormCall(inverse.numel(), x.shape[-1]), x, **tensors)
        # The weight is frozen, so it gets no gradient.
        return out, None, None, None


class _Gated(torch.autograd.Function):
    """``silu(gate) * up`` with gradients for both; torch would also keep ``silu(gate)``."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        # ``silu(gate)`` is computed again in the backward pass: memory for a few operations.
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        _launch("tinker_gate", _GateCall(gate.numel()), gate, gate=gate, up=up, out=out)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        gradient = upstream[0].contiguous()
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(gate)
        tensors = {"gate": gate, "up": up, "upstream": gradient, "d_gate": d_gate, "d_up": d_up}
        _launch("tinker_gate_back", _GateCall(gate.numel()), gate, **tensors)
        return d_gate, d_up


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
        angles = ctx.saved_tensors  # read once: activation checkpointing allows no more
        # A rotation is orthogonal, so the gradient is rotated back.
        found = [rotate(g, *angles, backward=True) for g in upstream]
        return *found, None, None


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, *, backward: bool = False) -> Tensor:
    """Applies rotary embeddings to ``x`` [B, heads, L, D]; with ``backward`` the inverse rotation.

    ``cosine`` and ``sine`` are [B or 1, L, D]. The result is stored as [B, L, heads, D].
    """
    batch, heads, length, width = x.shape
    # The projections' own layout [B, L, heads, D], so usually a view; the kernel takes strides.
    x = x.transpose(1, 2).reshape(batch * length, heads, width)
    if x.stride(2) != 1:
        x = x.contiguous()
    cosine, sine = cosine.contiguous(), sine.contiguous()
    out = x.new_empty(batch, length, heads, width)
    call = _RotationCall(*x.shape, backward=backward)
    call.stride[:] = x.stride()[:2]
    # One set of angles for all rows, or one for each.
    call.angles = cosine.shape[0] * length
    _launch("tinker_rotate", call, x, x=x, cosine=cosine, sine=sine, out=out)
    return out.transpose(1, 2)


class FusedNorm(nn.Module):
    """An RMS norm with frozen ``weight`` (fp32, what ``x`` is multiplied with in the end)."""

    def __init__(self, weight: Tensor, eps: float, rounds: bool) -> None:
        super().__init__()
        self._weight, self._eps, self._rounds = weight, eps, rounds

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x`` [..., width], normalized along the last axis."""
        return _Norm.apply(x, self._weight, self._eps, self._rounds)


class FusedRotary:
    """Replaces the rotary function in the module of each architecture during a forward pass."""

    def __init__(self, modules: list[ModuleType]) -> None:
        self._fused = [(m, partial(_rotate, getattr(m, _ROTATES))) for m in modules]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Uses the fused function inside the block; blocks may nest."""
        before = [getattr(module, _ROTATES) for module, _ in self._fused]
        for module, function in self._fused:
            setattr(module, _ROTATES, function)
        try:
            yield
        finally:
            for (module, _), function in zip(self._fused, before, strict=True):
                setattr(module, _ROTATES, function)


def _rotate(
    usual: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Implements transformers' signature: q and k [B, heads, L, D], cos and sin [B or 1, L, D]."""
    # ``usual`` handles other cases: partial rotary width, other axes.
    batch, _, length, width = q.shape
    shapes = ((1, length, width), (batch, length, width))
    plain = not args and not kwargs and tuple(cos.shape) in shapes and k.shape[2:] == q.shape[2:]
    if not plain or not q.dtype == k.dtype == cos.dtype == sin.dtype:
        return usual(q, k, cos, sin, *args, **kwargs)
    return _Rotated.apply(q, k, cos, sin)


@torch.no_grad()
def fuse(model: Any, dtype: torch.dtype) -> FusedRotary:
    """Replaces the norms and MLPs of a model that agree with the kernels, and returns its rotary
    embeddings. Nothing is replaced where the kernels do not support the device and dtype."""
    device = model.get_input_embeddings().weight.device
    if device.type != "cpu" or dtype not in _TOLERANCES or library("elementwise") is None:
        return FusedRotary([])
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = _fused_norm(module, dtype)
            if norm is not None:
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, norm)
        elif all(hasattr(module, part) for part in _MLP):
            inputs = getattr(module.gate_proj, "in_features", None)
            if inputs is None:
                continue
            # Random rows show whether a module computes something else (another activation).
            (x,) = _random(dtype, (3, inputs))
            expected = module(x)
            module.forward = partial(_gated, module)
            if not _same(module(x), expected):
                del module.forward  # the method of the class is visible again
    # The rotary function is a function of the architecture's module, not a layer.
    names = {type(module).__module__ for module in model.modules()}
    sources = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    return FusedRotary([m for m in sources if _rotates_alike(getattr(m, _ROTATES, None), dtype)])


def _gated(module: Any, x: Tensor) -> Tensor:
    return module.down_proj(_Gated.apply(module.gate_proj(x), module.up_proj(x)))


def _fused_norm(module: Any, dtype: torch.dtype) -> FusedNorm | None:
    """Returns the fused version of an RMS norm; ``None`` if none agrees with it."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or eps is None:
        return None
    (x,) = _random(dtype, (3, len(weight)))
    expected = module(x)
    # Llama multiplies the rounded value with the weight, Gemma the exact one with 1 + weight.
    for factor, rounds in ((weight.detach().float().clone(), True), (1 + weight.float(), False)):
        fused = FusedNorm(factor, float(eps), rounds)
        if _same(fused(x), expected):
            return fused
    return None


def _rotates_alike(function: Callable[..., Any] | None, dtype: torch.dtype) -> bool:
    """Returns whether a module's rotary function agrees with the kernel."""
    if function is None:
        return False
    inputs = _random(dtype, (2, 3, 5, 16), (2, 1, 5, 16), (2, 5, 16), (2, 5, 16))
    try:
        expected = function(*inputs)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False
    return all(map(_same, _Rotated.apply(*inputs), expected))


def _random(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def _same(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    scale = expected.abs().max().item()
    return (found - expected).abs().max().item() <= _TOLERANCES[found.dtype] * scale
