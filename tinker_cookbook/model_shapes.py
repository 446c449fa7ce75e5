"""The shape of a decoder, and what follows from it: numbers of weights, and the memory they need.

Bytes follow the engine: a tied head is stored twice (its copy is reordered for products), adapters
and both moments of AdamW are float32, and the KV cache has the dtype of the base model.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinker_cookbook.engine.activations import activation_bytes_per_token
from tinker_cookbook.engine.device_names import BITS

_ADAPTER_COPIES = 4
"""float32 numbers of each adapter weight in training: weight, gradient, two moments."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder; ``inner`` is the width of the MLP, or of one routed expert.

    ``family`` is that of ``hyperparam_utils.get_lr``; ``unusual`` is a key of the configuration
    that means layers which are not counted.
    """

    name: str
    family: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    unusual: str = ""

    @property
    def attention_weights(self) -> int:
        """Number of attention weights in all layers."""
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.layers * self.hidden * 2 * (width + kv_width)

    @property
    def mlp_weights(self) -> int:
        """Number of MLP weights in all layers, including all experts."""
        return self.layers * 3 * self.hidden * self.inner * max(1, self.experts)

    @property
    def parameters(self) -> int:
        """Number of weights of the model, without norms and routers."""
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.attention_weights + self.mlp_weights + tables

    @property
    def active_weights(self) -> int:
        """Number of weights used per token, without the input embedding."""
        share = self.experts_per_token / self.experts if self.experts else 1
        return int(self.attention_weights + self.mlp_weights * share + self.vocab * self.hidden)

    def weights_bytes(self, itemsize: int, base_dtype: str = "auto") -> int:
        """Returns the bytes of the base model in a dtype of ``itemsize`` bytes.

        ``base_dtype`` nf4 or int8 quantises the matrices of the layers, and the tables to 8 bits.
        """
        matrices = self.attention_weights + self.mlp_weights
        tables = self.vocab * self.hidden
        if base_dtype in BITS:
            tables *= 1 if self.tied else 2
            return int(matrices * BITS[base_dtype] / 8) + tables
        # Input embedding and head; a tied head has a copy of its own.
        return (matrices + 2 * tables) * itemsize

    @property
    def all_parameters(self) -> int:
        """Number of weights of the model, with norms and routers."""
        # Two norms per layer, and the final one.
        norms = 2 * self.hidden + (2 * self.head_dim if self.family == "qwen" else 0)
        routers = self.hidden * self.experts
        return self.parameters + self.layers * (norms + routers) + self.hidden

    def lora_weights(self) -> tuple[int, int, int]:
        """Returns the sizes of a rank-1 adapter on (MLP, attention, unembedding)."""
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * (self.hidden + width) + 2 * (self.hidden + kv_width)
        # The factor at the hidden dimension is shared among the experts of a layer.
        mlp = 3 * (self.hidden + self.inner * max(1, self.experts))
        return self.layers * mlp, self.layers * attention, self.hidden + self.vocab

    def adapter_bytes(self, rank: int) -> int:
        """Returns the bytes of an adapter in training: weights, gradients and moments."""
        mlp, attention, unembed = self.lora_weights()
        if self.experts:
            # The engine does not share factors among experts: each has one pair for gate and up,
            # one for down.
            mlp = self.layers * self.experts * (2 * self.hidden + 3 * self.inner)
        return _ADAPTER_COPIES * 4 * rank * (attention + unembed + mlp)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Returns the bytes of one token in the KV cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def activation_bytes_per_token(self, itemsize: int, *, recompute: bool = False) -> int:
        """Returns the bytes that a trained token saves for the backward pass.

        ``recompute``: with activation checkpointing (the inputs of all layers, and one complete
        layer).
        """
        inner = self.inner * max(1, self.experts_per_token)
        if recompute:
            layer = activation_bytes_per_token(1, self.hidden, inner, itemsize)
            return self.layers * self.hidden * itemsize + layer
        return activation_bytes_per_token(self.layers, self.hidden, inner, itemsize)
