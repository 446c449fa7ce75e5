"""Small models with a tokenizer, adapters on them, and what both compute by plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

SHAPE = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "gemma3": lambda: Gemma3TextConfig(**SHAPE, head_dim=16, query_pre_attn_scalar=16),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "gpt_oss": lambda: GptOssConfig(
        **SHAPE,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}  # qwen3 and gemma3 are tied
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


def make_base(folder: Path, kind: str = "qwen3", shard: str = "40KB", dtype=torch.float32) -> Path:
    """A random model in several files, with a tokenizer of bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.15)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def make_adapter(
    folder: Path,
    base: Path,
    ends: tuple[str, ...] = ALL,
    *,
    head: str = "lm_head",
    seed: int = 0,
    **config,
) -> Path:
    """A folder as the service gives it: an update of each layer with one of the ``ends``."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    rank = config.get("r", 4)
    tensors = {}
    model = AutoModelForCausalLM.from_pretrained(base)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ends:
            out, inner = module.weight.shape
            name = head if name == "lm_head" else name
            key = f"base_model.model.{name}.lora"
            tensors[f"{key}_A.weight"] = torch.randn(rank, inner, generator=generator) / inner**0.5
            tensors[f"{key}_B.weight"] = torch.randn(out, rank, generator=generator) * 0.02
    save_file(tensors, folder / "adapter_model.safetensors")
    body = {"peft_type": "LORA", "r": rank, "lora_alpha": 32, "target_modules": "all-linear",
            "base_model_name_or_path": str(base), "task_type": "CAUSAL_LM", **config}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(body))
    return folder


def adapted_model(base: Path, adapter: Path, scaling: float):
    """The base model with ``W + scaling * B A`` in float32; a changed head is a matrix alone."""
    from safetensors.torch import load_file

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for key in [k for k in tensors if k.endswith("lora_A.weight")]:
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        delta = scaling * tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
        head = name.endswith(("lm_head", "unembed_tokens"))
        module = model.get_output_embeddings() if head else model.get_submodule(name)
        module.weight = torch.nn.Parameter(module.weight.detach() + delta)
    return model


def logprobs_of(model, tokens: torch.Tensor) -> torch.Tensor:
    """[T, V] in float32."""
    with torch.no_grad():
        return model.eval()(input_ids=tokens[None]).logits[0].float().log_softmax(-1)


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def is_tied(folder: Path) -> bool:
    return AutoConfig.from_pretrained(folder).tie_word_embeddings
