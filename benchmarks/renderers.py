"""Speed of turning conversations into tokens and weights, compared with chat-template spans.

    python -m benchmarks.renderers model_name=… renderer_name=…

The other side is what many trainers do: the template renders and encodes the whole conversation,
then once more up to each answer and up to its end, and the lengths are the spans. Both sides take
turns in one process; the table gives tokens a second of processor time and the ratio, and the last
line is one JSON object.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.model_info import resolve_renderer_name
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.renderers.base import Example
from tinker_cookbook.tokenizer_utils import Tokenizer, get_tokenizer
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

_BLOCK = 250  # conversations before the other side takes its turn
_WORDS = """
the of and to in is it that was for on are with they be at one have this from by hot word but what
some we can out other were all there when up use your how said an each she which do their time if
will way about many then them write would like so these her long make thing
"""


@chz.chz
class Config:
    """Settings of the comparison."""

    model_name: str = chz.field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        doc="Hub name or local folder of the tokenizer, with its chat template",
    )
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")
    conversations: int = chz.field(default=10_000, doc="Number of conversations to render")
    turns: int = chz.field(default=3, doc="Question-answer pairs per conversation")
    words: int = chz.field(default=55, doc="Words of a message, on average")
    seed: int = chz.field(default=0, doc="Seed of the conversations")

    @chz.validate
    def _check(self) -> None:
        for name in ("conversations", "turns", "words"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigurationError(f"{name}: got {value}, expected at least 1")


@dataclass
class _Side:
    """What one side has done so far."""

    seconds: float = 0.0
    tokens: int = 0
    trained: int = 0
    seen: list[tuple[int, int]] = field(default_factory=list)

    def add(self, seconds: float, counts: Sequence[tuple[int, int]]) -> None:
        self.seconds += seconds
        self.tokens += sum(tokens for tokens, _ in counts)
        self.trained += sum(trained for _, trained in counts)
        self.seen.extend(counts)


def make_conversations(config: Config) -> Iterator[list[dict[str, Any]]]:
    """Yields dialogues of random words, the same for the same settings."""
    generator, words = random.Random(config.seed), _WORDS.split()
    for _ in range(config.conversations):
        messages: list[dict[str, Any]] = []
        for _, role in itertools.product(range(config.turns), ("user", "assistant")):
            length = generator.randint(max(1, config.words // 2), config.words * 3 // 2)
            text = " ".join(generator.choices(words, k=length)).capitalize() + "."
            messages.append({"role": role, "content": text})
        yield messages


def by_renderer(renderer: Renderer, messages: list[dict[str, Any]]) -> list[Example]:
    """Returns tokens and weights of a conversation, by the renderer."""
    return renderer.build_merged_examples(messages, "all_assistant_messages")


def by_template(
    tokenizer: Tokenizer, messages: list[dict[str, Any]]
) -> list[tuple[list[int], list[int]]]:
    """Returns tokens and mask of a conversation, by lengths of what the template gives."""

    def ids(part: list[dict[str, Any]], prompt: bool) -> list[int]:
        return tokenizer.apply_chat_template(  # pyright: ignore[reportReturnType]
            part, tokenize=True, return_dict=False, add_generation_prompt=prompt
        )

    whole = ids(messages, False)
    mask = [0] * len(whole)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            start, end = len(ids(messages[:i], True)), len(ids(messages[: i + 1], False))
            mask[start:end] = [1] * (end - start)
    return [(whole, mask)]


def _counts(examples: Sequence[tuple[Any, Any]]) -> tuple[int, int]:
    """Returns how many tokens and how many trained tokens the examples of a conversation have."""
    return sum(len(w) for _, w in examples), sum(int(sum(w)) for _, w in examples)


def measure(config: Config) -> dict[str, Any]:
    """Runs both sides in turns; returns what each did, and the ratio of their speeds."""
    tokenizer = get_tokenizer(config.model_name)
    name, _ = resolve_renderer_name(config.model_name, config.renderer_name)
    renderer = get_renderer(name, tokenizer)
    work: dict[str, Callable[[list[dict[str, Any]]], Sequence[tuple[Any, Any]]]] = {
        "renderer": lambda messages: by_renderer(renderer, messages),
        "template": lambda messages: by_template(tokenizer, messages),
    }
    sides = {side: _Side() for side in work}
    conversations = make_conversations(config)
    while block := list(itertools.islice(conversations, _BLOCK)):
        for side, run in work.items():
            start = time.process_time()
            made = [run(messages) for messages in block]
            sides[side].add(time.process_time() - start, [_counts(examples) for examples in made])
    ours, theirs = sides["renderer"], sides["template"]
    rate = {name: side.tokens / side.seconds for name, side in sides.items()}
    return {
        "renderer_name": renderer.spec,
        "conversations": config.conversations,
        "tokens_per_conversation": ours.tokens / config.conversations,
        # Many templates write a line break after the last message, which an example does not have.
        "same_tokens": sum(
            b[0] - a[0] in (0, 1) for a, b in zip(ours.seen, theirs.seen, strict=True)
        ),
        "seconds": {name: side.seconds for name, side in sides.items()},
        "tokens_per_second": rate,
        "trained_tokens": {name: side.trained for name, side in sides.items()},
        "ratio": theirs.seconds / ours.seconds,
    }


def main(config: Config) -> None:
    """Prints both sides and their ratio."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    result = measure(config)
    print(
        f"{result['conversations']} conversations of {result['tokens_per_conversation']:.0f} "
        f"tokens, {result['same_tokens']} of them of equal length on both sides"
    )
    for side, rate in result["tokens_per_second"].items():
        label = result["renderer_name"] if side == "renderer" else "spans by the chat template"
        seconds, trained = result["seconds"][side], result["trained_tokens"][side]
        print(f"{label:28} {rate:12,.0f} tokens/s  {seconds:8.1f} s  {trained:10,} trained")
    print(f"ratio {result['ratio']:.2f}")
    print(json.dumps(result))


if __name__ == "__main__":
    run_entrypoint(main)
