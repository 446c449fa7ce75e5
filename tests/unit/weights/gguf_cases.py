"""Exports random models, and models with published tokenizers, and prints how llama.cpp agrees.

``test_gguf_llama_cpp.py`` runs it with a Python that has xllamacpp:
python gguf_cases.py FOLDER '{"models": ["NAME"], "tokenizers": ["FOLDER"], …}'

The argument has the functions below that are called, and prints a line for each.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

from exports import ALL, make_adapter
from gguf_models import SHAPE, make_model, make_taught
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
)

from tinker_cookbook import weights
from tinker_cookbook.exceptions import WeightsError
from tinker_cookbook.weights import _gguf_architectures as architectures
from tinker_cookbook.weights import _gguf_proof, _llama_cpp
from tinker_cookbook.weights.gguf import write_gguf, write_lora_gguf

_OTHER_POSITIONS = ("llama3", "llama_linear")


def models(folder: Path, names: list[str]) -> list[dict]:
    """Merged in float32, and LoRA on a base model in float32, of which positions are no part."""
    found = []
    for name in names:
        base = make_model(folder / name, name)
        merged = _checkpoint(folder / name, base)
        # llama.cpp has no head of a tied model that an adapter could change.
        tied = AutoConfig.from_pretrained(base).tie_word_embeddings
        lora = _checkpoint(folder / name, base, ALL[:-1]) if tied else merged
        proofs = [write_gguf(merged, folder / f"{name}.gguf", quant="f32")]
        if name not in _OTHER_POSITIONS:
            proofs.append(write_lora_gguf(lora, folder / f"{name}-lora.gguf"))
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


def chat(folder: Path, names: list[str]) -> list[dict]:
    """Answers of llama.cpp's server to a chat, and to the renderer's prompt with a stop string."""
    import xllamacpp  # pyright: ignore[reportMissingImports]

    found = []
    for name, end in (("chatml", "<|im_end|>"), ("role_colon", "\n\nUser:")):
        base = folder / name / "base"
        prompt, answer = make_taught(base, name, f" house{end} and the dog")
        adapter = make_adapter(base.with_name("adapter"), base, ("q_proj",), lora_alpha=1e-4)
        opened = weights.open_checkpoint(str(adapter), base_model=str(base)).with_renderer(name)
        write_gguf(opened, folder / f"{name}.gguf", quant="f32", verify=False)
        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.warmup = str(folder / f"{name}.gguf"), 256, False
        params.port, params.verbosity, params.use_jinja = 0, 1, True
        for threads in (params.cpuparams, params.cpuparams_batch):
            threads.n_threads, threads.poll = 1, 0
        if name == "role_colon":
            params.antiprompt = [end]  # as by --reverse-prompt
        server = xllamacpp.Server(params)
        talk = {"messages": [{"role": "user", "content": "the cat"}]}
        limits = {"temperature": 0, "n_predict": len(answer), "prompt": prompt}
        found.append(
            {
                "template": _llama_cpp._post(server, "/apply-template", talk)["prompt"],
                "prompt": AutoTokenizer.from_pretrained(base).decode(prompt),
                "answer": _llama_cpp._post(server, "/completion", limits)["content"],
            }
        )
    return found


def _checkpoint(folder: Path, base: Path, *more):
    adapter = make_adapter(folder / "adapter", base, *more)
    return weights.open_checkpoint(str(adapter), base_model=str(base))


if __name__ == "__main__":
    for name, names in json.loads(sys.argv[2]).items():
        here = Path(sys.argv[1], name)
        here.mkdir()
        print("\n" + json.dumps([name, globals()[name](here, names)]), flush=True)
    os._exit(0)  # the server's threads may never end
