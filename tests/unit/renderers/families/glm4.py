"""GLM-4.6: thinking, thinking disabled, tool calls, and no token that ends a message."""

from __future__ import annotations

from family_case import Case
from hypothesis import strategies as st
from rendering_cases import (
    cut_conversations,
    openai,
    qwen_answers,
    tagged_answers,
    text,
)

TEMPLATE = "templates_only/GLM-4.6.jinja"
# What GLM's vocabulary has and the stand-in lacks; <think> and the tags of calls are in both.
ADDED = (
    *["[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "/nothink"],
    *["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    *["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
)
spoken = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["system", "user", "tool"]),
    text | st.lists(text, max_size=3).map(lambda t: [{"type": "text", "text": x} for x in t]),
)
typed_slash = text | text.map(lambda t: f"{t}/nothink")


def any_order():
    """Messages of every role in any order: the template takes all."""
    return st.lists(spoken | qwen_answers() | qwen_answers(calls=False), min_size=1, max_size=8)


@st.composite
def turns(draw, thinking=True):
    """Turns in which the message after an answer is the one that its stop token announces."""
    messages = draw(st.lists(spoken, max_size=2))
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(typed_slash)})
        messages += draw(st.lists(spoken.filter(lambda m: m["role"] != "tool"), max_size=1))
        for _ in range(draw(st.integers(0, 2))):
            messages.append(draw(qwen_answers(thinking=thinking)))
            for _ in range(draw(st.integers(1, 3))):
                messages.append({"role": "tool", "content": draw(text)})
        messages.append(draw(qwen_answers(thinking=thinking, calls=False)))
    return messages


def parsed(message):
    """The template takes arguments as an object."""
    return openai(message, parsed_arguments=True)


def stop_behind(message):
    """An answer ends with what begins the next message."""
    if message["role"] != "assistant":
        return ""
    return "<|observation|>" if message.get("tool_calls") else "<|user|>"


CASES = [
    Case(
        model=model,
        spec=spec,
        tokenizer="qwen3",
        added_tokens=ADDED,
        template=TEMPLATE,
        conversations=conversations,
        answers=tagged_answers(thinking=thinking),
        as_template=parsed,
        declares_tools={},
        options=options,
        stop_behind=stop_behind,
    )
    for model, spec, thinking, conversations, options in [
        ("GLM-4.6", "glm4_6", True, any_order() | cut_conversations(turns()), {}),
        (
            "GLM-4.6, enable_thinking=false",
            "glm4_6_disable_thinking",
            False,
            cut_conversations(turns(thinking=False)),
            {"enable_thinking": False},
        ),
    ]
]
