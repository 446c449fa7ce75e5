"""Sampled tokens back to messages: round trips, terminations, tool calls, thinking."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rendering_cases import body, tool_call, untagged

from tinker_cookbook.renderers import (
    ParseTermination,
    TextPart,
    ThinkingPart,
    deepseek_v4_1,
    get_renderer,
    glm4,
    parse_content_blocks,
    parse_response_for_stop_token,
    parse_think_blocks,
)
from tinker_cookbook.renderers.core.tool_calls import read_json_call, read_xml_call
from tinker_cookbook.tokenizer_utils import get_tokenizer

examples = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
QUESTION = {"role": "user", "content": "Hi"}


def sampled(renderer, message):
    model_input, weights = renderer.build_supervised_example([QUESTION, message])
    return [t for t, w in zip(model_input.to_ints(), weights.tolist(), strict=True) if w]


def encode(renderer, text):
    return renderer.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("spec", "family"),
    [
        ("smollm2", "smollm2"),
        ("llama3", "llama3"),
        ("role_colon", "llama3"),
        ("role_colon", "smollm2"),
        ("qwen3", "qwen3"),
        ("qwen3_disable_thinking", "qwen3"),
        ("qwen3_instruct", "qwen3"),
    ],
)
@examples
@given(content=body)
def test_text_round_trip(make_renderer, spec, family, content):
    renderer = make_renderer(spec, family)
    message = {"role": "assistant", "content": content}
    parsed, how = renderer.parse_response(sampled(renderer, message))
    assert parsed == message
    assert how is ParseTermination.STOP_SEQUENCE
    assert how.is_clean
    assert how.is_stop_sequence
    assert how


@examples
@given(
    content=body.filter(bool),
    thought=body.filter(bool),
    calls=st.lists(tool_call, max_size=3),
)
def test_qwen3_thinking_and_calls_round_trip(make_renderer, content, thought, calls):
    renderer = make_renderer("qwen3", "qwen3")
    parts = [
        ThinkingPart(type="thinking", thinking=thought),
        TextPart(type="text", text=content),
    ]
    message = {"role": "assistant", "content": parts} | ({"tool_calls": calls} if calls else {})
    assert renderer.parse_response(sampled(renderer, message))[0] == message


@examples
@given(call=tool_call)
def test_llama3_call_round_trip(make_renderer, call):
    renderer = make_renderer("llama3", "llama3")
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert renderer.parse_response(sampled(renderer, message))[0] == message


@examples
@given(content=body)
def test_role_colon_on_a_sentencepiece_vocabulary(stories_model, content):
    renderer = get_renderer("role_colon", get_tokenizer(stories_model))
    message = {"role": "assistant", "content": content}
    model_input, _ = renderer.build_supervised_example([QUESTION, message])
    text = renderer.tokenizer.decode(model_input.to_ints(), skip_special_tokens=True)
    assert text == f"User: Hi\n\nAssistant: {content}\n\nUser:"
    assert renderer.parse_response(sampled(renderer, message))[0] == message


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        (" yes\n\nUser:", "yes", ParseTermination.STOP_SEQUENCE),
        (" yes\n\nUser: no", "yes", ParseTermination.MALFORMED),
        (" yes", "yes", ParseTermination.MALFORMED),
        (" yes</s>", "yes", ParseTermination.EOS),
        ("", "", ParseTermination.MALFORMED),
    ],
)
def test_role_colon_terminations(stories_model, text, content, expected):
    renderer = get_renderer("role_colon", get_tokenizer(stories_model))
    assert renderer.get_stop_sequences() == ["\n\nUser:"]
    message, how = renderer.parse_response(renderer.codec.encode(text))
    assert message["content"] == content
    assert how is expected
    assert bool(how) == how.is_clean == (expected is not ParseTermination.MALFORMED)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("yes<|im_end|>", ParseTermination.STOP_SEQUENCE),
        ("yes<|im_end|>\n", ParseTermination.MALFORMED),
        ("yes", ParseTermination.MALFORMED),
    ],
)
def test_stop_token_terminations(make_renderer, text, expected):
    renderer = make_renderer("chatml", "smollm2")
    message, how = renderer.parse_response(encode(renderer, text))
    assert (message["content"], how) == ("yes", expected)
    stop = renderer.get_stop_sequences()
    assert stop == [renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert parse_response_for_stop_token(encode(renderer, text), renderer.tokenizer, stop[0]) == (
        message,
        how,
    )


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "f", "arguments": {"x":1}, "id": "7"}', '{"x": 1}'),
        (r'{"name": "f", "arguments": "{\"x\":1}"}', '{"x":1}'),
        ('{"name": "f", "arguments": {"x":1}}', '{"x":1}'),
        ('{"name": "f", "arguments": null}', "{}"),
    ],
)
def test_a_call_with_its_name_first_has_the_same_forms(make_renderer, body, arguments):
    renderer = make_renderer("qwen3_instruct", "qwen3")
    message, _ = renderer.parse_response(
        encode(renderer, f"<tool_call>\n{body}\n</tool_call><|im_end|>")
    )
    assert message["tool_calls"][0].function.model_dump() == {"name": "f", "arguments": arguments}


@pytest.mark.parametrize(
    ("spec", "family", "text"),
    [
        ("llama3", "llama3", r'{"name": "f", "parameters": {"a": "\ud800"}}'),
        ("qwen3", "qwen3", r'<tool_call>{"arguments": {"\ud800": 1}, "name": "f"}</tool_call>'),
    ],
)
def test_a_call_with_half_of_a_character_is_unparsed(make_renderer, spec, family, text):
    renderer = make_renderer(spec, family)
    tokens = [*renderer.codec.encode(text), *renderer.get_stop_sequences()[:1]]
    message, _ = renderer.parse_response(tokens)
    assert "half of a character" in message["unparsed_tool_calls"][0].error
    prompt = renderer.build_generation_prompt([QUESTION, message]).to_ints()
    assert text in renderer.codec.decode(prompt)


@pytest.mark.parametrize(
    ("read", "begin", "end"),
    [
        (read_json_call, '{"name": "f", "arguments": ', "}x"),
        (read_xml_call, "<function=f>", "x</function>"),
        (glm4._read_call, "f\n<arg_key>a</arg_key>", "x"),
        (deepseek_v4_1.read_dsml, '<｜DSML｜ invoke name="f">', ""),
    ],
)
def test_white_space_in_a_call_takes_linear_time(read, begin, end):
    started = time.process_time()
    with pytest.raises(ValueError, match=r"expected|Expecting"):
        read(begin + " " * 40_000 + end)
    assert time.process_time() - started < 1


@given(
    texts=st.lists(st.tuples(untagged.filter(bool), untagged.filter(bool)), min_size=1, max_size=4)
)
def test_parse_think_blocks(texts):
    written = "".join(f"{text}<think>{thought}</think>" for text, thought in texts)
    expected = [
        part
        for text, thought in texts
        for part in (
            TextPart(type="text", text=text),
            ThinkingPart(type="thinking", thinking=thought),
        )
    ]
    assert parse_think_blocks(written) == expected
    assert parse_think_blocks(texts[0][0]) is None


def test_parse_content_blocks_keeps_white_space_and_order():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parts, calls = parse_content_blocks(f"<think> a\n</think>b {call}\nc<tool_call>x</tool_call>")
    assert parts == [
        ThinkingPart(type="thinking", thinking=" a\n"),
        TextPart(type="text", text="b "),
        TextPart(type="text", text="\nc"),
    ]
    assert [type(c).__name__ for c in calls] == ["ToolCall", "UnparsedToolCall"]
    assert calls[1].raw_text == "<tool_call>x</tool_call>"
    assert parse_content_blocks("<think>never closed") == (
        [TextPart(type="text", text="<think>never closed")],
        [],
    )
    assert parse_content_blocks("plain") is None


def test_a_wrong_byte_among_byte_tokens_reads_alike_in_any_cut(make_renderer):
    """SentencePiece gives replacements for a whole run of bytes in which one is wrong."""
    renderer = make_renderer("gemma3", "gemma3")
    bytes_of = ["<0xE4>", "<0xBD>", "<0xA0>", "<0xFF>"]
    tokens = [*renderer.tokenizer.convert_tokens_to_ids(bytes_of), *encode(renderer, "a")]
    message, how = renderer.parse_response(tokens)
    assert message["content"] == renderer.codec.decode(tokens)
    *_, streamed = renderer.parse_response_streaming(tokens)
    assert streamed == message
    assert not how
