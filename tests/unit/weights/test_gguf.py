"""GGUF files hold what plain PyTorch computes from W + s B A, read by transformers' own reader, and
the tokenizer in llama.cpp's form (30 s). llama.cpp itself: ``test_gguf_llama_cpp.py``."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from exports import ALL, adapted_model, logprobs_of, make_adapter
from gguf_models import make_model, make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tinker_cookbook import weights
from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataFormatError,
    WeightsError,
    WeightsMergeError,
)
from tinker_cookbook.utils.gguf_reader import open_gguf
from tinker_cookbook.weights import _gguf_files
from tinker_cookbook.weights._chat_files import Chat
from tinker_cookbook.weights._gguf_tokenizer import vocabulary_of
from tinker_cookbook.weights._ollama import modelfile
from tinker_cookbook.weights.gguf import GGUFSettings, export_gguf, write_gguf, write_lora_gguf

TOKENS = torch.arange(3, 60)
RANK_SCALING = 32 / 4  # of make_adapter


def opened(tmp_path: Path, name: str, ends: tuple[str, ...] = ALL):
    """A random model and a random adapter of it: base folder, adapter folder, checkpoint."""
    base = make_model(tmp_path / "base", name)
    adapter = make_adapter(tmp_path / "adapter", base, ends)
    return base, adapter, weights.open_checkpoint(str(adapter), base_model=str(base))


def by_transformers(path: Path):
    """The model of a file, as transformers reads it, which has tables of its own."""
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )


def fields(path: Path) -> dict:
    """The metadata, as gguf's reader and as ours gives it."""
    ours, theirs = (
        {key: field.contents() for key, field in reader.fields.items()}
        for reader in (open_gguf(path), gguf.GGUFReader(path))
    )
    assert ours == theirs
    return ours


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokens", ["a", "", "bc"])
    writer.add_array("scores", [1.0, 2.0])
    writer.add_tensor("weight", np.zeros((2, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = path.read_bytes()
    tensor = content.index(b"weight")
    for data in [content[:size] for size in range(tensor)] + [b"G" + content]:
        path.write_bytes(data)
        with pytest.raises(DataFormatError, match=r"model\.gguf: not a GGUF file, or a damaged"):
            open_gguf(path)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "mistral", "qwen2", "qwen3", "gemma3"])
def test_a_file_read_by_transformers_computes_w_plus_s_b_a(tmp_path, name):
    base, adapter, checkpoint = opened(tmp_path, name)
    write_gguf(checkpoint, tmp_path / "model.gguf", quant="f32", verify=False)
    found, expected = (
        by_transformers(tmp_path / "model.gguf"),
        adapted_model(base, adapter, RANK_SCALING),
    )
    read = found.state_dict()
    for key, tensor in expected.state_dict().items():
        assert (read[key] - tensor).abs().max() < 1e-5, key
    if name == "gemma3":
        return  # the reader does not read how attention is scaled
    wanted = logprobs_of(expected, TOKENS)
    assert (logprobs_of(found, TOKENS) - wanted).abs().max() < 1e-4
    plain = logprobs_of(AutoModelForCausalLM.from_pretrained(base), TOKENS)
    assert (plain - wanted).abs().max() > 0.1


def test_a_wrong_order_of_rows_is_an_error_and_nothing_is_written(tmp_path, monkeypatch):
    _, _, checkpoint = opened(tmp_path, "llama")
    (tmp_path / "model.gguf").write_text("old")
    # The reader has the right order.
    architecture = _gguf_files.Architecture
    monkeypatch.setattr(architecture, "stored", lambda self, name, tensor: tensor)
    with pytest.raises(WeightsError, match="log-probabilities of read back"):
        write_gguf(checkpoint, tmp_path / "model.gguf", quant="q8_0")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base", "model.gguf"]
    assert (tmp_path / "model.gguf").read_text() == "old"


@pytest.mark.parametrize(
    ("quant", "matrix", "head", "largest"),
    [
        ("f16", "F16", "F16", 2e-3),
        ("bf16", "BF16", "BF16", 2e-2),
        ("q8_0", "Q8_0", "Q8_0", 1e-2),
        ("q4_0", "Q4_0", "Q8_0", 0.2),
    ],
)
def test_matrices_have_the_quantized_type_and_norms_are_exact(
    tmp_path, quant, matrix, head, largest
):
    base, adapter, checkpoint = opened(tmp_path, "llama_tied")
    proof = write_gguf(checkpoint, tmp_path / "m.gguf", quant=quant)
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert tensors["blk.0.ffn_gate.weight"].tensor_type.name == matrix
    assert tensors["output.weight"].tensor_type.name == head
    assert tensors["blk.1.attn_norm.weight"].tensor_type.name == "F32"
    model = adapted_model(base, adapter, RANK_SCALING)
    down = model.model.layers[1].mlp.down_proj.weight.detach().numpy()
    stored = tensors["blk.1.ffn_down.weight"]
    read = gguf.quants.dequantize(stored.data, stored.tensor_type).reshape(down.shape)
    assert np.abs(read - down).max() < largest * np.abs(down).max()
    norm = model.model.layers[1].input_layernorm.weight.detach().numpy()
    assert np.array_equal(tensors["blk.1.attn_norm.weight"].data, norm)
    assert (
        fields(tmp_path / "m.gguf")["general.file_type"]
        == (gguf.LlamaFileType[f"MOSTLY_{quant.upper()}"])
    )
    assert proof.comparisons[0].measure == "mean"
    saved = json.loads((tmp_path / "m.proof.json").read_text())
    assert saved["comparisons"][0]["mean"] == proof.comparisons[0].mean


def test_rows_that_are_no_whole_blocks_are_float16(tmp_path, shared_dir):
    base = shared_dir / "models" / "stories260k"
    adapter = make_adapter(tmp_path / "adapter", base)
    checkpoint = weights.open_checkpoint(str(adapter), base_model=str(base))
    proof = write_gguf(checkpoint, tmp_path / "m.gguf", quant="q8_0")
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert types["blk.0.ffn_down.weight"] == "F16"  # rows of 172
    assert types["blk.0.ffn_up.weight"] == "Q8_0"
    assert "5 F16" in proof.facts["tensors"]
    found = fields(tmp_path / "m.gguf")
    assert found["tokenizer.ggml.model"] == "llama"
    assert found["tokenizer.ggml.add_space_prefix"] is True
    assert found["tokenizer.ggml.tokens"][13] == "<0x0A>"
    assert found["tokenizer.ggml.token_type"][13] == 6
    # A merge that comes earlier has a higher score.
    merges = json.loads((base / "tokenizer.json").read_text())["model"]["merges"]
    scores = dict(zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.scores"], strict=True))
    ranked = ["".join(m.split(" ") if isinstance(m, str) else m) for m in merges]
    assert [scores[text] for text in ranked] == sorted((scores[t] for t in ranked), reverse=True)


def test_a_tied_model_has_a_head_only_where_the_adapter_changes_it(tmp_path):
    _, _, checkpoint = opened(tmp_path, "qwen3", ("q_proj", "down_proj"))
    write_gguf(checkpoint, tmp_path / "m.gguf", quant="f16")
    names = {t.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert "output.weight" not in names
    assert "blk.0.attn_q_norm.weight" in names


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_an_adapter_file_has_the_updates_in_the_order_of_the_base_models_file(tmp_path, name):
    ends = ALL[:-1] if name == "llama_tied" else ALL
    checkpoint = opened(tmp_path, name, ends)[2]
    write_lora_gguf(checkpoint, tmp_path / "a.gguf")
    _gguf_files.write_model_file(checkpoint, tmp_path / "base.gguf", "f32", merge=False)
    found = fields(tmp_path / "a.gguf")
    assert found["general.type"] == "adapter"
    assert found["adapter.type"] == "lora"
    assert found["general.architecture"] == "llama"
    # Added by hand to the base model's file, the updates give the merged file.
    write_gguf(checkpoint, tmp_path / "merged.gguf", quant="f32", verify=False)
    stored = {
        path: {t.name: t.data for t in gguf.GGUFReader(tmp_path / path).tensors}
        for path in ("a.gguf", "base.gguf", "merged.gguf")
    }
    changed = {key.removesuffix(".lora_a") for key in stored["a.gguf"] if key.endswith("_a")}
    assert ("output.weight" in changed) == (name == "llama")
    for key, merged in stored["merged.gguf"].items():
        expected = stored["base.gguf"][key]
        if key in changed:
            a, b = (stored["a.gguf"][f"{key}.lora_{side}"] for side in "ab")
            expected = expected + found["adapter.lora.alpha"] / len(a) * b @ a
        assert np.abs(merged - expected).max() < 1e-5, key


def test_an_adapter_of_a_tied_head_is_refused(tmp_path):
    _, _, checkpoint = opened(tmp_path, "qwen3")
    with pytest.raises(ConfigurationError, match=r"without lora.*train_unembed=false"):
        write_lora_gguf(checkpoint, tmp_path / "a.gguf")
    assert not list(tmp_path.glob("*.gguf"))


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "qwen2", "llama-bpe", "smaug-bpe"])
def test_the_pre_tokenizer_is_named_by_what_the_tokenizer_does(tmp_path, kind):
    make_tokenizer(tmp_path, kind)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    found = vocabulary_of(tokenizer, 400, Chat(None, stop_ids=[2]))
    assert (found.model, found.pre) == ("gpt2", kind)
    last = len(tokenizer) - 1
    assert found.tokens[last] == "<tool>"
    assert found.tokens[last + 1 :] == [f"[PAD{i}]" for i in range(last + 1, 400)]
    assert found.types[:5] == [3, 3, 3, 3, 1]
    assert found.types[last - 1 : last + 2] == [1, 4, 5]
    assert found.ids == {"bos": 1, "eos": 2, "eot": 2}
    assert (found.add_bos, found.add_eos) == (False, False)


def test_an_unknown_tokenizer_or_architecture_is_refused_before_a_file_is_written(tmp_path):
    base, _, checkpoint = opened(tmp_path, "llama")
    path = base / "tokenizer.json"
    spec = json.loads(path.read_text())
    spec["pre_tokenizer"]["pretokenizers"][0] = {"type": "Whitespace"}
    path.write_text(json.dumps(spec))
    with pytest.raises(WeightsMergeError, match=r"Whitespace.*known are those for gpt-2, smollm"):
        write_gguf(checkpoint, tmp_path / "m.gguf")
    config = json.loads((base / "config.json").read_text())
    config |= {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsMergeError, match="GPT2LMHeadModel cannot be exported as GGUF; supp"):
        write_gguf(checkpoint, tmp_path / "m.gguf")
    assert not list(tmp_path.glob("*.gguf*"))


def test_the_command_writes_file_proof_and_modelfile(tmp_path, capsys):
    base, adapter, _ = opened(tmp_path, "llama")
    settings = GGUFSettings(
        model_path=str(adapter),
        base_model=str(base),
        out=str(tmp_path / "m.gguf"),
        quant="f16",
        device="cpu",
        renderer_name="template",
    )
    export_gguf(settings)
    printed = capsys.readouterr().out
    assert "| merged GGUF, f16 | read back by gguf" in printed
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_file())
    assert names == ["m.Modelfile", "m.gguf", "m.proof.json"]
    text = (tmp_path / "m.Modelfile").read_text()
    assert text.startswith("FROM ./m.gguf\n")
    assert 'PARAMETER stop "<|im_end|>"' in text


def test_a_modelfile_has_the_template_and_the_stops_of_the_renderer(tokenizer_folder):
    text = modelfile(tokenizer_folder("smollm2"), "qwen3_instruct", "m.gguf", 4096)
    assert text == (
        'FROM ./m.gguf\nTEMPLATE """<|im_start|>{{ range .Messages }}'
        '{{ if eq .Role "system" }}system\n{{ .Content }}<|im_end|>\n<|im_start|>'
        '{{ else if eq .Role "user" }}user\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n'
        "{{ .Content }}<|im_end|>\n<|im_start|>{{ end }}{{ end }}"
        '<|im_start|>assistant\n"""\nPARAMETER stop "<|im_end|>"\nPARAMETER num_ctx 4096\n'
    )
