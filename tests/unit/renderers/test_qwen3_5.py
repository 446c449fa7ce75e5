"""Qwen3.5: options, errors, and calls as XML that a model may write."""

from __future__ import annotations

import json

import pytest

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import ToolCall
from tinker_cookbook.renderers.core.tool_calls import read_xml_call

QUESTION = {"role": "user", "content": "q"}


def call(arguments):
    return ToolCall(function=ToolCall.FunctionBody(name="f", arguments=arguments))


def calling(arguments):
    return {"role": "assistant", "content": "", "tool_calls": [call(arguments)]}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("12", 12),
        ("-0.5", -0.5),
        ("1e5", "1e5"),
        ("1.10", "1.10"),
        ("007", "007"),
        ("NaN", "NaN"),
        ("True", True),
        ("false", False),
        ("None", None),
        ("null", None),
        ("nil", "nil"),
        ('"12"', '"12"'),
        ('{"a":  [1]}', {"a": [1]}),
        ("{'a': 1}", "{'a': 1}"),
        ("[" * 100_000, "[" * 100_000),
        ('["\\ud800"]', '["\\ud800"]'),
        ("9" * 5000, "9" * 5000),
        ("\n a\n", "\n a\n"),
        ("a\n</parameter> b", "a\n</parameter> b"),
        ("", ""),
    ],
)
def test_values_are_read_by_their_spelling(written, read):
    body = f"\n<function=f>\n<parameter=x>\n{written}\n</parameter>\n</function>\n"
    (found,) = read_xml_call(body)
    assert json.loads(found.function.arguments) == {"x": read}
    assert type(json.loads(found.function.arguments)["x"]) is type(read)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_vl_instruct"])
def test_a_later_system_message_is_refused(make_renderer, name):
    with pytest.raises(RendererError, match=r"messages\[1\].role: got 'system'"):
        make_renderer(name, "qwen3").build_generation_prompt(
            [QUESTION, {"role": "system", "content": "s"}]
        )


def test_thinking_has_no_place_where_it_is_disabled(make_renderer):
    renderer = make_renderer("qwen3_5_disable_thinking", "qwen3")
    thought = [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "a"}]
    answer = {"role": "assistant", "content": thought}
    assert renderer.disables_thinking
    with pytest.raises(RendererError, match=r"messages\[1\].content: got thinking"):
        renderer.build_supervised_example([QUESTION, answer])
    prompt = renderer.build_generation_prompt([QUESTION, answer, QUESTION])
    text = renderer.tokenizer.decode(prompt.to_ints())
    assert "assistant\na<|im_end|>" in text
    assert text.endswith("<think>\n\n</think>\n\n")
