"""Kernels behind one interface: the engine imports this package, never the code of a device.

``kernels.cpu`` has kernels in C; where they do not apply (another device or dtype, no compiler),
the same names use torch's operators. Kernels of another device would be chosen here as well.

* ``FrozenWeight`` and ``add_low_rank``: products with a frozen matrix, and adapters' terms;
* ``quantized_layout``: matrices in 4 or 8 bits, for ``FrozenWeight``;
* ``freeze_experts``: products of routed experts, each for its rows;
* ``fuse``: RMS norms, gated MLPs and rotary embeddings of a model in one pass over memory each;
* ``training_attention`` and ``grouped_attention``: attention with gradients in bfloat16;
* ``PagedAttention`` over a paged KV cache, whose page size is ``page_tokens``.
"""

from tinker_cookbook.engine.kernels.cpu.attention import PagedAttention, page_tokens
from tinker_cookbook.engine.kernels.cpu.elementwise import FusedRotary, fuse
from tinker_cookbook.engine.kernels.cpu.linear import FrozenWeight, MakeLayout, add_low_rank
from tinker_cookbook.engine.kernels.cpu.training_attention import (
    grouped_attention,
    training_attention,
)
from tinker_cookbook.engine.kernels.experts import ExpertRows, FrozenExperts, freeze_experts
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
