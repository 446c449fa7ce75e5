"""Message helpers, and the many spellings of a conversation in JSON rows."""

from __future__ import annotations

import json

import pytest

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import (
    ImagePart,
    TextPart,
    ThinkingPart,
    ToolCall,
    TrainOnWhat,
    UnparsedToolCall,
    content_to_jsonable,
    ensure_list,
    ensure_text,
    format_content_as_string,
    get_text_content,
    has_thinking,
    message_to_jsonable,
    normalize_messages,
    remove_thinking,
)

TEXT = TextPart(type="text", text="a")
THINKING = ThinkingPart(type="thinking", thinking="t")
IMAGE = ImagePart(type="image", image="x.png")


def test_content_helpers():
    assert ensure_text("a") == ensure_text([TEXT]) == "a"
    assert ensure_text([TEXT, TEXT]) == "aa"
    assert ensure_list("a") == [TEXT]
    assert ensure_list([THINKING]) == [THINKING]
    assert get_text_content({"role": "assistant", "content": [THINKING, TEXT]}) == "a"
    assert has_thinking([THINKING])
    assert not has_thinking([TEXT])
    assert has_thinking("<think>t</think>")
    assert not has_thinking("t")
    assert remove_thinking([THINKING, TEXT]) == [TEXT]
    assert remove_thinking("a") == "a"
    assert format_content_as_string([THINKING, TEXT, IMAGE]) == (
        "<think>t</think>\na\n<image>x.png</image>"
    )
    assert content_to_jsonable([ImagePart(type="image", image=object())]) == [
        {"type": "image", "image": "<object>"}
    ]
    with pytest.raises(RendererError, match="got parts of type image, thinking, expected text"):
        ensure_text([THINKING, IMAGE])


def test_message_to_jsonable_is_json_and_comes_back():
    call = ToolCall(function=ToolCall.FunctionBody(name="f", arguments="{}"), id="7")
    message = {
        "role": "assistant",
        "content": [THINKING, TEXT],
        "tool_calls": [call],
        "unparsed_tool_calls": [UnparsedToolCall(raw_text="<tool_call>", error="e")],
        "trainable": True,
    }
    row = json.loads(json.dumps(message_to_jsonable(message)))
    assert row["tool_calls"] == [
        {"type": "function", "id": "7", "function": {"name": "f", "arguments": "{}"}}
    ]
    assert normalize_messages([row]) == [message]


def test_rows_of_other_spellings():
    call = {"function": {"name": "f", "arguments": {"x": "é"}}}
    [message] = normalize_messages(
        [{"role": "assistant", "content": None, "tool_calls": [call], "trainable": None}]
    )
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [ToolCall(function=ToolCall.FunctionBody(name="f", arguments='{"x": "é"}'))],
    }
    [message] = normalize_messages(
        [{"role": "assistant", "content": "a", "reasoning_content": "t", "tool_calls": []}]
    )
    assert message == {"role": "assistant", "content": [THINKING, TEXT]}


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ("Hi", "messages: got str, expected a list of messages"),
        ({"role": "user"}, "messages: got dict, expected a list"),
        (["Hi"], r"messages\[0\]: got str, expected an object with role and content"),
        ([{"content": "a"}], r"messages\[0\]\.role: got None, expected a role"),
        ([{"role": "user"}], r"messages\[0\]\.content: got None, expected a string or a list"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content: got 3"),
        (
            [{"role": "user", "content": [{"type": "txt", "text": "a"}]}],
            r"content\[0\]\.type: got 'txt', expected one of .*; did you mean 'text'\?",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            r"content\[0\]\.text: got None, expected a text",
        ),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}],
            r"messages\[0\]\.tool_calls\[0\]: got .*expected .*function",
        ),
        (
            [{"role": "assistant", "content": "", "unparsed_tool_calls": ["x"]}],
            r"unparsed_tool_calls\[0\]: got 'x', expected .*raw_text",
        ),
    ],
)
def test_invalid_conversations_are_refused(messages, error):
    with pytest.raises(RendererError, match=error):
        normalize_messages(messages)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": "a\ud83d b"}, "content"),
        (
            {"role": "user", "content": [TEXT, {"type": "text", "text": "\ud83d"}]},
            "content[1].text",
        ),
        ({"role": "tool", "content": "a", "name": "\ud83d"}, "name"),
        (
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": {"\ud83d": 1}}}],
            },
            "tool_calls[0].function.arguments",
        ),
    ],
)
def test_half_of_a_character_is_refused_with_its_place(make_renderer, message, field):
    messages = [{"role": "user", "content": "Hi 🙂"}, message]
    with pytest.raises(RendererError) as raised:
        make_renderer("qwen3", "qwen3").build_generation_prompt(messages)
    assert str(raised.value).startswith(f"messages[1].{field}: got ")
    assert "half of a character" in str(raised.value)


def test_wrong_train_on_what_names_the_right_one():
    with pytest.raises(RendererError, match="did you mean 'all_messages'"):
        TrainOnWhat("all_message")
    assert TrainOnWhat.ALL_TOKENS == "all_tokens"
    assert len(TrainOnWhat) == 7
