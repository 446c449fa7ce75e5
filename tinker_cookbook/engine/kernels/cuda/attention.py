"""Attention for training on CUDA: sequences are packed in one row, without padding.

``packed_attention`` is a flash kernel for sequences without shared prefixes. ``sparse_attention``
supports any block mask, soft caps and sinks; torch compiles it at its first use, which takes
seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:  # imported where it is used, because torch's compiler takes seconds to import
    from torch.nn.attention.flex_attention import BlockMask

_WIDEST_HEAD = 256
"""Flash kernels keep a head in shared memory; wider heads do not fit."""

_OPTIONS: Any = {"BACKEND": "TRITON"}
"""Below 128 tokens torch would choose its kernel for decoding, which has no backward pass and no
version for narrow heads in float32."""

_KERNELS = 64
"""Maximum number of sparse kernels that are compiled."""


def packs(query: Tensor, value: Tensor) -> bool:
    """Returns whether ``packed_attention`` supports these heads [T, heads, D]."""
    width = query.shape[-1]
    half = query.dtype in (torch.bfloat16, torch.float16)
    return half and width == value.shape[-1] <= _WIDEST_HEAD and width % 8 == 0


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """Returns causal attention [T, heads, D] within each sequence.

    ``query`` is [T, heads, D], ``key`` and ``value`` are [T, kv heads, D]. Sequence i has the
    tokens from ``bounds[i]`` to before ``bounds[i + 1]`` (int32); a ``window`` includes the token
    itself.
    """
    from torch.nn.attention.varlen import varlen_attn

    # Flash attention's window counts only the keys before the token.
    before = -1 if window is None else window - 1
    # torch 2.11 supports grouped heads without an option.
    grouped = query.shape[1] != key.shape[1] and _takes(varlen_attn, "enable_gqa")
    options: dict[str, Any] = {"enable_gqa": True} if grouped else {}
    return varlen_attn(
        query, key, value, bounds, bounds, longest, longest,
        scale=scale, window_size=(before, 0), **options,
    )  # type: ignore[return-value]  # fmt: skip


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns attention [T, heads, D] with ``mask``; shapes as in ``packed_attention``.

    ``sinks`` [heads] are additional logits in the softmax that have no value vector.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    capped = None if softcap is None else _soft_cap(softcap)
    grouped = query.shape[1] != key.shape[1]
    attend = _flex_attention(query.device.type)
    if sinks is None:
        out = attend(q, k, v, capped, mask, scale, grouped, kernel_options=_OPTIONS)
    else:
        aux = AuxRequest(lse=True)
        out, aux = attend(
            q, k, v, capped, mask, scale, grouped, return_aux=aux, kernel_options=_OPTIONS
        )
        # An additional logit s divides all weights by ``1 + exp(s - log-sum-exp)``.
        share = torch.sigmoid(aux.lse - sinks.float()[:, None])
        out = out * share[..., None].to(out.dtype)
    return out[0].transpose(0, 1)


@cache
def _flex_attention(device_type: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    if device_type != "cuda":  # tests
        return flex_attention
    # Lengths differ in each batch, so compile one kernel for all. Head shapes, windows and soft
    # caps need separate kernels; above torch's limit of 8 it would materialise all scores.
    options: dict[str, Any] = {}
    if _takes(torch.compile, "recompile_limit"):
        options["recompile_limit"] = _KERNELS
    else:  # before torch 2.13 all functions have one limit
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, _KERNELS)
    return torch.compile(flex_attention, dynamic=True, **options)


@cache
def _takes(function: Callable[..., Any], parameter: str) -> bool:
    """Returns whether this version of a function has a parameter."""
    return parameter in signature(function).parameters


@cache
def _soft_cap(cap: float) -> Callable[..., Tensor]:
    """Returns the soft-cap function; the same object for the same cap, because a
    new object would be compiled again."""

    # torch would make a float of the closure an input of the kernel, which FlexAttention refuses.
    # A text is a constant.
    text = repr(cap)

    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return float(text) * torch.tanh(score / float(text))

    return capped
