"""Tokens and weights from plain strings, for prompts written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.utils.lazy_imports import lazy_module

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")


def tokens_weights_from_strings_weights(
    strings_weights: Sequence[tuple[str, float]], tokenizer: Tokenizer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes strings one after the other and gives each token its string's weight.

    Returns int64 tokens [T] and float32 weights [T]. The first string is encoded with the special
    tokens that the tokenizer adds (BOS), the others without.
    """
    runs = [
        tokenizer.encode(text, add_special_tokens=i == 0)
        for i, (text, _) in enumerate(strings_weights)
    ]
    tokens = torch.tensor([token for run in runs for token in run], dtype=torch.int64)
    values = torch.tensor([weight for _, weight in strings_weights], dtype=torch.float32)
    return tokens, values.repeat_interleave(torch.tensor([len(run) for run in runs]))
