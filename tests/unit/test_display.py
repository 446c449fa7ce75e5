from __future__ import annotations

import io

import pytest
import tinker
from rich.console import Console
from transformers import AutoTokenizer

from tinker_cookbook.display import (
    TrainingProgress,
    example_text,
)


def make_datum(tokens: list[int], weights: list[float]) -> tinker.Datum:
    """Shifted as for training: weight i belongs to token i + 1."""
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )


def spans(text) -> list[tuple[str, str]]:
    return [(str(span.style), text.plain[span.start : span.end]) for span in text.spans]


@pytest.fixture(scope="module")
def qwen(tokenizer_folder):
    return AutoTokenizer.from_pretrained(tokenizer_folder("qwen3"))


@pytest.fixture(scope="module")
def stories(stories_model):
    return AutoTokenizer.from_pretrained(stories_model)


def split(tokenizer, context: str, trained: str) -> tinker.Datum:
    a = tokenizer.encode(context, add_special_tokens=False)
    b = tokenizer.encode(trained, add_special_tokens=False)
    return make_datum(a + b, [0.0] * len(a) + [1.0] * len(b))


def test_context_is_yellow_and_trained_tokens_are_green(qwen):
    text = example_text(split(qwen, "Question: 1+1?\n", "Answer: 2<|im_end|>"), qwen)
    assert spans(text) == [
        ("yellow", "Question: 1+1?\n"),
        ("green", "Answer: 2"),
        ("green bold underline", "<|im_end|>"),
    ]


def test_the_weight_of_a_target_colours_the_token_after_it(qwen):
    tokens = qwen.encode("one two three", add_special_tokens=False)
    assert len(tokens) == 3
    text = example_text(make_datum(tokens, [0, 1, 0]), qwen)
    assert spans(text) == [("yellow", "one"), ("green", " two"), ("yellow", " three")]


@pytest.mark.parametrize("character", ["🦜", "é", "𝔘", "क्ष"])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_split_across_colours_stays_whole(qwen, character, cut):
    tokens = qwen.encode(f"a {character}{character} z", add_special_tokens=False)
    weights = [float(i >= cut) for i in range(len(tokens))]
    assert example_text(make_datum(tokens, weights), qwen).plain == f"a {character}{character} z"


def test_every_split_of_a_sentencepiece_text_keeps_its_spaces(stories):
    tokens = stories.encode("Once upon a time there was a dog", add_special_tokens=False)
    whole = stories.decode(tokens)
    assert " upon" in whole
    for cut in range(1, len(tokens)):
        weights = [float(i >= cut) for i in range(len(tokens))]
        assert example_text(make_datum(tokens, weights), stories).plain == whole


def test_a_long_example_is_quick(qwen):
    import time

    tokens = qwen.encode(" word" * 60_000, add_special_tokens=False)
    datum = make_datum(tokens, [0.0] * 100 + [1.0] * (len(tokens) - 100))
    began = time.process_time()
    example_text(datum, qwen)
    assert time.process_time() - began < 5


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run_progress(console: Console, seconds: float, steps: int, **options) -> None:
    clock = Clock()
    with TrainingProgress(steps, console=console, clock=clock, **options) as progress:
        for step in range(1, steps + 1):
            clock.now += seconds
            progress.show(step, loss=1 / step, tokens=500)


def test_without_a_terminal_lines_are_plain_and_rate_limited():
    out = io.StringIO()
    run_progress(Console(file=out, width=40), seconds=2.0, steps=12, min_interval_s=10)
    lines = out.getvalue().splitlines()
    assert lines == [
        "training: step 1/12  loss 1.0000  250 tok/s  ETA 0:22",
        "training: step 6/12  loss 0.1667  250 tok/s  ETA 0:12",
        "training: step 11/12  loss 0.0909  250 tok/s  ETA 0:02",
        "training: step 12/12  loss 0.0833  250 tok/s  ETA 0:00",
    ]
