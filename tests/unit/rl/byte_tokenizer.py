"""A tokenizer made on the spot: one token a byte. It needs no trial data and reads any text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tinker_cookbook import tokenizer_utils

NAME = "one token a byte"


@contextmanager
def registered() -> Iterator[None]:
    """``get_tokenizer(NAME)`` gives it within the block."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"</s>": 0}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
    tokenizer_utils.register_tokenizer(NAME, lambda: tokenizer)
    try:
        yield
    finally:
        tokenizer_utils.unregister_tokenizer(NAME)
