"""Tiny Llamas that copy, sort and reverse strings of digits, and the new operation to learn."""

from __future__ import annotations

import random
from collections.abc import Iterator

import tinker

from tinker_cookbook import cli_utils
from tinker_cookbook.recipes.tiny_models.llama import (
    Row,
    TinyModelSettings,
    make_model_once,
    new_folder,
    train,
    word_tokenizer,
)
from tinker_cookbook.supervised.common import datum_from_tokens_weights
from tinker_cookbook.tokenizer_utils import get_tokenizer

LENGTH = 5
"""Digits of a string; a prompt is an operation, a string and ``=``."""
KNOWN = {"copy": list, "sort": sorted, "reverse": lambda digits: digits[::-1]}
NEW = "rotate"
"""The operation that only the study trains: the first digit goes to the end."""
_TEST_SEED, _OTHER_SEED = 1 << 20, 1 << 30


def strings_model(hidden_size: int = 64, *, quick: bool = False) -> str:
    """Returns the folder of a model of this width, which is made if it is absent: 0.03, 0.1 and
    0.4 million parameters at 32, 64 and 128. A ``quick`` one knows nothing."""
    name = f"research/strings_model_{hidden_size}{'_quick' * quick}"
    settings = TinyModelSettings(
        output=cli_utils.default_log_path(name),
        steps=2 if quick else 400,
        hidden_size=hidden_size,
    )
    make_model_once(settings.output, lambda: _make(settings))
    return settings.output


def _make(settings: TinyModelSettings) -> None:
    with new_folder(settings.output) as folder:
        special = ("<unk>", "<s>", "</s>")
        roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
        texts = ["0123456789=", *KNOWN, NEW]
        tokenizer = word_tokenizer(texts, "[a-z]+|.", folder, special, **roles)
        rng, rows = random.Random(settings.seed), list[Row]()
        for _ in range(6000):
            name = rng.choice(list(KNOWN))
            digits = _digits(rng)
            text = name + digits + "=" + "".join(KNOWN[name](list(digits)))
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            rows.append((tokens, [0.0] * (LENGTH + 2) + [1.0] * LENGTH))
        # With the usual 0.02 a model of this size learns to copy only after 1,000 steps.
        sizes = {"max_position_embeddings": 4 * LENGTH, "initializer_range": 0.1}
        train(settings, rows, tokenizer, folder, **sizes)


def _digits(rng: random.Random) -> str:
    return "".join(rng.choices("0123456789", k=LENGTH))


class Rotations:
    """Examples of the new operation for a model; prompts and answers are tokens."""

    def __init__(self, model: str) -> None:
        self._tokenizer = get_tokenizer(model)

    def problems(self, seed: int, count: int) -> Iterator[tuple[list[int], list[int]]]:
        """Yields prompts and right answers, a function of the seed."""
        rng = random.Random(seed)
        for _ in range(count):
            digits = _digits(rng)
            text = f"{NEW}{digits}={digits[1:]}{digits[0]}"
            tokens = self._tokenizer.encode(text, add_special_tokens=False)
            yield tokens[:-LENGTH], tokens[-LENGTH:]

    def batch(self, seed: int, count: int, *, others_answers: bool = False) -> list[tinker.Datum]:
        """Returns supervised examples; as a control, each with the answer to another string."""
        answers = self.problems(seed + _OTHER_SEED * others_answers, count)
        pairs = zip(self.problems(seed, count), answers, strict=True)
        return [
            datum_from_tokens_weights(prompt + answer, [0.0] * len(prompt) + [1.0] * LENGTH)
            for (prompt, _), (_, answer) in pairs
        ]

    def test_problems(self, count: int) -> Iterator[tuple[list[int], list[int]]]:
        """Yields problems that no seed of a study trains on, except by chance."""
        return self.problems(_TEST_SEED, count)

    def test(self, count: int = 100) -> list[tinker.Datum]:
        """Returns them as supervised examples."""
        return self.batch(_TEST_SEED, count)
