"""Random models of each architecture that is exported as GGUF, with tokenizers of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from exports import SHAPE as SMALL
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from tinker_cookbook.renderers import get_renderer

# 64 and not 32: two blocks of the quantized types in a row. More rows than tokens.
SHAPE: dict[str, Any] = {**SMALL, "hidden_size": 64, "vocab_size": 400}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA: dict[str, Any] = {
    **SHAPE,
    "num_hidden_layers": 7,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
}
# Name -> configuration, and the kind of its tokenizer.
MODELS = {
    "llama": (lambda: LlamaConfig(**SHAPE), "smollm"),
    "llama_tied": (lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True), "llama-bpe"),
    "llama_biases": (lambda: LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True), "gpt-2"),
    "llama3": (lambda: LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE), "llama-bpe"),
    "llama_linear": (
        lambda: LlamaConfig(
            **SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
        ),
        "smaug-bpe",
    ),
    "mistral": (lambda: MistralConfig(**SHAPE, head_dim=32, sliding_window=128), "gpt-2"),
    "qwen2": (lambda: Qwen2Config(**SHAPE), "qwen2"),
    "qwen2_yarn": (lambda: Qwen2Config(**SHAPE, rope_parameters=YARN), "qwen2"),
    "qwen3": (lambda: Qwen3Config(**SHAPE, head_dim=128, tie_word_embeddings=True), "qwen2"),
    "gemma3": (lambda: Gemma3TextConfig(**GEMMA, sliding_window=16), "smollm"),
}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}", "smaug-bpe": r"\p{N}{1,3}"}
_CORPUS = [
    "the cat and the dog are in the house; they're 123456 years old, and it's 1999 now...\n\n",
    "def the(x):\n    return x + 1  # the end\n\t\tif x == 10:\r\n",
    "你好，世界！你好 мир мир café naïve 🙂🙂",
]


def make_tokenizer(folder: Path, kind: str, tokens: int = 390) -> None:
    """Saves a tokenizer of byte-level merges that splits texts in the way of ``kind``."""
    first = {
        "gpt-2": [],
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
    }.get(kind)
    if first is None:
        pattern = Regex(_WORDS.replace("DIGITS", _SPLITS[kind]))
        first = [pre_tokenizers.Split(pattern, "isolated")]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        last = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=tokens - 1,
        special_tokens=["<unk>", "<s>", "<|im_end|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    chatml = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|im_end|>",
        chat_template=chatml,
    ).save_pretrained(folder)


def make_model(folder: Path, name: str) -> Path:
    """Saves a random model of ``MODELS`` with its tokenizer."""
    config, tokenizer = MODELS[name]
    make_tokenizer(folder, tokenizer)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config())
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and norms are not zero or one: their place matters.
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder


def make_taught(folder: Path, renderer_name: str, answer: str) -> tuple[list[int], list[int]]:
    """Saves a base model, without a chat template and with another end of text, that answers the
    prompt "the cat" of the renderer with ``answer``; returns the tokens of both."""
    make_model(folder, "llama")
    (folder / "chat_template.jinja").unlink()
    for name, old, new in (
        ("tokenizer_config.json", '"eos_token": "<|im_end|>"', '"eos_token": "<s>"'),
        ("config.json", '"eos_token_id": 2', '"eos_token_id": 1'),
    ):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    renderer = get_renderer(renderer_name, tokenizer)
    prompt = renderer.build_generation_prompt([{"role": "user", "content": "the cat"}]).to_ints()
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        states = model.model(torch.tensor([[*prompt, *tokens]])).last_hidden_state[0]
        states = states[len(prompt) - 1 : -1]
        wanted = torch.zeros(len(tokens), len(model.lm_head.weight), dtype=torch.float64)
        wanted[torch.arange(len(tokens)), torch.tensor(tokens)] = 40.0
        model.lm_head.weight.copy_((torch.linalg.pinv(states) @ wanted).T)
    # The taught head goes into one file, in place of the others.
    for path in folder.glob("model*"):
        path.unlink()
    model.float().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return prompt, tokens
