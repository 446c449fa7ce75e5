"""Compares GGUF files with the engine: through llama.cpp if installed, and by reading them back.

Reading back needs only the ``gguf`` package. It checks names, shapes, quantization and the order
of rows, as this package defines them. llama.cpp itself, through ``xllamacpp``, checks the rest:
positions, metadata and the tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tinker_cookbook.exceptions import WeightsError
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.gguf_reader import open_gguf
from tinker_cookbook.weights import _llama_cpp
from tinker_cookbook.weights._gguf_architectures import ROPE_FACTORS, Architecture
from tinker_cookbook.weights._gguf_files import read_model_file
from tinker_cookbook.weights._readers import run_reader
from tinker_cookbook.weights._source import Checkpoint, LowRankUpdate
from tinker_cookbook.weights.proof import (
    EXACT,
    Comparison,
    PromptScores,
    Proof,
    compare,
    compare_model,
    reference_logprobs,
)

# Quant -> (bound in nats, measure) in llama.cpp. With quantized types it also rounds
# activations. A wrong row order causes a difference of several nats.
BOUNDS = {
    "f32": (1e-3, "largest"), "f16": (0.02, "mean"), "bf16": (0.1, "mean"),
    "q8_0": (0.2, "mean"), "q4_0": (1.5, "mean"),
}  # fmt: skip

# Texts that tokenizers split differently. Accents are composed: llama.cpp does not normalize them.
TEXTS = (
    "Hello world! It's 12345.67, we'll see; they'RE  done...   ",
    "def f(x):\n\tif x == 1:\r\n        return x**2  # square\n\n\n    y = [1, 22, 333, 4444]",
    "你好，世界！今天天气怎么样？日本語のテキスト、한국어 텍스트。",
    "naïve café — “quotes”, Привет мир, γειά σου, 🙂👍🏽 x²+y²=½",
    " leading space\n\n \n  trailing tab\t\nhttps://example.com/a?b=c&d=%20e_f-g",
)


def has_llama_cpp(proof: Proof) -> bool:
    """Returns whether ``xllamacpp`` is installed; the proof states it if not."""
    found = find_spec("xllamacpp") is not None
    if not found:
        proof.facts["llama.cpp"] = (
            "not loaded in llama.cpp: pip install xllamacpp to compare there too"
        )
    return found


def compare_in_llama_cpp(
    checkpoint: Checkpoint,
    model: Path,
    lora: Path | None,
    export: str,
    quant: str,
    reference: Sequence[PromptScores],
) -> Comparison:
    """Compares llama.cpp's log-probabilities and tokens with the engine's, in another process.

    Raises:
        WeightsError: llama.cpp does not load the files, or tokenizes a text differently.
    """
    tokenizer = get_tokenizer(str(checkpoint.base_folder))
    texts = [*TEXTS, *_chat_text(tokenizer)]
    reader = f"llama.cpp (xllamacpp {version('xllamacpp')})"
    request = {
        "model": str(model),
        "lora": "" if lora is None else str(lora),
        "prompts": [scores.tokens for scores in reference],
        "texts": texts,
    }
    answer = run_reader(_llama_cpp.__file__, request, program=reader, error_lines=" E ")
    for text, tokens in zip(texts, answer["tokens"], strict=True):
        expected = list(tokenizer.encode(text))
        if tokens != expected:
            same = takewhile(lambda pair: pair[0] == pair[1], zip(tokens, expected, strict=False))
            at = len(list(same))
            raise WeightsError(
                f"{export}: llama.cpp splits {text!r} into other tokens than the tokenizer of "
                f"{checkpoint.base_model}: token {at} is {tokens[at : at + 3]}, expected "
                f"{expected[at : at + 3]}; nothing was written"
            )
    # llama.cpp returns no value for a token that ends within a character.
    rows = [np.array(row, dtype=np.float64) for row in answer["logprobs"]]
    kept = [
        replace(scores, logprobs=scores.logprobs[~np.isnan(row)])
        for scores, row in zip(reference, rows, strict=True)
    ]
    found = [row[~np.isnan(row)] for row in rows]
    bound, measure = BOUNDS[quant]
    if quant == "f32" and Architecture.of(checkpoint.base_folder).name == "gemma3":
        bound = 0.01  # llama.cpp computes Gemma's activation with a float16 table
    return compare(export, reader, kept, found, bound=bound, measure=measure)


def compare_model_read_back(
    checkpoint: Checkpoint, path: Path, export: str, quant: str, reference: Sequence[PromptScores]
) -> Comparison:
    """Loads a model's file into transformers and compares log-probabilities.

    Raises:
        WeightsError: The file lacks a tensor of the model.
    """
    from transformers import AutoModelForCausalLM

    architecture = Architecture.of(checkpoint.base_folder)
    stored = dict(read_model_file(path, architecture))
    stored.pop(ROPE_FACTORS, None)
    config = architecture.config
    config.tie_word_embeddings = "output.weight" not in stored
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            found = stored.pop(architecture.tensor_name(name), None)
            if found is None or tuple(found.shape) != tuple(parameter.shape):
                shape = None if found is None else found.shape
                raise WeightsError(
                    f"{path.name}: {name} is stored with shape {shape}, expected "
                    f"{tuple(parameter.shape)}"
                )
            parameter.copy_(architecture.restored(name, torch.from_numpy(found.copy())))
    if stored:
        raise WeightsError(f"{path.name}: the model has no tensors {sorted(stored)[:3]}")
    prompts = [scores.tokens for scores in reference]
    reader = f"read back by gguf {version('gguf')}"
    rounded = None if quant == "f32" else BOUNDS[quant]
    return compare_model(export, reader, reference, model, prompts, rounded)


def compare_adapter_read_back(
    checkpoint: Checkpoint,
    path: Path,
    export: str,
    quant: str,
    reference: Sequence[PromptScores],
    device: str,
) -> Comparison:
    """Loads an adapter's file, applies it in the engine and compares log-probabilities."""
    import gguf

    architecture = Architecture.of(checkpoint.base_folder)
    alpha = float(open_gguf(path).fields[gguf.Keys.Adapter.LORA_ALPHA].contents())
    stored = dict(read_model_file(path, architecture))
    updates = {}
    for module in checkpoint.updates:
        name = architecture.tensor_name(f"{module}.weight")
        if f"{name}.lora_a" not in stored:
            continue
        a = torch.from_numpy(stored[f"{name}.lora_a"].copy())
        b = torch.from_numpy(stored[f"{name}.lora_b"].copy())
        b = architecture.restored(f"{module}.lora_B", b)
        updates[module] = LowRankUpdate(a, b, alpha / len(a))
    prompts = [scores.tokens for scores in reference]
    found = reference_logprobs(replace(checkpoint, updates=updates), prompts, device)
    bound, measure = (EXACT, "largest") if quant == "f32" else BOUNDS[quant]
    return compare(
        export,
        f"read back by gguf {version('gguf')}",
        reference,
        [scores.logprobs for scores in found],
        bound=bound,
        measure=measure,
    )


def _chat_text(tokenizer: Any) -> list[str]:
    """Returns a conversation rendered with the chat template, to test special tokens."""
    if not tokenizer.chat_template:
        return []
    messages = [
        {"role": "user", "content": "Hi, what is 7 * 8?"},
        {"role": "assistant", "content": "56.\n\nAnything else?"},
        {"role": "user", "content": " Thanks "},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    # The tokenizer would add a second BOS to the template's.
    return [str(text).removeprefix(tokenizer.bos_token or "\0") or str(text)]
