"""Routed experts with LoRA: ``y = W_e x + (alpha / r) * B_e (A_e x)`` for each chosen expert e.

transformers stacks the experts of a layer in parameters of three dimensions, and peft adapts them
as ``target_parameters``. Adapter tensors have peft's shapes: ``A`` [E * r, in] with the experts one
after another, and ``B`` [out, r * E] with the expert as its last index.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tinker_cookbook.engine.kernels import (
    ExpertRows,
    FrozenExperts,
    freeze_experts,
    gathered_experts,
)
from tinker_cookbook.engine.model.lora import ActiveTerms, Target
from tinker_cookbook.engine.model.low_rank import ExpertStack, LowRank, Segments
from tinker_cookbook.engine.model.placement import Placement

_DOWN = "down_proj"


def stacked_experts(model: nn.Module) -> list[str]:
    """Returns the names of modules with experts stacked as transformers stacks them."""
    return [name for name, module in model.named_modules() if _known(module)]


def _known(module: Any) -> bool:
    # ``use_experts_implementation`` of transformers sets these, whatever the architecture.
    if not all(hasattr(module, name) for name in ("is_transposed", "has_gate", "has_bias")):
        return False
    stacked = [getattr(module, part, None) for part in (_up_name(module), _DOWN)]
    return all(isinstance(part, nn.Parameter) and part.dim() == 3 for part in stacked)


def _up_name(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


class AdapterExperts(nn.Module):
    """Frozen experts of a layer that add the active adapter's low-rank terms."""

    def __init__(
        self, base: Any, name: str, active: ActiveTerms, group: str, placement: Placement
    ) -> None:
        super().__init__()
        self._base, self._active = base, active
        self._up, self._down = (
            _Projection(base, part, name, active, placement) for part in (_up_name(base), _DOWN)
        )
        self.num_experts = self._up.experts
        # peft nests the wrappers of a module's parameters: the first is the innermost.
        self.targets = [
            self._up.target(group, f"{name}.base_layer"),
            self._down.target(group, name),
        ]

    @property
    def one_call(self) -> bool:
        """Whether one call computes all experts and adapters."""
        return self._up.frozen.one_call and self._down.frozen.one_call

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Returns [T, H] of ``hidden`` [T, H], the ``chosen`` experts [T, k] of each token, and
        their weights [T, k]."""
        k, segments = chosen.shape[1], self._active.segments
        if self._active.recorded is not None:
            self._active.recorded.append(chosen)
        order, back, rows = self._sorted(chosen)
        x = _Rearranged.apply(hidden, order // k, back, k)
        x = self._up(x, rows, segments)
        x = self._base._apply_gate(x) if self._base.has_gate else self._base.act_fn(x)
        x = self._down(x, rows, segments)
        if getattr(self._base, "has_post_expert_norm", False):  # absent in transformers 5.17
            x = self._base.post_expert_norm(x)
        # Sum in the order of ``chosen``, so that a token does not depend on the rest of the batch.
        x = _Rearranged.apply(x, back, order, 1).view(len(hidden), k, -1)
        return (x * weights[..., None]).sum(1).to(hidden.dtype)

    def _sorted(self, chosen: Tensor) -> tuple[Tensor, Tensor, ExpertRows]:
        """Returns the permutation that sorts (token, expert) pairs [T * k] by expert and adapter,
        its inverse, and the sorted rows."""
        groups, (numbers, adapters) = chosen, self._adapters(len(chosen))
        if numbers is not None:
            groups = chosen * adapters + numbers.to(chosen.device)[:, None]
        groups, order = groups.flatten().sort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        # A search in the sorted numbers, which needs no device synchronisation.
        every = torch.arange(self.num_experts * adapters, device=groups.device)
        ends = torch.searchsorted(groups, every, right=True, out_int32=True)
        return order, back, ExpertRows(ends, adapters)

    def _adapters(self, count: int) -> tuple[Tensor | None, int]:
        """Returns the index of the adapter of each of ``count`` tokens (``None``: all have the
        same), and the number of adapters."""
        if (segments := self._active.segments) is not None:
            numbers = segments.numbers(count)
            return numbers, 1 if numbers is None else len(segments.stretches)
        for part in (self._up, self._down):
            if isinstance(term := self._active.terms.get(part.name), ExpertStack):
                return term.of_token, term.count
        return None, 1


class _Projection(nn.Module):
    """One stacked parameter of a layer's experts."""

    def __init__(
        self, base: Any, part: str, module: str, active: ActiveTerms, placement: Placement
    ) -> None:
        super().__init__()
        weight = getattr(base, part).detach()
        weight = weight.transpose(1, 2) if base.is_transposed else weight
        self.experts, self.outputs, self.inputs = weight.shape
        self.name, self._active = f"{module}.{part}", active
        bias = getattr(base, f"{part}_bias", None)
        self._bias = None if bias is None else bias.detach().to(placement.device)
        self._packed: FrozenExperts | None = None
        if placement.sharding is not None:
            self.sharded = placement.sharding.matrix(weight, placement.device)
        else:
            self._packed = freeze_experts(weight.to(placement.device), self._bias, placement.layout)
        # Only these forms are used from here on; other code may still read dtype and device.
        setattr(base, part, nn.Parameter(weight.new_empty(0), requires_grad=False))

    @property
    def frozen(self) -> FrozenExperts:
        """The products; those of a sharded base model exist only while its layer runs."""
        if self._packed is not None:
            return self._packed
        stacked = self.sharded.layout.dense().view(self.experts, self.outputs, self.inputs)
        return gathered_experts(stacked, self._bias)

    def target(self, group: str, saved_as: str) -> Target:
        """Returns the adapter target; peft names its tensors after ``saved_as``."""
        return Target(
            self.name, group, self.inputs, self.outputs, experts=self.experts, saved_as=saved_as
        )

    def forward(self, x: Tensor, rows: ExpertRows, segments: Segments | None) -> Tensor:
        """Returns [S, out] for the sorted ``x`` [S, in]; sampling passes ``segments``."""
        if segments is not None:
            terms = [term and term.by_expert(self.experts) for term in segments.terms_of(self.name)]
            return self.frozen.adapted(x, rows, terms)
        term = self._active.terms.get(self.name)
        a, b = (None, None) if term is None else (term.a, term.b)
        return _GroupedProduct.apply(x, self, rows, term, a, b)


