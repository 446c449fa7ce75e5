"""Merged models and PEFT adapters compute what plain PyTorch computes from W + s B A (40 s)."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from exports import adapted_model, config_of, is_tied, logprobs_of, make_adapter, make_base
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tinker_cookbook import weights
from tinker_cookbook.exceptions import (
    ConfigurationError,
    WeightsAdapterError,
    WeightsError,
    WeightsMergeError,
)
from tinker_cookbook.weights import _tensor_files
from tinker_cookbook.weights._output import new_folder
from tinker_cookbook.weights.proof import read_proof

TOKENS = torch.arange(3, 60)


def merge(base: Path, adapter: Path, out: Path, **more) -> None:
    weights.build_hf_model(
        base_model=str(base), adapter_path=str(adapter), output_path=str(out), **more
    )


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("head", ["lm_head", "model.unembed_tokens"])
def test_a_merged_model_computes_w_plus_s_b_a(tmp_path, kind, head):
    base = make_base(tmp_path / "base", kind)
    adapter = make_adapter(tmp_path / "adapter", base, head=head)
    merge(base, adapter, tmp_path / "out", dtype="float32")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    expected = logprobs_of(adapted_model(base, adapter, 32 / 4), TOKENS)
    assert (logprobs_of(found, TOKENS) - expected).abs().max() < 1e-5
    plain = logprobs_of(AutoModelForCausalLM.from_pretrained(base), TOKENS)
    assert (plain - expected).abs().max() > 0.1
    assert is_tied(base) == (kind != "llama")
    assert not is_tied(tmp_path / "out")
    proof = read_proof(tmp_path / "out")
    assert proof is not None
    (comparison,) = proof.comparisons
    assert comparison.largest <= comparison.bound == 1e-4
    assert ("head" in proof.facts) == (kind != "llama")


def test_a_tied_model_stays_tied_without_an_update_of_its_head(tmp_path):
    base = make_base(tmp_path / "base", "qwen3")
    adapter = make_adapter(tmp_path / "adapter", base, ("q_proj", "down_proj"))
    merge(base, adapter, tmp_path / "out")
    assert is_tied(tmp_path / "out")
    names = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in names["weight_map"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_sum_is_rounded_once(tmp_path, dtype):
    base = make_base(tmp_path / "base", "qwen3", dtype=torch.bfloat16)
    adapter = make_adapter(tmp_path / "adapter", base)
    merge(base, adapter, tmp_path / "out", dtype=dtype)
    expected = adapted_model(base, adapter, 32 / 4).state_dict()
    found = {k: v for path in (tmp_path / "out").glob("*.safetensors")
             for k, v in load_file(path).items()}  # fmt: skip
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        rounded = expected[name].to(getattr(torch, dtype))
        assert tensor.dtype == rounded.dtype
        # The last bit may differ where the products of B A were summed in another order.
        ulp = rounded.float().abs() * torch.finfo(rounded.dtype).eps
        assert ((tensor.float() - rounded.float()).abs() <= ulp).all(), name
        assert (tensor != rounded).float().mean() < 0.01, name
    assert config_of(tmp_path / "out")["dtype"] == dtype


def test_what_the_base_stores_in_float32_amid_bfloat16_stays_so(tmp_path):
    base = make_base(tmp_path / "base", "llama", shard="1GB", dtype=torch.bfloat16)
    stored = load_file(base / "model.safetensors")
    stored["model.norm.weight"] = stored["model.norm.weight"].float()
    save_file(stored, base / "model.safetensors", metadata={"format": "pt"})
    merge(base, make_adapter(tmp_path / "adapter", base), tmp_path / "out", dtype="float16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    kinds = {tensor.dtype for name, tensor in found.items() if name != "model.norm.weight"}
    assert (found["model.norm.weight"].dtype, kinds) == (torch.float32, {torch.float16})


@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        ({"lora_alpha": 8, "r": 2}, 4.0),
        ({"lora_alpha": 16, "r": 4, "use_rslora": True}, 8.0),
    ],
)
def test_alpha_and_rank_stabilization_scale_as_in_peft(tmp_path, config, scaling):
    base = make_base(tmp_path / "base", "llama")
    adapter = make_adapter(tmp_path / "adapter", base, **config)
    merge(base, adapter, tmp_path / "merged", dtype="float32")
    weights.build_lora_adapter(
        base_model=str(base), adapter_path=str(adapter), output_path=str(tmp_path / "lora")
    )
    expected = logprobs_of(adapted_model(base, adapter, scaling), TOKENS)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = PeftModel.from_pretrained(plain, str(tmp_path / "lora"))
    for model in (merged, lora):
        assert (logprobs_of(model, TOKENS) - expected).abs().max() < 1e-5


def test_the_full_strategy_gives_the_same_model(tmp_path):
    base = make_base(tmp_path / "base", "qwen3")
    adapter = make_adapter(tmp_path / "adapter", base)
    merge(base, adapter, tmp_path / "shard", dtype="float32")
    # A base model in PyTorch's own format, which has no blocks to read.
    state = AutoModelForCausalLM.from_pretrained(base).state_dict()
    for path in [*base.glob("*.safetensors"), base / "model.safetensors.index.json"]:
        path.unlink()
    torch.save(state, base / "pytorch_model.bin")
    with pytest.raises(WeightsMergeError, match="merge_strategy=full"):
        merge(base, adapter, tmp_path / "none", merge_strategy="shard")
    merge(base, adapter, tmp_path / "full", dtype="float32")
    one, other = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).state_dict()
        for name in ("shard", "full")
    )
    assert one.keys() == other.keys()
    assert max((one[name] - other[name]).abs().max() for name in one) < 1e-6


def test_an_adapter_on_a_tied_head_loads_in_peft(tmp_path):
    base = make_base(tmp_path / "base", "gemma3")
    adapter = make_adapter(tmp_path / "adapter", base, head="model.unembed_tokens")
    weights.build_lora_adapter(
        base_model=str(base), adapter_path=str(adapter), output_path=str(tmp_path / "out")
    )
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(plain, str(tmp_path / "out"))
    expected = logprobs_of(adapted_model(base, adapter, 32 / 4), TOKENS)
    assert (logprobs_of(model, TOKENS) - expected).abs().max() < 1e-5
    proof = read_proof(tmp_path / "out")
    assert proof is not None
    assert proof.comparisons[0].largest <= 1e-4


def test_an_adapter_of_some_layers_adapts_no_others(tmp_path):
    base = make_base(tmp_path / "base", "llama")
    adapter = make_adapter(tmp_path / "adapter", base, ("q_proj",))
    path = adapter / "adapter_model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if ".layers.1." in k}, path)
    weights.build_lora_adapter(
        base_model=str(base), adapter_path=str(adapter), output_path=str(tmp_path / "out")
    )
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.1.self_attn.q_proj"]


def test_adapters_of_another_model_are_refused(tmp_path):
    base, other = make_base(tmp_path / "base", "llama"), make_base(tmp_path / "other", "qwen3")
    # Qwen3 has head_dim 16 here: q_proj of another shape.
    adapter = make_adapter(tmp_path / "adapter", other)
    for more in ({}, {"merge_strategy": "full"}):
        with pytest.raises(WeightsMergeError, match=r"shape .* is not its base model"):
            merge(base, adapter, tmp_path / "out", **more)
    with pytest.raises(WeightsAdapterError, match="not an adapter of"):
        weights.build_lora_adapter(
            base_model=str(base), adapter_path=str(adapter), output_path=str(tmp_path / "out")
        )
    named = make_adapter(tmp_path / "named", base, base_model_name_or_path="meta/Llama-X")
    with pytest.raises(ConfigurationError, match="trained on meta/Llama-X"):
        weights.open_checkpoint(str(named), base_model="meta/Llama-Y")
    assert not (tmp_path / "out").exists()


def routed_adapter(folder: Path, base: Path) -> torch.Tensor:
    """An adapter that peft itself made and wrote; returns what peft computes with it."""
    torch.manual_seed(1)
    config = LoraConfig(
        r=4,
        lora_alpha=32,
        target_modules=["q_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(0.1)
    model.save_pretrained(folder)
    return logprobs_of(model, TOKENS)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("qwen3_moe", "auto"),
        ("gpt_oss", "auto"),
        pytest.param("qwen3_moe", "full", marks=pytest.mark.slow),
    ],
)
def test_routed_experts_are_merged_and_exported(tmp_path, kind, strategy):
    """3 s each: Qwen3-MoE stores its experts apart, gpt-oss stacked."""
    base = make_base(tmp_path / "base", kind)
    expected = routed_adapter(tmp_path / "adapter", base)
    merge(base, tmp_path / "adapter", tmp_path / "out", dtype="float32", merge_strategy=strategy)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert (logprobs_of(found, TOKENS) - expected).abs().max() < 1e-5
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert (logprobs_of(plain, TOKENS) - expected).abs().max() > 0.1
    weights.build_lora_adapter(
        base_model=str(base),
        adapter_path=str(tmp_path / "adapter"),
        output_path=str(tmp_path / "exported"),
    )
    again = PeftModel.from_pretrained(plain, str(tmp_path / "exported"))
    assert (logprobs_of(again, TOKENS) - expected).abs().max() < 1e-5


def test_stacked_experts_and_other_kinds_are_refused(tmp_path):
    base = make_base(tmp_path / "base", "llama")
    adapter = make_adapter(tmp_path / "adapter", base)
    path = adapter / "adapter_model.safetensors"
    expert = "base_model.model.model.layers.0.mlp.experts.w1.lora_A.weight"
    save_file({**load_file(path), expert: torch.zeros(2, 4, 32)}, path)
    with pytest.raises(WeightsMergeError, match="expected a matrix"):
        merge(base, adapter, tmp_path / "out")
    dora = make_adapter(tmp_path / "dora", base, use_dora=True)
    with pytest.raises(WeightsMergeError, match="use_dora=True"):
        merge(base, dora, tmp_path / "out")
    for wrong, found in {
        tmp_path: "has no adapter_config",
        tmp_path / "absent": "no such folder",
        path: "is a file",
        base: "has a whole model",
    }.items():
        with pytest.raises(FileNotFoundError, match=f"{found}.*expected the log_path of a run"):
            merge(base, wrong, tmp_path / "out")


def test_an_export_that_disagrees_is_not_kept(tmp_path, monkeypatch):
    from tinker_cookbook.weights import _export, _merge

    base = make_base(tmp_path / "base", "qwen3")
    adapter = make_adapter(tmp_path / "adapter", base)
    # A merge that forgets the updates.
    monkeypatch.setattr(
        _merge, "_merged_blocks", lambda one, _: (b for _, b in one.source.blocks())
    )
    with pytest.raises(WeightsMergeError, match="weights other than W"):
        merge(base, adapter, tmp_path / "out", dtype="float32")
    monkeypatch.setattr(_export, "_check_weights", lambda *_: "")
    with pytest.raises(WeightsMergeError, match="differ from those of the engine"):
        merge(base, adapter, tmp_path / "out", dtype="float32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_a_full_disk_leaves_the_old_export_as_it_was(tmp_path, monkeypatch):
    base = make_base(tmp_path / "base", "llama")
    adapter = make_adapter(tmp_path / "adapter", base)
    from tinker_cookbook.weights.__main__ import main

    words = [str(adapter), f"out={tmp_path / 'out'}", f"base_model={base}", "dtype=float32"]
    main(["merge", *words])
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(FileExistsError, match="overwrite=True"):
        main(["merge", *words])

    def full(path, tensors):
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("tinker_cookbook.weights._merge.write_file", full)
        with pytest.raises(WeightsError, match=r"the disk is full .* nothing there has changed"):
            main(["merge", *words, "overwrite=True"])
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]
    main(["merge", *words[:3], "dtype=float16", "overwrite=True"])
    assert config_of(tmp_path / "out")["dtype"] == "float16"


def test_what_a_killed_process_left_is_restored_or_deleted(tmp_path):
    out = tmp_path / "out"
    for left, word in ((".out.part", "half"), (".out.old", "previous")):
        (tmp_path / left).mkdir()
        (tmp_path / left / "file").write_text(word)
    with new_folder(out) as folder:
        # The export before the killed one is back while the new one is written.
        assert (out / "file").read_text() == "previous"
        (folder / "file").write_text("new")
    assert (out / "file").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


_PEAK = """
import resource, sys
from pathlib import Path
from tinker_cookbook.weights import open_checkpoint
from tinker_cookbook.weights._merge import is_tied, merge_files
checkpoint = open_checkpoint(sys.argv[1], base_model=sys.argv[2])
is_tied(checkpoint.base_folder)  # imports transformers
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = Path(sys.argv[3]); out.mkdir()
report = merge_files(checkpoint, out, "float32")
print(report.peak_bytes - before * 1024, report.bytes)
"""


def test_the_peak_is_a_few_blocks_and_not_the_model(tmp_path):
    """A model of 100 MB in float32, in several files (5 s alone, 16 s while other tests run)."""
    from transformers import LlamaConfig

    base = tmp_path / "base"
    config = LlamaConfig(vocab_size=8192, hidden_size=768, intermediate_size=2048,
                         num_hidden_layers=2, num_attention_heads=8)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(base, max_shard_size="12MB")
    assert len(list(base.glob("*.safetensors"))) >= 4
    (base / "tokenizer.json").write_text("{}")  # the model is only merged
    adapter = make_adapter(tmp_path / "adapter", base)
    del model
    words = [sys.executable, "-c", _PEAK, str(adapter), str(base), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    grown, written = map(int, done.stdout.split())
    assert written > 100e6
    assert grown < 5 * _tensor_files.BLOCK_BYTES, f"{grown / 2**20:.0f} MiB"
