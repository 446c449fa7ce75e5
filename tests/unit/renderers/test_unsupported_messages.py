"""What each format cannot write is refused, and calls that it cannot read keep their text."""

from __future__ import annotations

import pytest
from rendering_cases import calling, thought
from test_sampled_answers import load, written  # noqa: F401 - a fixture

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import ThinkingPart, ToolCall

QUESTION = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
CALL = ToolCall(function=ToolCall.FunctionBody(name="f", arguments="{}"))
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TWO_CALLS = {**CALLED, "tool_calls": [CALL, CALL]}
LIST_CALL = calling("f", [1])  # type: ignore[arg-type]
RESULT = {"role": "tool", "content": "20"}
IMAGE = [{"type": "image", "image": "x.png"}]
THINKING = [ThinkingPart(type="thinking", thinking="t")]


def by(role: str, **more):
    return {"role": role, "content": "x", **more}


USER_CALL = by("user", tool_calls=[CALL])
LATE_THOUGHT = by("assistant", content=thought("t", "x")["content"][::-1])
TWO_THOUGHTS = by("assistant", content=THINKING * 2)
UNSUPPORTED = {
    # renderer: (messages, what the error names)
    "deepseekv3": [
        ([QUESTION, by("system")], "got 'system'"),
        ([by("developer")], "got 'developer'"),
        ([USER_CALL], "role 'user'"),
    ],
    "deepseekv4_1": [
        ([QUESTION, LIST_CALL], "[1]"),
    ],
    "deepseekv3_thinking": [
        ([QUESTION, LATE_THOUGHT], "got parts text, thinking"),
    ],
    "gemma3": [
        ([ANSWER], "'assistant'"),
        ([QUESTION, QUESTION], "'user' after 'user'"),
        ([QUESTION, by("system")], "'system' after 'user'"),
        ([QUESTION, ANSWER, ANSWER], "'assistant' after 'assistant'"),
        ([QUESTION, RESULT], "'tool'"),
        ([by("system")], "system"),
        ([QUESTION, by("assistant", content=IMAGE)], "'image'"),
        ([QUESTION, by("assistant", content=THINKING)], "'thinking'"),
        ([QUESTION, CALLED], "tool calls"),
    ],
    "glm4_6": [
        ([by("observation")], "'observation'"),
        ([USER_CALL], "role 'user'"),
        ([QUESTION, LIST_CALL], "JSON object"),
        ([by("user", content=THINKING)], "'thinking'"),
        ([QUESTION, by("assistant", content=IMAGE)], "'image'"),
        ([QUESTION, LATE_THOUGHT], "thinking part"),
    ],
    "gpt_oss_low_reasoning?tool_format=template": [([TWO_CALLS], "messages[0].tool_calls: got 2")],
    "gpt_oss_low_reasoning": [
        ([QUESTION, by("system")], "messages[1].role: got 'system'"),
        ([QUESTION, by("developer")], "messages[1].role: got 'developer'"),
        ([by("critic")], "messages[0].role: got 'critic'"),
        ([QUESTION, RESULT], "messages[1].role: got a tool result"),
        ([ANSWER, RESULT], "expected a tool call before it"),
        ([USER_CALL], "messages[0].tool_calls"),
        ([by("user", content=THINKING)], "'thinking'"),
        ([by("assistant", content=IMAGE)], "'image'"),
    ],
    "kimi_k2_instruct": [
        ([QUESTION, thought("t", "x")], "'thinking'"),
    ],
    "kimi_k2": [
        ([USER_CALL], "role 'user'"),
        ([QUESTION, LATE_THOUGHT], "got parts"),
    ],
    "nemotron3": [
        ([by("ipython")], "'ipython'"),
        ([USER_CALL], "role 'user'"),
        ([QUESTION, LIST_CALL], "JSON object"),
        ([by("user", content=THINKING)], "'thinking'"),
        ([QUESTION, TWO_THOUGHTS], "thinking part"),
    ],
    "smollm2": [
        ([QUESTION, CALLED], "[1].tool_calls"),
        ([QUESTION, by("assistant", content=IMAGE)], "'image'"),
    ],
    "role_colon": [
        ([QUESTION, CALLED], "call"),
    ],
    "llama3": [
        ([QUESTION, by("assistant", content=THINKING)], "'thinking'"),
    ],
    "qwen2_5": [
        ([QUESTION, by("assistant", content=THINKING)], "remove_thinking"),
    ],
    "qwen3_disable_thinking": [
        ([QUESTION, by("assistant", content=THINKING)], "thinking"),
    ],
    "qwen3": [
        ([QUESTION, by("assistant", content=IMAGE)], "'image'"),
        ([QUESTION, TWO_THOUGHTS], "one thinking part"),
        ([QUESTION, by("developer")], "'developer'"),
        ([USER_CALL], "role 'user'"),
    ],
    "template": [
        ([QUESTION, TWO_THOUGHTS], "one thinking part"),
    ],
}


