"""Kernels behind one interface: the engine imports this package, never the code of a device.

``kernels.cpu`` has kernels in C, ``kernels.cuda`` those of Liger and of torch for CUDA alone; where
they do not apply (another device or dtype, no compiler), the same names use torch's operators.

* ``FrozenWeight`` and ``add_low_rank``: products with a frozen matrix, and adapters' terms;
* ``quantized_layout``: matrices in 4 or 8 bits, for ``FrozenWeight``;
* ``freeze_experts``: products of routed experts, each for its rows;
* ``fuse``: RMS norms, gated MLPs and rotary embeddings of a model in one pass over memory each;
* ``training_attention`` and ``grouped_attention``: attention with gradients in bfloat16;
* ``PagedAttention`` over a paged KV cache, whose page size is ``page_tokens``.
"""

from typing import Any

import torch

from tinker_cookbook.engine.kernels.cpu import elementwise as _on_cpu
from tinker_cookbook.engine.kernels.cpu.attention import PagedAttention, page_tokens
from tinker_cookbook.engine.kernels.cpu.linear import FrozenWeight, MakeLayout, add_low_rank
from tinker_cookbook.engine.kernels.cpu.training_attention import (
    grouped_attention,
    training_attention,
)
from tinker_cookbook.engine.kernels.cuda import elementwise as _on_cuda
from tinker_cookbook.engine.kernels.experts import ExpertRows, FrozenExperts, freeze_experts
from tinker_cookbook.engine.kernels.fusing import FusedRotary, fuse_with
from tinker_cookbook.engine.kernels.quantized import BITS, quantized_layout

__all__ = [
    "BITS",
    "ExpertRows",
    "FrozenExperts",
    "FrozenWeight",
    "FusedRotary",
    "PagedAttention",
    "MakeLayout",
    "add_low_rank",
    "freeze_experts",
    "fuse",
    "grouped_attention",
    "page_tokens",
    "quantized_layout",
    "training_attention",
]


def fuse(model: Any, dtype: torch.dtype) -> FusedRotary:
    """Replaces the norms and MLPs of a model that agree with its device's kernels, and returns its
    rotary embeddings. Nothing is replaced where there are no kernels for the device and dtype."""
    kind = model.get_input_embeddings().weight.device.type
    functions = None
    if kind == "cpu":
        functions = _on_cpu.elementwise(dtype)
    elif kind == "cuda":
        functions = _on_cuda.elementwise()
    return FusedRotary() if functions is None else fuse_with(model, dtype, functions)
