"""Qwen3.8 against digests of its chat template's text, on the vocabulary of Qwen3."""

from __future__ import annotations

import json

import pytest
from qwen3_8_vectors import CONVERSATIONS, SETTINGS, VECTORS, conversation, digest

from tinker_cookbook.renderers import ThinkingPart

QUESTION = {"role": "user", "content": "Hi"}
THOUGHT = [ThinkingPart(type="thinking", thinking="t"), {"type": "text", "text": "a"}]


def text_of(renderer, messages):
    prompt = renderer.build_generation_prompt(messages).to_ints()
    return renderer.codec.decode(prompt)


@pytest.mark.parametrize("spec", SETTINGS)
def test_text_equals_the_template(make_renderer, spec):
    renderer = make_renderer(spec, "qwen3")
    expected = json.loads(VECTORS.read_text(encoding="utf-8"))[spec]
    assert len(expected) == CONVERSATIONS
    for i, wanted in enumerate(expected):
        messages = conversation(i, "disable" not in spec)
        assert digest(text_of(renderer, messages)) == wanted, messages


@pytest.mark.parametrize("spec", SETTINGS)
def test_what_follows_the_prompt_is_trained_and_read_back(make_renderer, spec):
    renderer = make_renderer(spec, "qwen3")
    answer = {"role": "assistant", "content": "a" if "disable" in spec else THOUGHT}
    example, weights = renderer.build_supervised_example([QUESTION, answer])
    prompt = renderer.build_generation_prompt([QUESTION]).to_ints()
    tokens = example.to_ints()
    assert tokens[: len(prompt)] == prompt
    stop = renderer.get_stop_sequences()[0]
    assert weights.tolist() == [
        float(len(prompt) <= i <= tokens.index(stop, len(prompt))) for i in range(len(tokens))
    ]
    sampled = [t for t, w in zip(tokens, weights.tolist(), strict=True) if w]
    assert renderer.parse_response(sampled)[0] == answer
    assert list(renderer.parse_response_streaming(sampled))[-1] == answer
