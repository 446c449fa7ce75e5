"""The adapter that both samplers load: random, so that it changes the model's output."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tinker_cookbook.engine.model.lora import Adapter, AdapterSpec, Target

SCALE = 0.02
"""Standard deviation of ``B``. The adapter then adds about 5% to the output of a layer."""


def write_adapter(model: Path, target: Path, rank: int, seed: int) -> None:
    """Writes an adapter on all linear layers of ``model`` into ``target``, in peft's files."""
    from safetensors.torch import save_file

    targets = _linear_layers(model)
    adapter = Adapter.create(AdapterSpec(rank), targets, seed, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed + 1)
    for _, b in adapter.tensors.values():
        b.normal_(0, SCALE, generator=generator)
    target.mkdir()
    save_file(adapter.parameters(), target / "adapter_model.safetensors")
    config = json.dumps(adapter.peft_config(str(model)), indent=2)
    (target / "adapter_config.json").write_text(config + "\n", encoding="utf-8")


def _linear_layers(folder: Path) -> list[Target]:
    """Returns names and sizes of the layers, from a model on torch's meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder, local_files_only=True)
        )
    head = model.get_output_embeddings()
    return [
        Target(name, _group(name, layer is head), layer.in_features, layer.out_features)
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear)
    ]


def _group(name: str, is_head: bool) -> str:
    if is_head:
        return "unembed"
    return "mlp" if ".mlp." in name else "attn"