@pytest.mark.parametrize(
    ("spec", "messages", "named"),
    [(spec, *row) for spec, rows in UNSUPPORTED.items() for row in rows],
)
def test_unsupported_messages_are_refused(load, spec, messages, named):  # noqa: F811
    renderer = load(spec)
    answered = messages[-1]["role"] == "assistant"
    build = renderer.build_supervised_example if answered else renderer.build_generation_prompt
    with pytest.raises(RendererError) as error:
        build(messages)
    assert named in str(error.value)


V3 = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
V3_CALL = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>"
V4_1 = "<｜DSML｜ calls>\n{}\n</｜DSML｜ calls>"
V4_1_CALL = (
    '<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="a" string="false">1, "b": 2'
    "</｜DSML｜ parameter>\n</｜DSML｜ invoke>"
)
GLM_ARG = "<arg_key>q</arg_key>\n<arg_value>1</arg_value>\n"
GLM_TWICE = "f\n" + "<arg_key>q</arg_key><arg_value>1</arg_value>" * 2
KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
KIMI_CALL = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
TAGS = "<tool_call>{}</tool_call>"
FORMATS = {
    # renderer: (what precedes a call, the form of the call, what ends the answer)
    "deepseekv3": ("So.", V3, "<｜end▁of▁sentence｜>"),
    "deepseekv4_1_disable_thinking": ("So.\n\n", V4_1, "<｜end▁of▁sentence｜>"),
    "glm4_6": ("\n<think></think>\n", TAGS, "<|observation|>"),
    "kimi_k2": ("<think></think>So.", KIMI, "<|im_end|>"),
    "nemotron3": ("a\n</think>\n", TAGS + "\n", "<|im_end|>"),
    "qwen3_instruct": ("Hm\n", TAGS, "<|im_end|>"),
    "qwen3_5": ("because\n</think>\n\nI look.\n\n", TAGS, "<|im_end|>"),
}
UNPARSABLE = {
    "deepseekv3": ["f", V3_CALL, ""],
    "deepseekv4_1_disable_thinking": ["f", V4_1_CALL],
    "glm4_6": [
        *["", f"\n{GLM_ARG}", "f\n<arg_key>q</arg_key>\n", GLM_TWICE, f"f\n{GLM_ARG}and more"],
        '{"name": "f",\n"arguments": {}}',
    ],
    "kimi_k2": [
        *["", "f", KIMI_CALL.format("f", "{}"), KIMI_CALL.format("functions.f:0", "{}") + "x"],
        *[KIMI_CALL.format("functions.f:0", body) for body in ("{", "[" * 100_000)],
    ],
    "nemotron3": ["\n<function=f>\n<parameter=q>\n"],
    "qwen3_instruct": [
        "\n{oops}\n",
        '\n{"arguments": {}}\n',
        '\n{"name": "f", "arguments": {oops}}\n',
    ],
    "qwen3_5": [
        '{"name": "f", "arguments": {}}',
        *["<function=f>", "<function=f>\nhello\n</function>"],
        "<function=f><parameter=x>1</function>",
        "<function=f>" + "<parameter=x>1</parameter>" * 2 + "</function>",
        "<function=f><parameter=x>1</parameter> and </function>",
    ],
}


@pytest.mark.parametrize(
    ("spec", "body"), [(spec, body) for spec, bodies in UNPARSABLE.items() for body in bodies]
)
def test_unparsable_calls_round_trip(load, spec, body):  # noqa: F811
    before, form, stop = FORMATS[spec]
    renderer, raw = load(spec), form.format(body)
    tokens = list(renderer.codec.encode(before + raw + stop))
    message, how = renderer.parse_response(tokens)
    assert how.is_clean
    assert "tool_calls" not in message
    [call] = message["unparsed_tool_calls"]
    assert call.raw_text == raw.removesuffix("\n")
    assert call.error
    assert written(renderer, message) == tokens
