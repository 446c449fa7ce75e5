"""Replaces norms, gates and rotary embeddings of a model by fused kernels (``elementwise.c``).

Architectures implement them in different ways, so each fused version is compared with the model's
own first. Modules that differ keep transformers' implementation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tinker_cookbook.engine.kernels.cpu import elementwise
from tinker_cookbook.engine.kernels.cpu.build import library

_ROTATES = "apply_rotary_pos_emb"
_MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Tolerance relative to the largest value: what rounding explains."""


class _Norm(torch.autograd.Function):
    """``elementwise.norm`` with a gradient for ``x``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, rounds: bool
    ) -> torch.Tensor:
        out, inverse = elementwise.norm(x, weight, eps, rounds)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return elementwise.norm_back(upstream[0], *ctx.saved_tensors), None, None, None


class _Gated(torch.autograd.Function):
    """``silu(gate) * up`` with gradients for both; torch would also keep ``silu(gate)``."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return elementwise.gate(gate, up)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return elementwise.gate_back(upstream[0], *ctx.saved_tensors)


class _Rotated(torch.autograd.Function):
    """Rotary embeddings of ``q`` and ``k`` with gradients for both."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cosine, sine)
        return elementwise.rotate(q, cosine, sine), elementwise.rotate(k, cosine, sine)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        angles = ctx.saved_tensors
        found = [elementwise.rotate(g, *angles, backward=True) for g in upstream]
        return *found, None, None


class FusedNorm(nn.Module):
    """An RMS norm with frozen ``weight`` (fp32, what ``x`` is multiplied with in the end)."""

    def __init__(self, weight: torch.Tensor, eps: float, rounds: bool) -> None:
        super().__init__()
        self._weight, self._eps, self._rounds = weight, eps, rounds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x`` [..., width], normalised along the last axis."""
        return _Norm.apply(x, self._weight, self._eps, self._rounds)


class Rotary:
    """Swaps the model's rotary embeddings during its forward pass.

    transformers implements them as a function in each architecture's module, which is replaced.
    """

    def __init__(self, modules: list[ModuleType]) -> None:
        self._ours = [(m, partial(_rotate, getattr(m, _ROTATES))) for m in modules]

    @contextmanager
    def fused(self) -> Iterator[None]:
        """Uses ``elementwise.rotate`` inside the block; blocks may nest."""
        before = [getattr(module, _ROTATES) for module, _ in self._ours]
        for module, function in self._ours:
            setattr(module, _ROTATES, function)
        try:
            yield
        finally:
            for (module, _), function in zip(self._ours, before, strict=True):
                setattr(module, _ROTATES, function)


@torch.no_grad()
def fuse(model: Any, dtype: torch.dtype) -> Rotary:
    """Replaces all modules that agree; none without kernels for the device and dtype."""
    device = model.get_input_embeddings().weight.device
    if device.type != "cpu" or dtype not in _TOLERANCES or library("elementwise") is None:
        return Rotary([])
    for name, module in list(model.named_modules()):
        norm = _fused_norm(module, dtype) if type(module).__name__.endswith("RMSNorm") else None
        if norm is not None:
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], norm)
        elif all(hasattr(module, part) for part in _MLP):
            _fuse_gate(module, dtype)
    return Rotary(_rotating(model, dtype))


def _fused_norm(module: Any, dtype: torch.dtype) -> FusedNorm | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or eps is None:
        return None
    x = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = module(x)
    for factor, rounds in ((weight.detach().float().clone(), True), (1 + weight.float(), False)):
        fused = FusedNorm(factor, float(eps), rounds)
        if _same(fused(x), expected):
            return fused
    return None


def _fuse_gate(module: Any, dtype: torch.dtype) -> None:
    inputs = getattr(module.gate_proj, "in_features", None)
    if inputs is None:
        return
    x = torch.randn(3, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = module(x)
    module.forward = partial(_gated, module)
    if not _same(module(x), expected):
        del module.forward  # the class's own shows again


def _gated(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Computes a gated MLP."""
    return module.down_proj(_Gated.apply(module.gate_proj(x), module.up_proj(x)))


def _rotating(model: Any, dtype: torch.dtype) -> list[ModuleType]:
    """Returns the modules whose rotary function agrees with the kernel."""
    names = {type(module).__module__ for module in model.modules()}
    modules = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    return [module for module in modules if _rotates_alike(getattr(module, _ROTATES, None), dtype)]


def _rotates_alike(function: Callable[..., Any] | None, dtype: torch.dtype) -> bool:
    if function is None:
        return False
    generator = torch.Generator().manual_seed(0)
    q, k, cosine, sine = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((2, 3, 5, 16), (2, 1, 5, 16), (2, 5, 16), (2, 5, 16))
    )
    try:
        expected = function(q, k, cosine, sine)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False
    return all(map(_same, _Rotated.apply(q, k, cosine, sine), expected))


def _rotate(
    usual: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implements transformers' signature: q and k [B, heads, L, D], cos and sin [B or 1, L, D].

    ``usual`` handles other cases: partial rotary width, other axes.
    """
    batch, _, length, width = q.shape
    shapes = ((1, length, width), (batch, length, width))
    plain = not args and not kwargs and tuple(cos.shape) in shapes and k.shape[2:] == q.shape[2:]
    if not plain or not q.dtype == k.dtype == cos.dtype == sin.dtype:
        return usual(q, k, cos, sin, *args, **kwargs)
    return _Rotated.apply(q, k, cos, sin)


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    scale = expected.abs().max().item()
    return (found - expected).abs().max().item() <= _TOLERANCES[found.dtype] * scale
