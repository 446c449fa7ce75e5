"""Exports random models, and models with published tokenizers, and prints how llama.cpp agrees.

``test_gguf_llama_cpp.py`` runs it with a Python that has xllamacpp:
python gguf_cases.py FOLDER models|tokenizers|permutation|stories NAME…
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

from exports import make_adapter
from gguf_models import MODELS, SHAPE, make_model
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from tinker_cookbook import weights
from tinker_cookbook.exceptions import WeightsError
from tinker_cookbook.weights import _gguf_architectures as architectures
from tinker_cookbook.weights import _gguf_proof
from tinker_cookbook.weights.gguf import write_gguf, write_lora_gguf


def models(folder: Path, names: list[str]) -> list[dict]:
    """Merged in float32 and LoRA on a base model in float32, for each architecture."""
    found = []
    for name in names or list(MODELS):
        base = make_model(folder / name, name)
        checkpoint = _checkpoint(folder / name, base)
        proofs = [
            write_gguf(checkpoint, folder / f"{name}.gguf", quant="f32"),
            write_lora_gguf(
                checkpoint,
                folder / f"{name}-lora.gguf",
                base_out=folder / f"{name}-base.gguf",
                base_quant="f32",
            ),
        ]
        found += [{"model": name, **asdict(c)} for p in proofs for c in p.comparisons]
    return found


def tokenizers(folder: Path, names: list[str]) -> list[dict]:
    """A tiny model with the tokenizer in the folder ``names[0]``: its texts give equal tokens."""
    found = []
    for name in names:
        vocabulary = json.loads((Path(name) / "tokenizer.json").read_text())["model"]["vocab"]
        gemma = "<start_of_turn>" in vocabulary or "▁the" in vocabulary
        shape = {**SHAPE, "vocab_size": len(vocabulary) + 512, "num_hidden_layers": 1}
        config = (
            Gemma3TextConfig(**shape, head_dim=16, query_pre_attn_scalar=16)
            if gemma
            else LlamaConfig(**shape)
        )
        base = folder / Path(name).name
        shutil.copytree(name, base)
        AutoModelForCausalLM.from_config(config).save_pretrained(base)
        checkpoint = _checkpoint(base, base, ("q_proj",))
        proof = write_gguf(checkpoint, folder / f"{base.name}.gguf", quant="f32")
        found += [{"model": base.name, **asdict(c)} for c in proof.comparisons]
    return found


def permutation(folder: Path, names: list[str]) -> list[dict]:
    """With rows of q and k in the order of transformers, only llama.cpp notices."""
    base = make_model(folder / "llama", "llama")
    checkpoint = _checkpoint(folder, base)
    same = architectures.Architecture
    same.stored = same.restored = lambda self, name, tensor: tensor  # pyright: ignore
    try:
        write_gguf(checkpoint, folder / "wrong.gguf", quant="f32")
    except WeightsError as error:
        return [{"error": str(error), "kept": (folder / "wrong.gguf").exists()}]
    return []


def stories(folder: Path, names: list[str]) -> list[dict]:
    """The small real model in every type, whose vocabulary is of SentencePiece."""
    base = Path(names[0])
    checkpoint = _checkpoint(folder, base)
    found = []
    for quant in _gguf_proof.BOUNDS:
        proof = write_gguf(checkpoint, folder / f"{quant}.gguf", quant=quant)
        found += [{"model": quant, **asdict(c)} for c in proof.comparisons]
    return found


def _checkpoint(folder: Path, base: Path, *more):
    adapter = make_adapter(folder / "adapter", base, *more)
    return weights.open_checkpoint(str(adapter), base_model=str(base))


if __name__ == "__main__":
    rows = globals()[sys.argv[2]](Path(sys.argv[1]), sys.argv[3:])
    print("\n" + json.dumps(rows))
