"""Qwen3.5 and 3.6: thinking, disabled, preserved; calls as XML; images."""

from __future__ import annotations

import functools
import json

from family_case import Case
from hypothesis import strategies as st
from image_cases import qwen_image_processor, shown, with_images
from rendering_cases import cut_conversations, qwen_conversations, tagged_answers

from tinker_cookbook.renderers import ToolCall

plain_values = st.one_of(
    st.integers(-9, 10**20),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "x", " ", "\n", 'a "b"', "ü\n", "1.10", "007", "NaN", '"12"', "</x>"]),
    st.lists(st.integers(0, 9) | st.sampled_from(["a", True, None]), max_size=3),
    st.dictionaries(st.sampled_from(["k", "é"]), st.booleans() | st.just("v\n"), max_size=2),
)
values = plain_values | st.booleans() | st.none()
look_alikes = values | st.sampled_from(["12", "true", "None", "[]", "</parameter>\n<parameter=q>"])


def arguments(of):
    names = st.sampled_from(["q", "n", "ort", "a b"])
    return st.dictionaries(names, of, max_size=3)


@functools.cache
@st.composite
def with_arguments(draw, messages, of=look_alikes):
    """The same with arguments of every type."""
    changed = []
    for message in draw(messages):
        calls = [
            ToolCall(
                function=ToolCall.FunctionBody(
                    name=call.function.name,
                    arguments=json.dumps(draw(arguments(of)), ensure_ascii=False),
                )
            )
            for call in message.get("tool_calls", [])
        ]
        changed.append({**message, "tool_calls": calls} if calls else message)
    return changed


@functools.cache
def conversations(thinking=True, of=look_alikes):
    """The template raises where there is no question."""
    cut = cut_conversations(qwen_conversations(thinking=thinking))
    asked = cut.filter(lambda messages: any(m["role"] == "user" for m in messages))
    return with_images(with_arguments(asked, of))


@functools.cache
def answers(thinking=True, of=values):
    one = tagged_answers(thinking=thinking).map(lambda message: [message])
    return with_arguments(one, of).map(lambda messages: messages[0])


def parsed(message):
    """The template writes arguments one by one: it takes them as an object."""
    return shown(message, parsed_arguments=True)


def thinks(model, spec, template, options=None, of=None):
    return Case(
        model=model,
        spec=spec,
        tokenizer="qwen3",
        template=f"templates_only/{template}.jinja",
        conversations=conversations(of=look_alikes if of is None else of),
        answers=answers(of=values if of is None else of),
        as_template=parsed,
        declares_tools={},
        options=options or {},
        image_processor=qwen_image_processor,
        prompt_end="<|im_start|>assistant\n<think>\n",
        difference="the prompt opens the thinking block, and the answer is encoded after it; the "
        "template merges the last line break of the prompt with that of an empty block. A string "
        "argument that looks like another value (12, true) is parsed as this value",
    )


def answers_at_once(model, spec, template, options):
    return Case(
        model=model,
        spec=spec,
        tokenizer="qwen3",
        template=f"templates_only/{template}.jinja",
        conversations=conversations(thinking=False),
        answers=answers(thinking=False),
        as_template=parsed,
        declares_tools={},
        options=options,
        image_processor=qwen_image_processor,
    )


_OFF = "qwen3_5_disable_thinking"
_PRESERVE = "qwen3_5_preserve_thinking"
CASES = [
    thinks("Qwen3.5", "qwen3_5", "Qwen3.5-4B"),
    thinks(
        "Qwen3.5, small, enable_thinking=true",
        "qwen3_5",
        "trl_qwen3_5_nothink",
        {"enable_thinking": True},
    ),
    thinks("Qwen3.6", "qwen3_5?json_scalars=true", "trl_qwen3_6"),
    thinks(
        "Qwen3.6, preserve_thinking=true",
        f"{_PRESERVE}?json_scalars=true",
        "trl_qwen3_6",
        {"preserve_thinking": True},
    ),
    thinks(
        "Qwen3.6, preserve_thinking=true, no truth values in calls",
        _PRESERVE,
        "trl_qwen3_6",
        {"preserve_thinking": True},
        plain_values,
    ),
    answers_at_once(
        "Qwen3.5, enable_thinking=false", _OFF, "Qwen3.5-4B", {"enable_thinking": False}
    ),
    answers_at_once("Qwen3.5, small", _OFF, "trl_qwen3_5_nothink", {}),
    answers_at_once(
        "Qwen3.6, enable_thinking=false, preserve_thinking=true",
        f"{_OFF}?json_scalars=true&strip_thinking_from_history=false",
        "trl_qwen3_6",
        {"enable_thinking": False, "preserve_thinking": True},
    ),
]
