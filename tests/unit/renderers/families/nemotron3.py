"""Nemotron 3 Nano and Super: thinking in its four ways, and calls as XML."""

from __future__ import annotations

from family_case import Case
from hypothesis import strategies as st
from rendering_cases import (
    answer,
    cut_conversations,
    openai,
    tagged_answers,
    text,
    tool_call,
    untagged,
)

from tinker_cookbook.renderers import TextPart, ThinkingPart

NANO = "templates_only/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja"
SUPER = "templates_only/trl_nemotron_3_super.jinja"
# The line break that ends the prompt would merge with white space at the beginning of thinking.
thought = untagged.filter(lambda t: t and not t[0].isspace())
plain = answer.filter(lambda t: "<think>" not in t)
said = st.sampled_from(
    ["</think>", "<think>a", "a</think>b", "a<think>b</think>c", "<think></think>"]
)
spoken = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["system", "user", "tool"]),
    text,
)


@st.composite
def answers(draw, thinking=("none", "blank", "part", "tags", "odd"), calls=None):
    """An answer with thinking in one of the ways, and calls or none."""
    kind = draw(st.sampled_from(thinking))
    content = draw(said) if kind == "odd" else draw(plain if kind == "bare" else text)
    if kind in ("part", "blank"):
        inside = draw(thought) if kind == "part" else draw(st.sampled_from(["", " ", "\n"]))
        opening = ThinkingPart(type="thinking", thinking=inside)
        content = [opening, TextPart(type="text", text=content)]
    elif kind == "tags":
        content = f"<think>\n{draw(thought)}\n</think>\n\n{content}"
    message = {"role": "assistant", "content": content}
    if draw(st.booleans()) if calls is None else calls:
        message["tool_calls"] = draw(st.lists(tool_call, min_size=1, max_size=3))
    return message


@st.composite
def turns(draw, thinking):
    """Questions, chains of calls and their results, answers."""
    messages = draw(st.lists(spoken.filter(lambda m: m["role"] == "system"), max_size=1))
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(text)})
        for _ in range(draw(st.integers(0, 2))):
            messages.append(draw(answers(thinking, calls=True)))
            for _ in range(draw(st.integers(1, 3))):
                messages.append({"role": "tool", "content": draw(text)})
        messages.append(draw(answers(thinking, calls=False)))
    return messages


def any_order():
    """Messages of every role in any order: the template takes all."""
    return st.lists(spoken | answers(), min_size=1, max_size=8)


def parsed(message):
    """The template takes arguments as an object."""
    return openai(message, parsed_arguments=True)


def thinking_answers():
    return tagged_answers().filter(lambda m: isinstance(m["content"], list))


UNTHOUGHT = (
    "the template writes a closed, empty thinking block before an answer without thinking, but the "
    "prompt of a thinking model ends with an open block. Such an answer never follows this prompt, "
    "so the compared answers have thinking"
)
CASES = [
    Case(
        model=f"Nemotron 3 {model}",
        spec=spec,
        tokenizer="qwen3",
        added_tokens=("<s>", "</s>", "<SPECIAL_20>"),
        template=template,
        conversations=conversations,
        answers=replies,
        as_template=parsed,
        declares_tools={},
        options=options,
        difference=difference,
    )
    for model, template, spec, conversations, replies, options, difference in [
        *[
            (
                model,
                template,
                "nemotron3",
                any_order() | cut_conversations(turns(("none", "part", "tags"))),
                thinking_answers(),
                {},
                UNTHOUGHT,
            )
            for model, template in [("Nano", NANO), ("Super", SUPER)]
        ],
        (
            "Super, low_effort",
            SUPER,
            "nemotron3_low_thinking",
            any_order() | cut_conversations(turns(("none", "part", "tags"))),
            thinking_answers(),
            {"low_effort": True},
            UNTHOUGHT,
        ),
        *[
            (
                f"{model}, truncate_history_thinking=false",
                template,
                "nemotron3_preserve_thinking",
                cut_conversations(turns(("part", "tags"))),
                thinking_answers(),
                {"truncate_history_thinking": False},
                UNTHOUGHT,
            )
            for model, template in [("Nano", NANO), ("Super", SUPER)]
        ],
        *[
            (
                f"{model}, enable_thinking=false",
                template,
                "nemotron3_disable_thinking",
                cut_conversations(turns(("bare",))),
                tagged_answers(thinking=False),
                {"enable_thinking": False},
                "",
            )
            for model, template in [("Nano", NANO), ("Super", SUPER)]
        ],
    ]
]