class _GroupedProduct(torch.autograd.Function):
    """``x W_e^T + bias_e + (x A_e^T) B_e^T`` with gradients for ``x``, ``A`` and ``B``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        projection: _Projection,
        rows: ExpertRows,
        term: LowRank | None,
        a: Tensor | None,
        b: Tensor | None,
    ) -> Tensor:
        # ``a`` and ``b`` are the tensors of ``term``; autograd tracks only tensor arguments.
        ctx.projection, ctx.rows, ctx.term = projection, rows, term
        ctx.split = None if term is None else term.by_expert(projection.experts)
        out, lows = projection.frozen.trained(x, rows, ctx.split)
        if term is not None:
            ctx.save_for_backward(x, *lows)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, term = upstream[0].contiguous(), ctx.term
        needs_x = ctx.needs_input_grad[0]
        if term is None:
            frozen = ctx.projection.frozen
            return frozen.input_gradient(gradient, ctx.rows) if needs_x else None, *[None] * 5
        x, *lows = ctx.saved_tensors  # read only once, as activation checkpointing requires
        frozen = ctx.projection.frozen
        d_x, d_a, d_b = frozen.gradients(gradient, x, lows, ctx.rows, ctx.split, needs_x)
        return d_x, None, None, None, *term.of_experts(d_a, d_b)


class _Rearranged(torch.autograd.Function):
    """``x[index]`` with a deterministic gradient: sums ``copies`` rows in a fixed order. ``back``
    has the position of each copy in the result. torch's gradient of an index has no fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor, copies: int) -> Tensor:
        ctx.back, ctx.copies = back, copies
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient = upstream[0].index_select(0, ctx.back)
        if ctx.copies > 1:
            gradient = gradient.view(-1, ctx.copies, gradient.shape[-1]).sum(1)
        return gradient, None, None, None
