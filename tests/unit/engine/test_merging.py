"""Where merging is called exact, PEFT's merged model computes the same; elsewhere it does not."""

from __future__ import annotations

import engine_reference as ref
import pytest
import torch

from tinker_cookbook.engine.model.lora import AdapterSpec
from tinker_cookbook.engine.model.resolve import merge_note


@pytest.mark.parametrize("kind", ["qwen3", "llama"])  # tied, and not
@pytest.mark.parametrize("train_unembed", [True, False])
def test_exact_merges_are_exact(tiny_base, tmp_path, kind, train_unembed):
    base = tiny_base(kind)
    spec = AdapterSpec(rank=4, train_unembed=train_unembed)
    model = ref.peft_model(base, ref.random_adapter(base, spec, size=0.1), tmp_path)
    tokens = torch.arange(3, 30)[None]
    with torch.no_grad():
        before = model(input_ids=tokens).logits.log_softmax(-1)
        merged = model.merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
        merged = type(merged).from_pretrained(tmp_path / "merged")
        difference = (merged(input_ids=tokens).logits.log_softmax(-1) - before).abs().max()
    exact = merge_note(str(base.folder), train_unembed) is None
    assert exact == (kind == "llama" or not train_unembed)
    assert (difference < 1e-4) == exact, difference
