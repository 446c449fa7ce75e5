"""Published shapes of well-known models, and estimates of the memory that they need.

A table, because the question "does this model fit?" must not need a download. Bytes follow the
engine: a tied head is stored twice (its copy is reordered for products), adapters and both moments
of AdamW are float32, and the KV cache has the dtype of the base model.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinker_cookbook.engine.activations import activation_bytes_per_token
from tinker_cookbook.engine.device_names import BITS

_ADAPTER_COPIES = 4
"""float32 numbers of each adapter weight in training: weight, gradient, two moments."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder; ``inner`` is the width of the MLP, or of one routed expert."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0

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


_S = ModelShape
SHAPES: tuple[ModelShape, ...] = (
    _S("HuggingFaceTB/SmolLM2-135M-Instruct", 30, 576, 1536, 9, 3, 64, 49_152, True),
    _S("HuggingFaceTB/SmolLM2-360M-Instruct", 32, 960, 2560, 15, 5, 64, 49_152, True),
    _S("Qwen/Qwen3-0.6B", 28, 1024, 3072, 16, 8, 128, 151_936, True),
    _S("meta-llama/Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64, 128_256, True),
    _S("Qwen/Qwen3-1.7B", 28, 2048, 6144, 16, 8, 128, 151_936, True),
    _S("meta-llama/Llama-3.2-3B", 28, 3072, 8192, 24, 8, 128, 128_256, True),
    _S("Qwen/Qwen3-4B-Instruct-2507", 36, 2560, 9728, 32, 8, 128, 151_936, True),
    _S("meta-llama/Llama-3.1-8B-Instruct", 32, 4096, 14_336, 32, 8, 128, 128_256, False),
    _S("Qwen/Qwen3-8B", 36, 4096, 12_288, 32, 8, 128, 151_936, False),
    _S("Qwen/Qwen3-14B", 40, 5120, 17_408, 40, 8, 128, 151_936, False),
    _S("Qwen/Qwen3-30B-A3B", 48, 2048, 768, 32, 4, 128, 151_936, False, 128, 8),
    _S("Qwen/Qwen3-32B", 64, 5120, 25_600, 64, 8, 128, 151_936, False),
    _S("meta-llama/Llama-3.3-70B-Instruct", 80, 8192, 28_672, 64, 8, 128, 128_256, False),
    _S("Qwen/Qwen3-235B-A22B-Instruct-2507", 94, 4096, 1536, 64, 4, 128, 151_936, False, 128, 8),
)
"""From small to large."""

SHAPE_BY_NAME: dict[str, ModelShape] = {shape.name: shape for shape in SHAPES}
