"""Attention for training in bfloat16 on a CPU.

On a CPU, torch's fused kernel computes bfloat16 gradients several times slower than batched matrix
products. For rows of moderate length, this module saves the probabilities [heads, L, L] in bfloat16
and uses batched products; scores and softmax are fp32, as inside the fused kernel. Everything else
goes to transformers' ``sdpa``: inference, decoding with a cache, long rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LONGEST_ROW = 1024
"""Longer rows use the fused kernel, because the probabilities would need too much memory."""


def training_attention(device: torch.device, dtype: torch.dtype) -> Callable[..., Any] | None:
    """Returns an attention function for transformers' registry; ``None``: ``sdpa`` is as fast."""
    return attention_forward if device.type == "cpu" and dtype == torch.bfloat16 else None


class _Attention(torch.autograd.Function):
    """``softmax(scale * q k^T + bias) v`` over a batch of heads."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        # Scores and softmax in fp32; the probabilities are saved in bfloat16, half the memory.
        scores = torch.baddbmm(bias, q.float(), k.float().transpose(1, 2), alpha=scale)
        p = scores.softmax(-1).to(q.dtype)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        return torch.bmm(p, v)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, p = ctx.saved_tensors
        (d_out,) = upstream
        d_v = torch.bmm(p.transpose(1, 2), d_out)
        # Products are bfloat16. The difference below loses digits by cancellation, so it is fp32.
        d_p = torch.bmm(d_out, v.transpose(1, 2)).float()
        p = p.float()
        # Softmax: dS = P * (dP - sum(P * dP)).
        d_s = (d_p - (p * d_p).sum(-1, keepdim=True)).mul_(p).mul_(ctx.scale).to(q.dtype)
        return torch.bmm(d_s, k), torch.bmm(d_s.transpose(1, 2), q), d_v, None, None


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface, with the mask of ``sdpa``: q [B, heads, L, D],
    k and v [B, kv heads, L, D]."""
    length = query.shape[2]
    # Only the bfloat16 gradient is slow in ``sdpa``. The other conditions exclude what is not
    # implemented here: dropout, caches, other masks.
    usable = (
        query.requires_grad
        and query.dtype == torch.bfloat16
        and dropout == 0.0
        and key.shape[2] == length <= _LONGEST_ROW
        and getattr(module, "is_causal", True)
        and not any(kwargs.get(name) is not None for name in ("is_causal", "position_bias"))
    )
    if not usable:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    # Convert the mask to fp32 [B or 1, L, L]: 0 for visible keys, -inf for others.
    visible = attention_mask
    if visible is None:
        # transformers passes no mask if attention is purely causal.
        visible = torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device).tril()
    if visible.dtype == torch.bool:
        bias = torch.zeros(visible.shape, device=query.device).masked_fill_(~visible, -torch.inf)
    else:
        bias = visible.float()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return grouped_attention(query, key, value, bias[:, 0], scale).transpose(1, 2), None


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float
) -> Tensor:
    """Returns attention [B, heads, L, D] of ``query`` [B, heads, L, D] over S keys and values.

    ``key`` and ``value`` are [B, kv heads, S, D], the fp32 ``bias`` [B or 1, L, S].
    """
    batch, heads, length, width = query.shape
    kv_heads, seen = key.shape[1], key.shape[2]
    # Stack the query heads of one key head as rows: fewer, larger products, no repeated keys.
    group = heads // kv_heads
    together = batch * kv_heads if len(bias) > 1 else 1  # a common bias is broadcast
    bias = bias[:, None, None].expand(-1, together // len(bias), group, length, seen)
    out = _Attention.apply(
        query.reshape(batch * kv_heads, group * length, width),
        key.reshape(batch * kv_heads, seen, width),
        value.reshape(batch * kv_heads, seen, value.shape[-1]),
        bias.reshape(together, group * length, seen),
        scale,
    )
    return out.view(batch, heads, length, -1)
