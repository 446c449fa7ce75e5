"""GLM-4.6 beyond its cases: the stop token that begins the next message, options, calls."""

from __future__ import annotations

import copy
import json

import pytest
from families.glm4 import ADDED, TEMPLATE, parsed
from rendering_cases import calling, thought

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import (
    ParseTermination,
    get_renderer,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer

QUESTION = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def glm(tokenizer_folder):
    tokenizer = copy.deepcopy(get_tokenizer(tokenizer_folder("qwen3")))
    tokenizer.add_special_tokens({"additional_special_tokens": [*ADDED]})
    return lambda spec="glm4_6": get_renderer(spec, tokenizer)


def spans(renderer, messages, what):
    """Returns the text of each run of trained tokens."""
    example, weights = renderer.build_supervised_example(messages, what)
    runs, run = [], []
    for token, weight in zip(example.to_ints(), weights.tolist(), strict=True):
        if weight:
            run.append(token)
        elif run:
            runs.append(run)
            run = []
    return [renderer.codec.decode(tokens) for tokens in [*runs, run] if tokens]


def test_an_answer_is_trained_up_to_what_begins_the_next_message(glm):
    result = {"role": "tool", "content": "12"}
    messages = [QUESTION, calling("f", {}), result, thought("b", "B"), QUESTION, thought("c", "C")]
    assert spans(
        glm("glm4_6?strip_thinking_from_history=false"), messages, "all_assistant_messages"
    ) == [
        "\n<think></think>\n<tool_call>f\n</tool_call><|observation|>",
        "\n<think>b</think>\nB<|user|>",
        "\n<think>c</think>\nC<|user|>",
    ]
    assert spans(glm(), messages, "last_assistant_message") == ["\n<think>c</think>\nC<|user|>"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"a": {"b": [1, None, "x"]}, "c": 1.5, "d": None, "e": True, "f": ""},
        {"text": "two\nlines <b>é</b> </arg_value> and on", "list": []},
    ],
)
def test_arguments_of_every_kind_equal_the_template_and_come_back(glm, shared_dir, arguments):
    renderer, message = glm(), calling("f", arguments)
    example, weights = renderer.build_supervised_example([QUESTION, message])
    expected = renderer.tokenizer.apply_chat_template(
        [QUESTION, parsed(message)],
        chat_template=(shared_dir / "tokenizers" / TEMPLATE).read_text(encoding="utf-8"),
        return_dict=False,
    )
    assert example.to_ints()[:-1] == expected
    sampled = [t for t, w in zip(example.to_ints(), weights.tolist(), strict=True) if w]
    back, how = renderer.parse_response(sampled)
    assert how is ParseTermination.STOP_SEQUENCE
    assert json.loads(back["tool_calls"][0].function.arguments) == arguments


def test_without_thinking_history_loses_it_and_an_answer_with_it_is_refused(glm):
    # "/nothink" is a control token, which a user's text only holds with this option.
    renderer = glm("glm4_6_disable_thinking?split_special_tokens=false")
    messages = [QUESTION, thought("a", "A"), {"role": "user", "content": "x /nothink"}]
    text = renderer.codec.decode(renderer.build_generation_prompt(messages).to_ints())
    assert text == (
        "[gMASK]<sop><|user|>\nHi/nothink<|assistant|>\n<think></think>\nA"
        "<|user|>\nx /nothink<|assistant|>\n<think></think>"
    )
    with pytest.raises(RendererError, match=r"messages\[1\].content: got thinking"):
        renderer.build_supervised_example(messages[:2])
