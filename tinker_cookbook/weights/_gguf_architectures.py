"""Architectures that can be exported, as llama.cpp stores them: metadata, names, row order.

Sources: the documentation of GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and
the tables of the ``gguf`` package. Features that llama.cpp lacks are refused here, because a file
without them would load and give other answers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_cookbook.exceptions import ConfigurationError, WeightsMergeError, install_command

if TYPE_CHECKING:
    import gguf
    from torch import Tensor

_LLAMA, _QWEN2, _QWEN3, _GEMMA3 = "llama", "qwen2", "qwen3", "gemma3"
_CLASSES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Gemma3ForCausalLM": _GEMMA3,
}
_ROTARY = re.compile(r"\.self_attn\.(q|k)_proj\.(weight|bias|lora_B)")
_GEMMA_PERIOD = 6  # every sixth layer of Gemma 3 attends to the whole context
ROPE_FACTORS = "rope_freqs.weight"


def require_gguf() -> None:
    """Raises ``ConfigurationError`` if the ``gguf`` package is not installed."""
    from importlib.util import find_spec

    if find_spec("gguf") is None:
        raise ConfigurationError(
            "writing GGUF needs the package 'gguf', which is not installed; run: "
            f"{install_command('gguf')}"
        )


@cache
def _names(architecture: str, layers: int) -> gguf.TensorNameMap:
    """Returns llama.cpp's names of all tensors; making this table takes 20 ms."""
    import gguf

    kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    return gguf.get_tensor_name_map(kind, layers)


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp, for one model."""

    name: str
    """``general.architecture``."""
    config: Any
    """The model's transformers configuration."""

    @classmethod
    def of(cls, folder: Path) -> Architecture:
        """Reads the configuration of a model in transformers format.

        Raises:
            WeightsMergeError: The architecture, or a feature of it, cannot be exported.
        """
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        found = (config.architectures or ["none"])[0]
        if found not in _CLASSES:
            raise WeightsMergeError(
                f"{folder}: architecture {found} cannot be exported as GGUF; supported: "
                f"{', '.join(_CLASSES)}. `merge` writes any model in transformers format, which "
                "llama.cpp's own converter may read (with --mmproj a vision tower too)"
            )
        architecture = cls(_CLASSES[found], config)
        architecture._refuse(folder)
        return architecture

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return int(self.config.num_hidden_layers)

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        given = getattr(self.config, "head_dim", None)
        return int(given or self.config.hidden_size // self.config.num_attention_heads)

    def tensor_name(self, name: str) -> str:
        """Returns llama.cpp's name for a transformers tensor.

        Raises:
            WeightsMergeError: llama.cpp has no such tensor in this architecture.
        """
        names = _names(self.name, self.layers)
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise WeightsMergeError(
                f"{name}: llama.cpp's architecture {self.name} has no such tensor"
            )
        return found

    def stored(self, name: str, tensor: Tensor) -> Tensor:
        """Returns a tensor with the row order and values that llama.cpp stores.

        transformers stores a rotary pair of q or k in rows (i, i + head_size/2) of a head;
        llama.cpp's architecture ``llama`` stores it in rows (2i, 2i + 1). Gemma multiplies by 1 +
        the weight of a norm, and llama.cpp by the stored value.

        Args:
            name: Name in transformers; ``lora_B`` in place of ``weight`` for that matrix.
            tensor: [out, in], [out], or [out, r] for ``lora_B``.
        """
        if heads := self._rotary_heads(name):
            return _swapped(tensor, heads, 2, -1)
        return tensor + 1 if self._is_offset(name) else tensor

    def restored(self, name: str, tensor: Tensor) -> Tensor:
        """Inverse of ``stored``."""
        if heads := self._rotary_heads(name):
            return _swapped(tensor, heads, -1, 2)
        return tensor - 1 if self._is_offset(name) else tensor

    def _rotary_heads(self, name: str) -> int:
        """Returns the number of heads of a tensor whose rows are reordered; 0 for others."""
        rotary = _ROTARY.search(name)
        if self.name != _LLAMA or not rotary:
            return 0
        config = self.config
        return config.num_attention_heads if rotary[1] == "q" else config.num_key_value_heads

    def _is_offset(self, name: str) -> bool:
        return self.name == _GEMMA3 and name.endswith("norm.weight")

    def write(self, writer: gguf.GGUFWriter) -> None:
        """Adds the shape of the model and its positions to the metadata."""
        config = self.config
        context = int(config.max_position_embeddings)
        if self.name == _LLAMA and getattr(config, "sliding_window", None):
            # llama.cpp uses full attention here, which is equal as long as the text fits the
            # window.
            context = min(context, int(config.sliding_window))
        writer.add_vocab_size(int(config.vocab_size))
        writer.add_context_length(context)
        writer.add_embedding_length(int(config.hidden_size))
        writer.add_block_count(self.layers)
        writer.add_feed_forward_length(int(config.intermediate_size))
        writer.add_head_count(int(config.num_attention_heads))
        writer.add_head_count_kv(int(config.num_key_value_heads))
        writer.add_key_length(self.head_size)
        writer.add_value_length(self.head_size)
        writer.add_layer_norm_rms_eps(float(config.rms_norm_eps))
        writer.add_rope_dimension_count(self.head_size)
        rope = self._rope()
        writer.add_rope_freq_base(float(rope["rope_theta"]))
        kind, factor = rope.get("rope_type", "default"), rope.get("factor")
        if kind in ("linear", "yarn") and factor is not None:
            import gguf

            writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
            writer.add_rope_scaling_factor(float(factor))
            if kind == "yarn":
                original = rope.get("original_max_position_embeddings") or context
                writer.add_rope_scaling_orig_ctx_len(int(original))
        if self.name == _GEMMA3:
            writer.add_sliding_window(int(config.sliding_window))
            local = config.rope_parameters["sliding_attention"]["rope_theta"]
            writer.add_rope_freq_base_swa(float(local))

    def rope_factors(self) -> Tensor | None:
        """Returns the divisors [head_size / 2] of Llama 3's rotary frequencies; None for others."""
        if self._rope().get("rope_type") != "llama3":
            return None
        import torch
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](self.config, torch.device("cpu"))
        exponents = torch.arange(0, self.head_size, 2, dtype=torch.float32) / self.head_size
        return float(self._rope()["rope_theta"]) ** -exponents / scaled

    def _rope(self) -> dict[str, Any]:
        """Returns the rotary parameters; for Gemma those of the full-attention layers."""
        rope = self.config.rope_parameters
        return dict(rope["full_attention"] if self.name == _GEMMA3 else rope)

    def _refuse(self, folder: Path) -> None:
        """Raises for features that llama.cpp's files cannot express."""
        config, rope = self.config, self._rope()
        layers = list(getattr(config, "layer_types", None) or [])
        problems = []
        if rope.get("rope_type", "default") not in ("default", "linear", "yarn", "llama3"):
            problems.append(f"rope_type={rope['rope_type']!r}")
        problems += [
            f"yarn with {key}={rope[key]}"
            for key, usual in (("beta_fast", 32), ("beta_slow", 1))
            if rope.get("rope_type") == "yarn" and rope.get(key) not in (None, usual)
        ]
        if self.name in (_QWEN2, _QWEN3) and "sliding_attention" in layers:
            problems.append("sliding-window attention")
        if self.name == _QWEN3 and config.attention_bias:
            problems.append("biases of the attention")
        activation = getattr(config, "hidden_act", None) or config.hidden_activation
        expected = "gelu_pytorch_tanh" if self.name == _GEMMA3 else "silu"
        if activation != expected:
            problems.append(f"activation {activation!r}")
        if self.name == _GEMMA3:
            pattern = [
                "sliding_attention" if (layer + 1) % _GEMMA_PERIOD else "full_attention"
                for layer in range(self.layers)
            ]
            if layers != pattern:
                problems.append(f"layer_types other than five windows and one full layer: {layers}")
            if config.query_pre_attn_scalar != self.head_size:
                problems.append(f"query_pre_attn_scalar={config.query_pre_attn_scalar}")
            if config.final_logit_softcapping or config.attn_logit_softcapping:
                problems.append("soft caps of logits")
        if problems:
            raise WeightsMergeError(
                f"{folder}: cannot be exported as GGUF, because llama.cpp's architecture "
                f"{self.name} does not have: {'; '.join(problems)}"
            )


def _swapped(tensor: Tensor, *shape: int) -> Tensor:
    """Returns the rows with the last two of the axes ``shape`` swapped."""
    split = tensor.reshape(*shape, *tensor.shape[1:])
    return split.transpose(1, 2).reshape(tensor.shape)
