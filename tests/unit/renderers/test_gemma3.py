"""Gemma 3 beyond its cases: the place of the system message, order, refusals."""

from __future__ import annotations

import pytest
from rendering_cases import ended

from tinker_cookbook.renderers import TextPart

QUESTION = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture
def gemma(make_renderer):
    return make_renderer("gemma3", "gemma3")


def weighed(renderer, messages, what):
    example, weights = renderer.build_supervised_example(messages, what)
    pairs = zip(example.to_ints(), weights.tolist(), strict=True)
    return renderer.codec.decode([token for token, weight in pairs if weight])


def test_system_text_is_the_output_of_the_system_message(gemma):
    messages = [{**SYSTEM, "trainable": True}, QUESTION, ANSWER]
    assert weighed(gemma, messages, "customized") == "Be brief.\n\n"
    messages = [SYSTEM, {**QUESTION, "trainable": True}, ANSWER]
    assert weighed(gemma, messages, "customized") == "Hi<end_of_turn>"


def test_each_part_is_trimmed_as_the_template_does(gemma):
    parts = [TextPart(type="text", text=" a "), TextPart(type="text", text=" b ")]
    messages = [SYSTEM, {"role": "user", "content": parts}, ANSWER]
    expected = gemma.tokenizer.apply_chat_template(messages, return_dict=False)
    found = gemma.build_supervised_example(messages)[0].to_ints()
    assert found == ended(gemma.tokenizer, expected)
