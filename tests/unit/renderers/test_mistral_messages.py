"""Mistral: ids of calls, the order of messages, and what its formats cannot write."""

from __future__ import annotations

from itertools import pairwise

import pytest
from mistral_cases import HELLO, QUESTION, prompt_text, text_of

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import ToolCall


def calls(*ids):
    body = ToolCall.FunctionBody(name="f", arguments="{}")
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [ToolCall(function=body, id=id_) for id_ in ids],
    }


def result(content, id_=None):
    message = {"role": "tool", "content": content}
    return {**message, "tool_call_id": id_} if id_ else message


def test_calls_without_a_proper_id_are_numbered_and_results_follow(renderers):
    messages = [
        QUESTION,
        calls(None, "call_two", "abcdefghi"),
        result("two", "call_two"),
        result("one"),
        result("three", "abcdefghi"),
        calls(None),
        result("four"),
        HELLO,
    ]
    text = text_of(renderers["v7_tekken"], messages)
    written = ["000000001", "000000000", "abcdefghi", "000000003"]
    assert [part[:9] for part in text.split("[TOOL_RESULTS]")[1:]] == written
    assert '"id": "000000000"}, {"name": "f", "arguments": {}, "id": "000000001"}' in text
    again = [*messages[:-1], calls("call_two"), result("x", "call_two"), HELLO]
    for before, after in pairwise([messages[: n + 1] for n in range(len(messages))]):
        assert prompt_text(renderers["v7_tekken"], after).startswith(
            prompt_text(renderers["v7_tekken"], before)
        )
    assert "[TOOL_RESULTS]000000004[TOOL_CONTENT]x" in text_of(renderers["v7_tekken"], again)


def test_messages_in_a_row_are_one_and_parts_are_joined(renderers):
    renderer = renderers["v3_tekken"]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, QUESTION, HELLO, HELLO]
    assert text_of(renderer, messages) == "<s>[INST]a\n\nb\n\nHi[/INST]Hello\n\nHello</s>"
    apart = [QUESTION, {**HELLO, "trainable": False}, {**HELLO, "trainable": True}]
    example, weights = renderer.build_supervised_example(apart, "customized")
    assert renderer.codec.decode(example.to_ints()) == "<s>[INST]Hi[/INST]Hello</s>Hello</s>"
    assert weights.tolist() == [0.0] * 6 + [1.0] * 2


THINKING = [{"type": "thinking", "thinking": "…"}]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([result("x")], r"messages\[0\].role: got 'tool'"),
        ([QUESTION, {"role": "developer", "content": "x"}], r"messages\[1\].role: got 'developer'"),
        ([QUESTION, HELLO, {"role": "system", "content": "x"}], r"\[2\].role: got 'system' after"),
        ([QUESTION, calls("abcdefghi"), result("x", "other")], "'abcdefghi'"),
        ([{**calls("a"), "role": "user"}], "by role 'user'"),
        ([QUESTION, {**calls("a"), "content": "x"}], "text and tool calls"),
        ([QUESTION, HELLO, calls("a")], "text and tool calls"),
        ([QUESTION, {"role": "assistant", "content": THINKING}], "'thinking'"),
    ],
)
def test_unsupported_messages_are_refused(renderers, messages, said):
    with pytest.raises(RendererError, match=said):
        renderers["v3"].build_supervised_example(messages)


def test_arguments_that_cannot_be_written_are_refused(renderers):
    call = {"function": {"name": "f", "arguments": "{"}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    with pytest.raises(RendererError, match=r"messages\[1\].tool_calls\[0\].*JSON"):
        renderers["v7"].build_supervised_example([QUESTION, message])
