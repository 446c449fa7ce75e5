"""Installs a device's fused norms, gates and rotary embeddings in a model.

Architectures implement these layers in different ways. ``fuse_with`` compares each fused version
with the model's own, and keeps transformers' module if they differ.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

_ROTATES = "apply_rotary_pos_emb"
_MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Tolerance relative to the largest value, for differences by rounding."""


@dataclass(frozen=True)
class Elementwise:
    """Fused functions of a device, each in one pass over memory and with gradients.

    ``norms`` create a norm along the last axis from a frozen weight [width] and an epsilon;
    ``gates`` are ``activation(gate) * up``; ``rotate`` applies rotary embeddings to q and k
    [B, heads, L, D], given cosines and sines [B or 1, L, D].
    """

    norms: Sequence[Callable[[Tensor, float], Callable[[Tensor], Tensor]]]
    gates: Sequence[Callable[[Tensor, Tensor], Tensor]]
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None


class FusedNorm(nn.Module):
    """A norm with a frozen weight, in one pass."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x`` [..., width], normalized along the last axis."""
        return self.function(x)


class FusedRotary:
    """Replaces the rotary function of each architecture's module during a forward pass."""

    def __init__(self, modules: Sequence[ModuleType] = (), rotate: Any = None) -> None:
        self._fused = [(m, partial(_rotate, rotate, getattr(m, _ROTATES))) for m in modules]

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
    fused: Callable[..., Any],
    usual: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Implements transformers' signature: q and k [B, heads, L, D], cos and sin [B or 1, L, D]."""
    # ``usual`` handles all other cases: partial rotary width, other axes.
    batch, _, length, width = q.shape
    shapes = ((1, length, width), (batch, length, width))
    plain = not args and not kwargs and tuple(cos.shape) in shapes and k.shape[2:] == q.shape[2:]
    if not plain or not q.dtype == k.dtype == cos.dtype == sin.dtype:
        return usual(q, k, cos, sin, *args, **kwargs)
    return fused(q, k, cos, sin)


@torch.no_grad()
def fuse_with(model: Any, dtype: torch.dtype, functions: Elementwise) -> FusedRotary:
    """Replaces the norms and MLPs of a model that agree with ``functions``; returns its rotary
    embeddings."""
    device = model.get_input_embeddings().weight.device
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = fused_norm(module, dtype, functions)
            if norm is not None:
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, norm)
        elif all(hasattr(module, part) for part in _MLP):
            inputs = getattr(module.gate_proj, "in_features", None)
            if inputs is None:
                continue
            # Test with random rows: a module may compute something else (another activation).
            (x,) = _random(dtype, device, (3, inputs))
            expected = module(x)
            for gate in functions.gates:
                module.forward = partial(_gated, gate, module)
                if _agrees(module, [x], [expected]):
                    break
                del module.forward  # restores the method of the class
    # The rotary function is a function of the architecture's module, not a layer.
    names = {type(module).__module__ for module in model.modules()}
    sources = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    rotated = [m for m in sources if rotates_alike(m, dtype, device, functions)]
    return FusedRotary(rotated, functions.rotate)


def _gated(gate: Callable[[Tensor, Tensor], Tensor], module: Any, x: Tensor) -> Tensor:
    return module.down_proj(gate(module.gate_proj(x), module.up_proj(x)))


def fused_norm(module: Any, dtype: torch.dtype, functions: Elementwise) -> FusedNorm | None:
    """Returns the fused version of an RMS norm; ``None`` if none agrees with it."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or eps is None:
        return None
    (x,) = _random(dtype, weight.device, (3, len(weight)))
    expected = module(x)
    fused = (FusedNorm(make(weight.detach(), float(eps))) for make in functions.norms)
    return next((norm for norm in fused if _agrees(norm, [x], [expected])), None)


def rotates_alike(
    module: ModuleType, dtype: torch.dtype, device: torch.device, functions: Elementwise
) -> bool:
    """Returns whether the rotary function of an architecture's module agrees with the fused one."""
    function = getattr(module, _ROTATES, None)
    if function is None or functions.rotate is None:
        return False
    q, k, *halves = _random(dtype, device, (2, 3, 5, 16), (2, 1, 5, 16), (2, 5, 8), (2, 5, 8))
    # Both halves are equal in every model, and Liger's kernel reads only the first.
    inputs = [q, k, *(torch.cat([half, half], -1) for half in halves)]
    try:
        expected = function(*inputs)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False
    return _agrees(functions.rotate, inputs, expected)


def _random(dtype: torch.dtype, device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    # Use the CPU's generator: the same numbers on every device.
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def _agrees(
    fused: Callable[..., Any], inputs: Sequence[Tensor], expected: Sequence[Tensor]
) -> bool:
    """Returns whether a fused function gives the expected results; ``False`` if it fails."""
    try:
        # Copies, because a kernel may overwrite its inputs.
        found = fused(*(tensor.clone() for tensor in inputs))
    except Exception as error:  # compiling a kernel may raise any exception
        _warn_once(str(error))
        return False
    found = (found,) if isinstance(found, Tensor) else found
    return all(map(_same, found, expected))


@cache
def _warn_once(reason: str) -> None:
    # Once, because the same kernel is tried for each layer.
    logger.warning("A fused kernel failed and is not used: %s", reason)


def _same(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    scale = expected.abs().max().item()
    return (found - expected).abs().max().item() <= _TOLERANCES[found.dtype] * scale
