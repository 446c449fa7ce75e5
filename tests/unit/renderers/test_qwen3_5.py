"""Qwen3.5: options, errors, and calls as XML that a model may write."""

from __future__ import annotations

import json

import pytest

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import ParseTermination, ThinkingPart, ToolCall, UnparsedToolCall
from tinker_cookbook.renderers.core.tool_calls import format_xml_calls, read_xml_call

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


def test_line_breaks_around_values_may_be_missing():
    (found,) = read_xml_call("<function=f><parameter=x>1</parameter></function>")
    assert found == call('{"x": 1}')
    assert read_xml_call("<function=f></function>") == [call("{}")]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ('{"name": "f", "arguments": {}}', "expected <function=name>"),
        ("<function=f>", "expected <function=name>"),
        ("<function=f>\nhello\n</function>", "got 'hello'"),
        ("<function=f><parameter=x>1</function>", "got '<parameter=x>1'"),
        (
            "<function=f><parameter=x>1</parameter><parameter=x>2</parameter></function>",
            "argument 'x' is given twice",
        ),
        ("<function=f><parameter=x>1</parameter> and </function>", "got '<parameter=x>"),
    ],
)
def test_what_is_no_call_is_kept(make_renderer, body, error):
    renderer = make_renderer("qwen3_5", "qwen3")
    text = f"because\n</think>\n\nI look.\n\n<tool_call>{body}</tool_call><|im_end|>"
    message, how = renderer.parse_response(renderer.codec.encode(text))
    assert how is ParseTermination.STOP_SEQUENCE
    (found,) = message["unparsed_tool_calls"]
    assert found.raw_text == f"<tool_call>{body}</tool_call>"
    assert error in found.error
    assert message["content"][0] == ThinkingPart(type="thinking", thinking="because")
    assert message["content"][1]["text"] == "I look."


def test_unread_calls_are_written_as_they_were():
    raw = UnparsedToolCall(raw_text="<tool_call>x</tool_call>", error="e")
    message = {"role": "assistant", "content": "", "unparsed_tool_calls": [raw]}
    assert format_xml_calls(message, 0) == [raw.raw_text]


def test_scalars_are_spelled_as_asked(make_renderer):
    messages = [QUESTION, calling('{"a": true, "b": null, "c": 1.5, "d": "s", "e": [true]}')]
    texts = []
    for name in ("qwen3_5", "qwen3_5?json_scalars=true"):
        renderer = make_renderer(name, "qwen3")
        example, _ = renderer.build_supervised_example(messages)
        text = renderer.tokenizer.decode(example.to_ints())
        texts.append([line for line in text.split("\n") if line and "<" not in line][-5:])
    assert texts == [
        ["True", "None", "1.5", "s", "[true]"],
        ["true", "null", "1.5", "s", "[true]"],
    ]


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


def test_thinking_that_is_cut_off_stays_thinking(make_renderer):
    renderer = make_renderer("qwen3_5", "qwen3")
    message, how = renderer.parse_response(renderer.codec.encode("I wonder"))
    assert message["content"] == [ThinkingPart(type="thinking", thinking="I wonder")]
    assert how is ParseTermination.MALFORMED
    repeated = renderer.codec.encode("<think>\nI wonder\n</think>\n\nno<|im_end|>")
    message, _ = renderer.parse_response(repeated)
    assert message["content"][0] == ThinkingPart(type="thinking", thinking="I wonder")


def test_extension_property_of_the_names(make_renderer):
    names = ["qwen3_5", "qwen3_5_preserve_thinking", "qwen3_5_disable_thinking"]
    assert [make_renderer(n, "qwen3").has_extension_property for n in names] == [0, 0, 0]
