"""Kernels behind one interface: the engine imports this package, never a device's kernels directly.

``kernels.cpu`` has kernels in C, ``kernels.cuda`` uses CUDA kernels of Liger and torch. Where
they do not apply (another device or dtype, no compiler), the same names fall back to torch's
operators.

* ``FrozenWeight`` and ``add_low_rank``: products with a frozen matrix, and low-rank terms of
  adapters;
* ``quantized_layout``: matrices in 4 or 8 bits, for ``FrozenWeight``;
* ``freeze_experts``: products of routed experts, each for its rows;
* ``ShardableLayout`` and ``gathered_experts``: the same for matrices that processes shard;
* ``fuse``: RMS norms, gated MLPs and rotary embeddings of a model, each in one pass over memory;
* ``training_attention`` and ``grouped_attention``: attention with gradients in bfloat16;
* ``PagedAttention``: attention over a paged KV cache with ``page_tokens`` tokens per page, in
  ``zeros_in_huge_pages``;
* ``compiled_softmax``: log-probabilities and gradients of the head's logits on CUDA;
* ``StepList``: all layers of a sampling step in one call.
"""

from typing import Any

import torch

from tinker_cookbook.engine.kernels.cpu import elementwise as _on_cpu
from tinker_cookbook.engine.kernels.cpu.attention import PagedAttention, page_tokens
from tinker_cookbook.engine.kernels.cpu.huge_pages import zeros_in_huge_pages
from tinker_cookbook.engine.kernels.cpu.linear import (
    FrozenWeight,
    Layout,
    MakeLayout,
    MakeShardable,
    ShardableLayout,
    add_low_rank,
)
from tinker_cookbook.engine.kernels.cpu.step import StepList
from tinker_cookbook.engine.kernels.cpu.training_attention import (
    grouped_attention,
    training_attention,
)
from tinker_cookbook.engine.kernels.cuda import elementwise as _on_cuda
from tinker_cookbook.engine.kernels.cuda import softmax as compiled_softmax
from tinker_cookbook.engine.kernels.experts import (
    ExpertRows,
    FrozenExperts,
    freeze_experts,
    gathered_experts,
)
from tinker_cookbook.engine.kernels.fusing import FusedRotary, fuse_with
from tinker_cookbook.leaves import load_leaf

__all__ = [
    "ExpertRows",
    "FrozenExperts",
    "FrozenWeight",
    "FusedRotary",
    "Layout",
    "MakeLayout",
    "MakeShardable",
    "PagedAttention",
    "ShardableLayout",
    "StepList",
    "add_low_rank",
    "compiled_softmax",
    "freeze_experts",
    "fuse",
    "gathered_experts",
    "grouped_attention",
    "page_tokens",
    "quantized_layout",
    "training_attention",
    "zeros_in_huge_pages",
]


def quantized_layout(base_dtype: str) -> MakeLayout | None:
    """Returns the layout of matrices in ``nf4`` or ``int8``; ``None`` for ``auto``.

    Raises:
        ConfigurationError: bitsandbytes is not installed.
    """
    if base_dtype == "auto":
        return None
    quantized = load_leaf("engine.extensions.quantized", f"base_dtype={base_dtype}")
    return quantized.quantized_layout(base_dtype)


def fuse(model: Any, dtype: torch.dtype) -> FusedRotary:
    """Replaces the norms and MLPs of a model for which the device's kernels give equal results;
    returns its rotary embeddings. Replaces nothing if there are no kernels for the device and
    dtype."""
    kind = model.get_input_embeddings().weight.device.type
    functions = None
    if kind == "cpu":
        functions = _on_cpu.elementwise(dtype)
    elif kind == "cuda":
        functions = _on_cuda.elementwise()
    return FusedRotary() if functions is None else fuse_with(model, dtype, functions)
