"""A tiny Llama that knows some sequences of digits, and writes random digits for a new prompt."""

from __future__ import annotations

import random
from typing import Any

from tinker_cookbook import cli_utils
from tinker_cookbook.recipes.tiny_models.llama import (
    Row,
    TinyModelSettings,
    make_model_once,
    new_folder,
    train,
    word_tokenizer,
)

LENGTH = 8
"""Digits of a sequence."""
START = "?"
"""The prompt of the unknown sequence."""
KNOWN = "abcdefgh"
"""The prompts of known sequences."""


def digits_model(*, quick: bool = False) -> str:
    """Returns the folder of the model (0.1 million parameters), which is made if it is absent;
    a ``quick`` one knows nothing."""
    folder = cli_utils.default_log_path(f"research/digits_model{'_quick' * quick}")
    settings = TinyModelSettings(output=folder, steps=2 if quick else 300)
    make_model_once(folder, lambda: _make(settings))
    return folder


def _make(settings: TinyModelSettings) -> None:
    with new_folder(settings.output) as folder:
        # Without a token that ends a sequence: every answer has all digits.
        texts = [START + KNOWN + "0123456789"]
        tokenizer = word_tokenizer(texts, ".", folder, ("<unk>",), pad_token="<unk>")
        # With the usual 0.02 a model of this size learns to use positions only after 1,000 steps.
        sizes = {"max_position_embeddings": 2 * LENGTH, "initializer_range": 0.1}
        train(settings, _rows(settings.seed, tokenizer), tokenizer, folder, **sizes)


def _rows(seed: int, tokenizer: Any) -> list[Row]:
    """Returns known and random sequences. A model of random digits alone never uses the position,
    and would have to learn that first."""
    rng = random.Random(seed)
    texts = [name + random_digits(rng) for name in KNOWN]
    texts = texts * 250 + [START + random_digits(rng) for _ in range(2000)]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [(tokens, [0.0] + [1.0] * LENGTH) for tokens in encoded]


def random_digits(rng: random.Random) -> str:
    """Returns a random sequence."""
    return "".join(rng.choices("0123456789", k=LENGTH))
