"""Exports of vision-language models compute on an image what peft computes (20 s).

Adapters are made by peft, images by transformers' processors.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_vlm import IMAGE_TOKEN, KINDS, tiny_vlm
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from tinker_cookbook import weights
from tinker_cookbook.exceptions import WeightsMergeError
from tinker_cookbook.weights import _export, _merge
from tinker_cookbook.weights.proof import read_proof

ADAPTER = "adapter_model.safetensors"
MARKS = {"qwen": "mm_token_type_ids", "gemm": "token_type_ids"}
SEEDS = {"qwen3_5": 9}  # its float32 differs from float64 by 7e-4, in peft as well
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Make:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tiny_vlm(tmp_path_factory.mktemp(kind), kind, SEEDS.get(kind, 0))
        return made[kind]

    return make


def plain(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logprobs(model: Any, folder: Path, with_image: bool) -> torch.Tensor:
    """[T, V] of text, with an image in it, as transformers alone makes it."""
    text = torch.arange(40, 60)
    if not with_image:
        return model(input_ids=text[None]).logits[0].log_softmax(-1)
    colors = np.random.default_rng(0).integers(0, 255, (40, 64, 3), dtype=np.uint8)
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    pixels = processor(images=[Image.fromarray(colors)], return_tensors="pt")
    inner: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    features = inner.get_image_features(**pixels, return_dict=True).pooler_output
    count = sum(part[..., 0].numel() for part in features)
    ids = torch.cat([text[:8], torch.full((count,), IMAGE_TOKEN), text[8:]])[None]
    if mark := MARKS.get(inner.config.model_type[:4]):
        pixels[mark] = (ids == IMAGE_TOKEN).int()
    return model(input_ids=ids, **pixels).logits[0].log_softmax(-1)


def peft_adapter(base: Path, folder: Path, train_vision: bool) -> Any:
    """An adapter that peft makes and writes; returns the model with it."""
    torch.manual_seed(1)
    model = plain(base)
    decoder = {id(module) for module in model.get_decoder().modules()}
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and (train_vision or name == "lm_head" or id(module) in decoder)
    ]
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(
        r=4,
        lora_alpha=32,
        target_modules=names,
        target_parameters=experts if "moe" in model.config.model_type else None,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, config).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(0.1)
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return model


def renamed(folder: Path, old: str, new: str) -> None:
    tensors = load_file(folder / ADAPTER)
    save_file({name.replace(old, new): one for name, one in tensors.items()}, folder / ADAPTER)


def export(base: Path, adapter: Path, out: Path, merged: bool = False, **more: Any) -> None:
    write = weights.build_hf_model if merged else weights.build_lora_adapter
    write(base_model=str(base), adapter_path=str(adapter), output_path=str(out), **more)


@pytest.mark.parametrize(
    ("kind", "train_vision"),
    [*itertools.product([*KINDS, "qwen3_5"], [False, True]), ("mistral3", True)],
)
def test_exports_compute_what_peft_computes(base, tmp_path, kind, train_vision):
    folder, adapter = base(kind), tmp_path / "adapter"
    model = peft_adapter(folder, adapter, train_vision)
    expected = [logprobs(model, folder, images) for images in (False, True)]
    assert (logprobs(plain(folder), folder, True) - expected[1]).abs().max() > 0.1
    if not train_vision:  # as the Tinker service names them
        for part in ("language_model", "text_model"):
            renamed(adapter, f".model.{part}.layers.", ".model.layers.")
    lora, merged = tmp_path / "lora", tmp_path / "merged"
    export(folder, adapter, lora)
    export(folder, adapter, merged, merged=True, dtype="float32")
    loaded = PeftModel.from_pretrained(plain(folder), str(lora)).eval()
    rounded = 2e-3 if kind in SEEDS else 5e-5  # W + s B A
    for found, bound in ((loaded, 1e-6), (plain(merged), rounded)):
        for images in (False, True):
            difference = logprobs(found, merged, images) - expected[images]
            assert difference.abs().max() < bound
    assert {file.name for file in folder.iterdir()} <= {file.name for file in merged.iterdir()}
    text = "a cat"
    assert AutoTokenizer.from_pretrained(lora).encode(text) == AutoTokenizer.from_pretrained(
        folder
    ).encode(text)
    for out in (lora, merged):
        proof = read_proof(out)
        assert proof is not None
        assert proof.facts["image"] == "compared on a prompt with an image too"
    vllm = json.loads((lora / "proof.json").read_text())["facts"]["vLLM"]
    assert ("ignores the updates of the vision tower" in vllm) == (
        train_vision and "moe" not in kind
    )


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_a_merge_without_the_vision_tower_is_noticed(base, tmp_path, monkeypatch, kind):
    folder, adapter = base(kind), tmp_path / "adapter"
    peft_adapter(folder, adapter, True)
    whole = _merge._merged_blocks
    monkeypatch.setattr(
        _merge,
        "_merged_blocks",
        lambda one, report: (
            (block for _, block in one.source.blocks())
            if "visual" in one.new.name
            else whole(one, report)
        ),
    )
    with pytest.raises(WeightsMergeError, match="weights other than W"):
        export(folder, adapter, tmp_path / "out", True, dtype="float32")
    monkeypatch.setattr(_export, "_check_weights", lambda *_: "")
    with pytest.raises(WeightsMergeError, match="differ from those of the engine"):
        export(folder, adapter, tmp_path / "out", True, dtype="float32")
