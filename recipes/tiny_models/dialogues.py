"""Trains a tiny model on conversations of one task, with a tokenizer of only their words."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tinker_cookbook import cli_utils
from tinker_cookbook.recipes.tiny_models.llama import (
    TinyModelSettings,
    make_model_once,
    new_folder,
    train,
    word_tokenizer,
)
from tinker_cookbook.renderers import Message, TrainOnWhat, get_renderer, get_text_content
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.terminal import print_line

RENDERER = "qwen3_instruct"
_SPECIAL = ("<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")


def dialogue(*contents: str) -> list[Message]:
    """Returns a conversation in which the user begins."""
    return [
        Message(role=("user", "assistant")[turn % 2], content=content)
        for turn, content in enumerate(contents)
    ]


def dialogues_model(
    name: str,
    make: Callable[[], Sequence[list[Message]]],
    pattern: str,
    quick: bool = False,
    train_on_what: TrainOnWhat = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    **settings: Any,
) -> str:
    """Returns the folder of a model, which is trained on ``make()`` if it is absent.

    With ``quick`` it is another one, of a few steps, to try a command. ``settings`` are those of
    ``TinyModelSettings``.
    """
    folder = cli_utils.default_log_path(f"tiny_models/{name}{'-quick' * quick}")
    if quick:
        settings["steps"] = 20
    model = TinyModelSettings(output=folder, **settings)
    make_model_once(
        folder, lambda: train_on_dialogues(model, make(), pattern, train_on_what=train_on_what)
    )
    return folder


def train_on_dialogues(
    settings: TinyModelSettings,
    dialogues: Sequence[list[Message]],
    pattern: str,
    words: Iterable[str] = (),
    train_on_what: TrainOnWhat = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
) -> None:
    """Trains a model and writes it to ``settings.output``.

    Args:
        dialogues: Conversations, in which ``train_on_what`` is trained.
        pattern: Regular expression whose matches are the tokens.
        words: Texts with further words, such as those of conversations that come later.
    """
    contents = {get_text_content(message) for one in dialogues for message in one}
    with new_folder(settings.output) as folder:
        # A line break and the names of the roles are part of the chat format.
        pattern = rf"user|assistant|system|\n|{pattern}"
        texts = [*contents, *words, "user\nassistant\nsystem"]
        # Text that no token matches would silently become <unk>.
        assert not any(re.sub(pattern, "", text) for text in texts)
        tokenizer = word_tokenizer(
            texts, pattern, folder, _SPECIAL, eos_token="<|im_end|>", pad_token="<|endoftext|>",
            additional_special_tokens=["<|im_start|>"],
        )  # fmt: skip
        renderer = get_renderer(RENDERER, get_tokenizer(str(folder)))
        # The few steps of a quick model do not see all conversations.
        if len(dialogues) > (seen := settings.steps * settings.batch_size):
            dialogues = random.Random(0).sample(dialogues, seen)
        rows = [
            (tokens.to_ints(), weights.tolist())
            for one in dialogues
            for tokens, weights in renderer.build_supervised_examples(one, train_on_what)
        ]
        # With the 0.02 that suits large models, such a small one learns to copy much later.
        sizes = {"max_position_embeddings": 256, "initializer_range": 0.1}
        loss = train(settings, rows, tokenizer, folder, **sizes)
    print_line(f"tiny model: {len(dialogues)} conversations, loss of a token {loss:.3f} nats")
