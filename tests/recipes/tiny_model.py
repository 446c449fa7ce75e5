"""A model made on the spot, for RL without trial data: random weights, one token a byte."""

from __future__ import annotations

from pathlib import Path


def make_tiny_model(folder: Path, hidden: int = 32) -> str:
    """Writes a Llama of two layers and a byte tokenizer into ``folder``, and returns its path.

    Its text is noise, each of 259 tokens about as probable as any other.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def make_chat_model(folder: Path) -> str:
    """The same with the tokens of ChatML and room for long episodes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_tiny_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    marks = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.save_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder)
    network.resize_token_embeddings(len(tokenizer))
    network.config.max_position_embeddings = 8192
    network.save_pretrained(folder)
    return str(folder)
