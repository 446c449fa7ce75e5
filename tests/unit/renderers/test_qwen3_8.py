"""Qwen3.8 against digests of its chat template's text, on the vocabulary of Qwen3."""

from __future__ import annotations

import json

import pytest
from qwen3_8_vectors import CONVERSATIONS, SETTINGS, VECTORS, conversation, digest

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import ThinkingPart, ToolSpec, get_renderer

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


def test_thinking_stays_in_history_unless_told_otherwise(make_renderer):
    messages = [QUESTION, {"role": "assistant", "content": THOUGHT}, QUESTION]
    kept = make_renderer("qwen3_8_low_reasoning", "qwen3")
    dropped = make_renderer("qwen3_8_low_reasoning?strip_thinking_from_history=true", "qwen3")
    assert not kept.has_extension_property  # an empty block is one token less in history
    assert "<think>\nt\n</think>\n\na<|im_end|>" in text_of(kept, messages)
    assert not dropped.has_extension_property
    assert "<|im_start|>assistant\na<|im_end|>" in text_of(dropped, messages)


def test_tools_stand_behind_the_effort(make_renderer):
    renderer = make_renderer("qwen3_8_xhigh_reasoning", "qwen3")
    tools = [ToolSpec(name="f", description="d", parameters={})]
    prefix = renderer.create_conversation_prefix_with_tools(tools, "Be brief.")
    text = text_of(renderer, [*prefix, QUESTION])
    assert text.startswith("<|im_start|>system\nReasoning effort is set to xhigh.")
    assert "final answer.\n\n# Tools\n\n" in text
    assert "</IMPORTANT>\n\nBe brief.<|im_end|>\n" in text


def test_an_unknown_effort_is_named(make_renderer):
    tokenizer = make_renderer("qwen3", "qwen3").tokenizer
    with pytest.raises(
        RendererError,
        match=r"Unexpected reasoning effort.*got 'high', expected one of xhigh, medium, low",
    ):
        get_renderer("qwen3_8_xhigh_reasoning", tokenizer, reasoning_effort="high")
