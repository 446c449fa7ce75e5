"""Replaces the attention of a transformers model by the engine's.

transformers looks up the attention function of a model in a registry, by the name in its config.
The engine registers one function for all its batches. It passes the queries, keys and values of a
layer to the active layout: ``BatchLayout`` (sampling from a KV cache), ``TreeLayout`` (training
with shared prefixes) or ``PackedLayout`` (both, and packed rows, on CUDA).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

_NAME = "tinker_cookbook_layout"


@dataclass(frozen=True)
class AttentionCall:
    """Attention inputs of one layer for a batch whose tokens form one row [T].

    ``query`` is [T, heads, D], ``key`` and ``value`` are [T, kv heads, D]; ``sinks`` is an
    additional logit per head.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class Layout(Protocol):
    """Which tokens of a batch attend to which."""

    windows_seen: dict[int, int | None]
    """Sliding window of each layer that was called. The checks at load read it."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Returns the attention [T, heads, D]."""
        ...


_layouts: dict[int, Layout] = {}
"""Active layout of each model, by the ``id`` of its config.

No context variable: on CUDA, recomputed layers run in a thread of autograd, which does not have the
caller's context."""


def register(
    name: str, forward: Callable[..., Any], mask: Callable[..., Any] | None = None
) -> None:
    """Registers an attention function and its mask function (default: no mask)."""
    from transformers import AttentionInterface, AttentionMaskInterface

    # transformers looks for the mask function under the same name. Without one it builds no mask.
    # Otherwise it first inspects the positions, which forces a GPU synchronisation in each step.
    AttentionInterface.register(name, forward)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)


@contextmanager
def use_layout(config: Any, layout: Layout) -> Iterator[None]:
    """Makes the model of ``config`` attend as ``layout`` describes, inside the block."""
    register(_NAME, _forward)
    # transformers reads the name at every call, so changing the config is enough. It is restored
    # below, because passes without a layout use the model's usual attention.
    usual, outer = config._attn_implementation, _layouts.get(id(config))
    config._attn_implementation, _layouts[id(config)] = _NAME, layout
    try:
        yield
    finally:
        config._attn_implementation = usual
        if outer is None:
            del _layouts[id(config)]
        else:
            _layouts[id(config)] = outer


def _forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: q [1, heads, T, D], k and v [1, kv heads, T, D]."""
    layout, layer = _layouts[id(module.config)], int(module.layer_idx)  # type: ignore[arg-type]
    # ``attention_mask`` is ignored: the layout defines which tokens are visible.
    layout.windows_seen[layer] = sliding_window
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    call = AttentionCall(layer, q, k, v, scale, sliding_window, softcap, s_aux)
    return layout.attend(call)[None], None


def causal_bias(
    query: Tensor, key: Tensor, window: int | None, last_seen: Tensor | None = None
) -> Tensor:
    """Returns fp32 [Q, K]: 0 for visible keys, -inf for others, from positions [Q] and [K].

    ``last_seen`` [Q] is the last visible key of each query, by default the query itself.
    """
    # A token sees itself, and a window of n tokens includes it.
    seen = key <= (query if last_seen is None else last_seen)[:, None]
    if window is not None:
        seen &= key > query[:, None] - window
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)
