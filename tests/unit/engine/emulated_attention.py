"""CUDA's attention kernels in plain torch, as the operators' arguments describe them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def varlen_forward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, bounds_k: Tensor, max_q: int,
    max_k: int, is_causal: bool, scale: float, window_size: Any, enable_gqa: bool = False, *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``torch_attn::_varlen_attn``: attention, log-sum-exp and random state."""
    assert bounds.dtype == torch.int32
    assert torch.equal(bounds, bounds_k)
    assert max_q == max_k == int(bounds.diff().max())
    assert bounds[-1] == len(query) == len(key)
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert all(tensor.stride(-1) == 1 for tensor in (query, key, value)), "strides of flash"
    assert is_causal == (tuple(window_size) == (-1, 0))
    out = _attention(query, key, value, bounds, scale, window_size)
    lse = out.new_empty(query.shape[1], len(query), dtype=torch.float32)
    return out, lse, torch.empty(2, dtype=torch.uint64)


def varlen_backward(
    upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    bounds: Tensor, bounds_k: Tensor, max_q: int, max_k: int, is_causal: bool, state: Tensor,
    scale: float, window_size: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``torch_attn::_varlen_attn_backward``, by the formulas: no autograd runs inside an
    operator."""
    found: list[list[Tensor]] = [[], [], []]
    for first, end in bounds.unfold(0, 2, 1).tolist():
        q, k, v, g = (t[first:end].float().transpose(0, 1) for t in (query, key, value, upstream))
        group = len(q) // len(k)
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~_seen(end - first, window_size), -1e9)
        p = scores.softmax(-1)
        d_p = g @ v.transpose(1, 2)
        d_s = p * (d_p - (p * d_p).sum(-1, keepdim=True)) * scale
        for out_list, gradient, heads in (
            (found[0], d_s @ k, 1),
            (found[1], d_s.transpose(1, 2) @ q, group),
            (found[2], p.transpose(1, 2) @ g, group),
        ):
            # Query heads of one key head add up.
            out_list.append(gradient.unflatten(0, (-1, heads)).sum(1).transpose(0, 1))
    d_q, d_k, d_v = (torch.cat(parts).to(query.dtype) for parts in found)
    return d_q, d_k, d_v


def _attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, window: Any
) -> Tensor:
    parts = []
    for first, end in bounds.unfold(0, 2, 1).tolist():
        q, k, v = (t[first:end].transpose(0, 1)[None] for t in (query, key, value))
        out, _ = flex(q, k, v, None, _seen(end - first, window), scale)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts).to(query.dtype)


def _seen(length: int, window: Any) -> Tensor:
    left, right = window
    assert right == 0
    place = torch.arange(length)
    before = place[:, None] - place
    return (before >= 0) if left < 0 else (before >= 0) & (before <= left)


def flex(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, seen: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """FlexAttention [1, heads, L, D] and log-sum-exp [1, heads, L], with all scores in memory."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.float(), *(t.float().repeat_interleave(group, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if score_mod is not None:
        scores = score_mod(scores, None, None, None, None)
    scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def seen_under(mask: Any, place: Tensor) -> Tensor:
    """The mask [L, L] of positions ``place`` [L], by its rule alone."""
    return mask.mask_mod(None, None, place[:, None], place[None])


def flex_attention(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask: Any, scale: float, grouped: bool,
    return_aux: Any = None, kernel_options: Any = None,
) -> Any:  # fmt: skip
    """torch's function on CPU tensors."""
    assert grouped == (q.shape[1] != k.shape[1])
    out, lse = flex(q, k, v, score_mod, seen_under(mask, torch.arange(q.shape[2])), scale)
    out = out.to(q.dtype)
    return out if return_aux is None else (out, SimpleNamespace(lse=lse))


def register_on_cpu() -> None:
    """Lets ``varlen_attn`` run on CPU tensors, in any dtype."""
    from torch.nn.attention import varlen

    varlen._varlen_attn.register_kernel("cpu")(varlen_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(varlen_backward)
