from __future__ import annotations

import io

import pytest
import tinker
from rich.console import Console
from transformers import AutoTokenizer

from tinker_cookbook.display import (
    TrainingProgress,
    colorize_example,
    example_text,
    print_example,
)
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.utils.terminal import format_seconds


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


def test_alternating_weights_lose_nothing(qwen):
    sentence = "Grüße aus 東京 👩‍👩‍👧, naïve café №5\n\n\tcode: `x = {1: 'é'}`"
    tokens = qwen.encode(sentence, add_special_tokens=False)
    for period in (1, 2, 3):
        weights = [float((i // period) % 2) for i in range(len(tokens))]
        assert example_text(make_datum(tokens, weights), qwen).plain == sentence


def test_negative_weights_are_red_and_other_keys_can_be_shown(qwen):
    tokens = qwen.encode("one two three", add_special_tokens=False)
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "advantages": [-0.5, 0.5]},
    )
    styles = [style for style, _ in spans(example_text(datum, qwen, key="advantages"))]
    assert styles == ["yellow", "red", "green"]
    with pytest.raises(DataValidationError, match=r"no loss_fn_inputs\['weights'\]; it has adv"):
        example_text(datum, qwen)


def test_lengths_that_differ_are_named(qwen):
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0]},
    )
    with pytest.raises(DataValidationError, match=r"'weights'.* shape \(2,\).* 3 input tokens"):
        example_text(datum, qwen)


def test_images_are_counted(qwen):
    image = tinker.types.ImageAssetPointerChunk(format="png", location="x", expected_tokens=5)
    word = qwen.encode(" cat", add_special_tokens=False)
    assert len(word) == 1
    text = tinker.types.EncodedTextChunk(tokens=word)
    chunks = [text, image, text]
    datum = tinker.Datum(
        model_input=tinker.ModelInput(chunks=chunks),
        loss_fn_inputs={"target_tokens": [0] * 5 + word * 2, "weights": [0.0] * 6 + [1.0]},
    )
    assert spans(example_text(datum, qwen)) == [
        ("yellow", " cat"),
        ("yellow", "[image: 5 tokens]"),
        ("yellow", " cat"),
        ("green", " cat"),
    ]


def test_colours_only_on_a_terminal(qwen, monkeypatch):
    datum = split(qwen, "a [b]", " c[/b]")
    assert colorize_example(datum, qwen) == "a [b] c[/b]"  # square brackets are no markup
    from tinker_cookbook import display

    colourful = Console(force_terminal=True, color_system="standard", highlight=False)
    monkeypatch.setattr(display, "get_console", lambda: colourful)
    assert colorize_example(datum, qwen) == "\x1b[33ma [b]\x1b[0m\x1b[32m c[/b]\x1b[0m"


def test_panel_has_legend_counts_and_says_what_it_cut(qwen):
    datum = split(qwen, "Q", " word" * 3000)
    out = io.StringIO()
    print_example(datum, qwen, max_chars=400, console=Console(file=out, width=80))
    shown = out.getvalue()
    assert "context: 1 tokens" in shown
    assert "trained: 3,000 tokens" in shown
    assert "14,601 characters" in shown


def test_a_long_example_is_quick(qwen):
    import time

    tokens = qwen.encode(" word" * 60_000, add_special_tokens=False)
    datum = make_datum(tokens, [0.0] * 100 + [1.0] * (len(tokens) - 100))
    began = time.perf_counter()
    example_text(datum, qwen)
    assert time.perf_counter() - began < 5


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
            progress.update(step, loss=1 / step, tokens=500)


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


def test_a_resumed_run_counts_its_rate_from_where_it_resumed():
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=200)
    with TrainingProgress(100, initial_step=50, console=console, clock=clock) as progress:
        clock.now += 4
        progress.update(51, tokens=100)
    assert out.getvalue() == "training: step 51/100  25 tok/s  ETA 3:16\n"


def test_a_slow_start_is_forgotten():
    out, clock = io.StringIO(), Clock()
    with TrainingProgress(
        1000, console=Console(file=out, width=200), clock=clock, min_interval_s=0
    ) as progress:
        for step in range(1, 41):
            clock.now += 60 if step == 1 else 1
            progress.update(step, tokens=10)
    assert out.getvalue().splitlines()[-1].endswith("10 tok/s  ETA 16:00")


def test_on_a_terminal_there_is_a_live_bar():
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    run_progress(console, seconds=1.0, steps=3)
    assert "step 3/3" in out.getvalue()
    assert "━" in out.getvalue()
    assert "loss 0.3333" in out.getvalue()


def test_time_left_is_readable():
    assert [format_seconds(s) for s in (0, 59.6, 3599, 3600, 90061)] == [
        "0:00", "1:00", "59:59", "1:00:00", "25:01:01",
    ]  # fmt: skip
