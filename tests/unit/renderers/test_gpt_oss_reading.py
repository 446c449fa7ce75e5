"""gpt-oss: the reader of responses, and what the format cannot say."""

from __future__ import annotations

import pytest
from gpt_oss_cases import (
    CALL_END,
    MEDIUM,
    RESULT,
    STOP,
    USER,
    parse,
    part,
    prompt_text,
    thinking,
)

from tinker_cookbook.renderers import (
    ParseTermination,
    ToolCall,
    get_renderer,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return get_tokenizer(tokenizer_folder("gptoss"))


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return get_renderer(MEDIUM, tokenizer)


@pytest.mark.parametrize("start", ["", "<|start|>assistant"])
@pytest.mark.parametrize(
    "header",
    [
        " to=functions.f<|channel|>commentary json",
        " to=functions.f<|channel|>commentary <|constrain|>json",
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>commentary to=functions.f<|constrain|>json",
        "<|channel|>commentary to=functions.f json",
        "<|channel|>commentary to=functions.f ",
        "<|channel|>analysis to=functions.f code",
    ],
)
def test_calls_are_read_with_the_recipient_anywhere(renderer, header, start):
    before = "<|channel|>analysis<|message|>t<|end|><|start|>assistant"
    spelled = '{"x":1, "y": "<|end|>"}'
    call = ToolCall(function=ToolCall.FunctionBody(name="f", arguments=spelled))
    message, how = parse(renderer, f"{start}{header}<|message|>{spelled}{CALL_END}")
    assert how is ParseTermination.STOP_SEQUENCE
    assert message == {"role": "assistant", "content": "", "tool_calls": [call]}
    message, _ = parse(renderer, f"{before}{header}<|message|>{spelled}{CALL_END}")
    assert message == {
        "role": "assistant",
        "content": [thinking("t")],
        "tool_calls": [call],
    }
    assert spelled in prompt_text(renderer, [USER, message, RESULT])


def test_messages_in_a_row(renderer):
    text = (
        "<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Wait.<|end|><|start|>assistant<|channel|>analysis<|message|>u<|end|><|start|>assistant"
        "<|channel|>final<|message|>a"
    )
    message, _ = parse(renderer, text + STOP)
    assert message["content"] == [thinking("t"), part("Wait."), thinking("u"), part("a")]
    example, weights = renderer.build_supervised_example([USER, message])
    said = [t for t, w in zip(example.to_ints(), weights.tolist(), strict=True) if w]
    assert renderer.tokenizer.decode(said) == text + STOP
    assert prompt_text(renderer, [USER, message]).endswith(
        "<|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>a<|end|><|start|>assistant"
    )


@pytest.mark.parametrize(
    ("response", "content"),
    [
        ("Hello", "Hello"),
        ("", ""),
        ("set x to=5", "set x to=5"),
        ("<|channel|>final", "<|channel|>final"),
        ("<|channel|>foo<|message|>a", "<|channel|>foo<|message|>a"),
        ("<|message|>a", "<|message|>a"),
        ("Hello<|end|><|start|>assistant<|channel|>final<|message|>a", "Helloa"),
        ("<|end|><|end|>", ""),
        ("<|channel|>final<|message|>a<|end|>b", "ab"),
        (
            "<|channel|>final<|message|>a<|end|><|channel|>final<|message|>b",
            "a<|channel|>final<|message|>b",
        ),
        (
            "<|channel|>final<|message|>a<|end|><|start|>user<|message|>b<|end|>",
            "a<|start|>user<|message|>b",
        ),
        ("x" * 1000 + "<|message|>a", "x" * 1000 + "<|message|>a"),
        ("<|channel|>final<|message|>a<|e", "a<|e"),
    ],
)
def test_text_without_a_header(renderer, response, content):
    message, _ = parse(renderer, response + STOP)
    assert message == {"role": "assistant", "content": content}


@pytest.mark.parametrize(
    ("raw", "error", "author"),
    [
        (" to=functions.f<|channel|>commentary json<|message|>{", "Expecting", "functions.f"),
        (" to=functions.f<|channel|>commentary json<|message|>[1]", "JSON object", "functions.f"),
        ("<|channel|>analysis to=python code<|message|>print(1)", "Expecting", "python"),
        ("<|channel|>commentary to=functions.f<|message|>{}<|end|>", "Extra data", "functions.f"),
        ("<|channel|>commentary to=functions.f", "unterminated tool block", "functions.f"),
        ("<|channel|>commentary to=functions.f<|message|>" + "[" * 99_999, "", "functions.f"),
    ],
)
def test_unparsable_calls_round_trip(renderer, raw, error, author):
    message, _ = parse(renderer, f"<|start|>assistant{raw}{CALL_END}")
    [call] = message["unparsed_tool_calls"]
    assert error in call.error
    assert call.raw_text == raw
    assert prompt_text(renderer, [USER, message, RESULT]).endswith(
        f"<|start|>assistant{raw}<|call|><|start|>{author} to=assistant<|channel|>commentary"
        '<|message|>"20"<|end|><|start|>assistant'
    )


# Refused, warned of
