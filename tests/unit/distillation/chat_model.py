"""A chat model made on the spot: random weights, one token a byte, and the marks of ChatML."""

from __future__ import annotations

from pathlib import Path

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def make_chat_model(folder: Path, seed: int = 0, special: list[str] | None = None) -> str:
    """Writes the model and its tokenizer into ``folder``, and returns its path."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = SPECIAL if special is None else special
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *letters])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special[3:],
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)
