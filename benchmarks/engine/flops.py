"""Floating-point operations that a LoRA training step needs, whichever way it is computed.

Of ``N`` non-pad tokens, ``W`` of them with loss, in sequences of lengths ``T``::

    linear layers    N * (4 * body + 6 * lora_body)
    unembedding      W * (4 * head + 6 * lora_head)
    attention        sum over sequences of 6 * layers * heads * head_dim * T^2

A multiply-add counts as two. A frozen weight costs 2 forward and 2 backward (for its input; its
own gradient is not needed), an adapter weight 2 and 4. Causal attention looks at T^2 / 2 pairs,
each with two products of ``head_dim``: 2 T^2 heads head_dim forward, twice that backward.
Padding, logits of tokens without loss and recomputed layers are no work the step needs, so they
lower the share of the ceiling (model FLOP utilisation, Chowdhery et al. 2022, arXiv 2204.02311).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class ModelSize:
    """Weights of a model that take part in matrix products, and its attention's width.

    ``total`` counts each stored weight once; ``lora_body`` and ``lora_head`` are per rank.
    A layer keeps ``2 * kv_width`` numbers for a token in its cache.
    """

    total: int
    body: int
    head: int
    lora_body: int
    lora_head: int
    layers: int
    attention_width: int
    kv_width: int
    hidden: int
    inner: int
    vocab: int
    context: int

    def flops(self, lengths: Sequence[int], trained: int, rank: int) -> float:
        """Operations of one forward and backward pass; formula in the module's docstring."""
        squares = float(np.square(np.asarray(lengths, dtype=np.float64)).sum())
        linear = sum(lengths) * (4.0 * self.body + 6.0 * rank * self.lora_body)
        unembedding = trained * (4.0 * self.head + 6.0 * rank * self.lora_head)
        return linear + unembedding + 6.0 * self.layers * self.attention_width * squares


def model_size(folder: Path) -> ModelSize:
    """Reads the size off the model built without memory (torch's meta device)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    whole = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(whole)
    head = model.get_output_embeddings()
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    config = getattr(whole, "text_config", whole)
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return ModelSize(
        total=sum({id(p): p.numel() for p in model.parameters()}.values()),
        body=sum(m.weight.numel() for m in linears),
        head=head.weight.numel(),
        lora_body=sum(m.in_features + m.out_features for m in linears),
        lora_head=head.in_features + head.out_features,
        layers=int(config.num_hidden_layers),
        attention_width=heads * head_dim,
        kv_width=head_dim * int(getattr(config, "num_key_value_heads", None) or heads),
        hidden=int(config.hidden_size),
        inner=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
        vocab=int(head.weight.shape[0]),
        context=int(getattr(config, "max_position_embeddings", None) or 1 << 30),
    )
