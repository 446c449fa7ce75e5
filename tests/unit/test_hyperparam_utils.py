from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tinker_cookbook import hyperparam_utils as hp
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.model_table import LINEUP, SHAPES

_FLAGS = ("train_mlp", "train_attn", "train_unembed")


def test_llama_8b_gives_the_published_number():
    assert hp.get_lr("meta-llama/Llama-3.1-8B") == 0.0002856415043086949
    assert hp.get_lr("meta-llama/Llama-3.1-8B:peft:32768") == 0.0002856415043086949
    assert hp.get_lr("meta-llama/Llama-3.1-8B", is_lora=False) == pytest.approx(2.856e-5, rel=1e-3)


def test_an_unknown_model_without_a_copy_names_the_nearest():
    with pytest.raises(ConfigurationError, match=r"set learning_rate.*Qwen/Qwen3-8B"):
        hp.get_lr("Qwen/Qwen3-8C")


@pytest.mark.parametrize(
    ("train", "pattern"),
    [
        ({"train_mlp": True}, r".*\.(gate|up|down)_proj"),
        ({"train_attn": True}, r".*\.[qkvo]_proj"),
        ({"train_unembed": True}, r"lm_head"),
        ({"train_mlp": True, "train_attn": True, "train_unembed": True}, r".*_proj|lm_head"),
    ],
)
def test_adapter_size_is_what_peft_makes(stories_model: str, train: dict, pattern: str):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(stories_model)
    wrapped = get_peft_model(model, LoraConfig(r=5, target_modules=pattern))
    made = sum(p.numel() for n, p in wrapped.named_parameters() if ".lora_" in n)
    flags = {"train_mlp": False, "train_attn": False, "train_unembed": False, **train}
    assert hp.get_lora_param_count(stories_model, 5, **flags) == made > 0


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl", "smolvlm"])
def test_adapter_size_of_a_vision_language_model_is_what_peft_makes(kind: str, tmp_path: Path):
    from peft import LoraConfig, get_peft_model
    from tiny_vlm import tiny_vlm
    from transformers import AutoModelForImageTextToText

    folder = str(tiny_vlm(tmp_path / kind, kind))
    model = AutoModelForImageTextToText.from_pretrained(folder)
    language = r"model\.(language_model|text_model)\..*_proj"
    tower = r"model\.(?!language_model|text_model).*(proj|qkv|fc\d)"  # not the patches' convolution
    for pattern, train in ((f"lm_head|{language}", False), (f"lm_head|{language}|{tower}", True)):
        config = LoraConfig(r=5, target_modules=pattern, exclude_modules=r".*patch_embed.*")
        wrapped = get_peft_model(model, config)
        made = sum(p.numel() for n, p in wrapped.named_parameters() if ".lora_" in n)
        count = hp.get_lora_param_count(folder, 5)
        assert count + (hp.get_vision_lora_param_count(folder, 5) if train else 0) == made > 0
        model = wrapped.unload()


def test_the_table_agrees_with_transformers_models():
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    for name, config_class in (
        ("HuggingFaceTB/SmolLM2-135M", LlamaConfig),
        ("Qwen/Qwen3-0.6B", Qwen3Config),
    ):
        shape = SHAPES[name]
        config = config_class(
            hidden_size=shape.hidden,
            intermediate_size=shape.inner,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab,
            tie_word_embeddings=shape.tied,
        )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
        assert hp.get_full_finetune_param_count(name) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", sorted(LINEUP))
def test_every_hosted_model_has_a_rate_and_sizes_without_a_copy(name: str):
    assert 0 < hp.get_lr(name) < 1e-3
    sizes = [
        hp.get_lora_param_count(
            f"{name}:peft:262144", 1, **dict.fromkeys(_FLAGS, False) | {on: True}
        )
        for on in _FLAGS
    ]
    assert tuple(sizes) == LINEUP[name].lora
    assert hp.get_lora_param_count(name, 4) == 4 * sum(sizes)


# Hidden size, and a rank-1 adapter on (MLP, attention, unembedding) as the service reports it.
MEASURED = {
    "meta-llama/Llama-3.1-8B-Instruct": (4096, (1_769_472, 851_968, 132_352)),
    "meta-llama/Llama-3.1-70B": (8192, (8_847_360, 4_096_000, 136_448)),
    "meta-llama/Llama-3.2-1B": (2048, (491_520, 212_992, 130_304)),
    "meta-llama/Llama-3.2-3B": (3072, (946_176, 573_440, 131_328)),
    "Qwen/Qwen3-4B-Instruct-2507": (2560, (1_327_104, 737_280, 154_496)),
    "Qwen/Qwen3-8B": (4096, (1_769_472, 958_464, 156_032)),
    "Qwen/Qwen3-32B": (5120, (5_898_240, 2_490_368, 157_056)),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (2048, (14_450_688, 835_584, 153_984)),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": (4096, (56_598_528, 3_176_448, 156_032)),
}


@pytest.mark.parametrize("name", MEASURED)
def test_the_measured_adapter_sizes_follow_from_the_shape(name: str):
    assert (LINEUP[name].hidden, LINEUP[name].lora) == MEASURED[name]


def test_refusals(stories_model: str, tmp_path: Path):
    with pytest.raises(ConfigurationError, match="lora_rank: got 0"):
        hp.get_lora_param_count(stories_model, 0)
    with pytest.raises(ConfigurationError, match="at least one True"):
        hp.get_lora_param_count(stories_model, **dict.fromkeys(_FLAGS, False))
    with pytest.raises(ConfigurationError, match="has no vision tower"):
        hp.get_vision_lora_param_count(stories_model)
    with pytest.raises(ConfigurationError, match="lora_alpha: got 16"):
        hp.get_lora_lr_over_full_finetune_lr(stories_model, lora_alpha=16)
    assert hp.get_lora_lr_over_full_finetune_lr(stories_model) == 10.0
    latent = _with_config(stories_model, tmp_path / "latent", kv_lora_rank=16)
    with pytest.raises(ConfigurationError, match="kv_lora_rank"):
        hp.get_lora_param_count(latent)
    shapeless = _with_config(stories_model, tmp_path / "shapeless", hidden_size=None)
    with pytest.raises(ConfigurationError, match="'hidden_size' is missing"):
        hp.get_lr(shapeless)


def _with_config(model: str, folder: Path, **changes: object) -> str:
    shutil.copytree(model, folder)
    path = folder / "config.json"
    path.chmod(0o644)
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return str(folder)
