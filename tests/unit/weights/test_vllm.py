"""vLLM computes from exports what the engine computes (quick: 3 s).

The slow tests need vLLM, whose packages do not fit ours; see the fixture ``vllm_python``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import tinker
import torch
from environments import python_of_vllm
from exports import ALL, CONFIGS, SHAPE, make_adapter, make_base
from transformers import Gemma3TextConfig, LlamaConfig

from tinker_cookbook.backends import connect
from tinker_cookbook.exceptions import WeightsError
from tinker_cookbook.supervised.common import datum_from_tokens_weights
from tinker_cookbook.weights import __main__ as weights_command
from tinker_cookbook.weights import open_checkpoint
from tinker_cookbook.weights._vllm_proof import loading_in_vllm
from tinker_cookbook.weights.proof import PROMPTS, read_proof

# Attention of vLLM on CPUs needs heads of 32 or more.
WIDE = {**SHAPE, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "tie_word_embeddings": True}  # fmt: skip
TIED = {
    "tied_llama": lambda: LlamaConfig(**WIDE),
    "tied_gemma3": lambda: Gemma3TextConfig(**WIDE, query_pre_attn_scalar=32),
}


@pytest.fixture(scope="session")
def vllm_python() -> str:
    return python_of_vllm()


@pytest.fixture
def base(tmp_path, monkeypatch):
    """Makes a random model whose head and input embeddings are one matrix."""
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", str(tmp_path / "home"))

    def make(kind: str):
        monkeypatch.setitem(CONFIGS, kind, TIED[kind])
        return make_base(tmp_path / kind, kind)

    return make


def trained(base, train_unembed: bool) -> str:
    """The path of a checkpoint after five steps on the prompts of the proof."""
    with connect("local", device="cpu", dtype="float32") as connection:
        client = connection.service.create_lora_training_client(
            str(base), rank=32, seed=0, train_unembed=train_unembed
        )
        batch = []
        for text in PROMPTS:
            tokens = torch.tensor(client.get_tokenizer().encode(text)[:64])
            batch.append(datum_from_tokens_weights(tokens, torch.ones(len(tokens))))
        for _ in range(5):
            client.forward_backward(batch, "cross_entropy").result()
            client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        return client.save_weights_for_sampler("final").result().path


def export(command: str, path: object, out, *words: object):
    weights_command.main([command, str(path), f"out={out}", *map(str, words)])
    proof = read_proof(out)
    assert proof is not None
    return proof


@pytest.mark.slow
@pytest.mark.parametrize("train_unembed", [False, True])
def test_a_trained_adapter(vllm_python, base, tmp_path, train_unembed):
    """20 s each; with an adapter on the tied head as well."""
    path = trained(base("tied_llama"), train_unembed)
    proof = export("export", path, tmp_path / "out", f"vllm_python={vllm_python}")
    peft, vllm = proof.comparisons
    assert peft.reader.startswith("peft")
    assert vllm.reader.startswith("vLLM 0.")
    assert vllm.positions == peft.positions > 400
    assert vllm.largest <= vllm.bound == 1e-4
    assert ("head" in proof.facts) == train_unembed
    assert "--max-lora-rank 32" in proof.facts["vLLM"]


@pytest.mark.slow
def test_a_merged_model_whose_head_is_untied(vllm_python, base, tmp_path):
    """20 s."""
    path = trained(base("tied_llama"), True)
    words = "dtype=float32", f"vllm_python={vllm_python}"
    _, vllm = export("merge", path, tmp_path / "out", *words).comparisons
    assert vllm.largest <= vllm.bound == 1e-4


@pytest.mark.slow
def test_vllm_refuses_an_adapter_on_the_head_of_gemma(vllm_python, base, tmp_path):
    """20 s. The reason is vLLM's, and the advice ours."""
    adapter = make_adapter(tmp_path / "adapter", base("tied_gemma3"))
    with pytest.raises(WeightsError, match=r"expected target modules(.|\n)*weights merge`"):
        export("export", adapter, tmp_path / "out", f"vllm_python={vllm_python}")
    assert not (tmp_path / "out").exists()


def test_an_export_states_how_vllm_loads_it(base, tmp_path):
    gemma = base("tied_gemma3")
    adapter = make_adapter(tmp_path / "adapter", gemma)
    proof = export("export", adapter, tmp_path / "out")
    assert "refuses this adapter, because it changes the head" in proof.facts["vLLM"]
    assert proof.facts["vLLM"] in (tmp_path / "out" / "README.md").read_text()
    checkpoint = open_checkpoint(str(adapter))
    layers = {name: one for name, one in checkpoint.updates.items() if name != "lm_head"}
    words = loading_in_vllm(replace(checkpoint, updates=layers))
    assert words == f"vllm serve {gemma} --enable-lora --lora-modules NAME=FOLDER"
    large = make_adapter(tmp_path / "large", gemma, ALL[:-1], r=600)
    assert "supports ranks up to 512" in loading_in_vllm(open_checkpoint(str(large)))
