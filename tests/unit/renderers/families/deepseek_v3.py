"""DeepSeek V3.1.

The copy of the template opens and closes the thinking in prompts without thinking
(``<think></think>``, in history too). The model card has the closing tag alone, as have other
copies of the template. The cases read the copy so: ``</think>``.
"""

from __future__ import annotations

from family_case import Case
from hypothesis import strategies as st
from rendering_cases import (
    cut_conversations,
    openai,
    text,
    tool_call,
    untagged,
)

from tinker_cookbook.renderers import TextPart, ThinkingPart

V3_1 = "deepseek_v3_1/chat_template.jinja"
CLOSED_ONLY_V3_1 = {"<think></think>": "</think>"}
# What the vocabularies hold, and what the formats write besides.
MARKS = [
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜end▁of▁sentence｜>",
    "<｜tool▁calls▁begin｜>",
]
MARKS += [
    "<｜tool▁output▁end｜>",
    "<think>",
    "</result>",
    "\n\n",
    "<result>",
    "\n",
    "```",
    "x",
    " ",
]
words = text | st.lists(st.sampled_from(MARKS), max_size=4).map("".join)


def parsed(message):
    """Templates that write arguments with ``tojson`` take them as an object."""
    return openai(message, parsed_arguments=True)


@st.composite
def answers(draw, thinking="none", calls=0):
    """An answer of any text, with ``calls`` calls; thinking none, as a part, or as tags too."""
    content = draw(words)
    kind = draw(st.sampled_from(thinking.split()))
    if kind == "part":
        thought = ThinkingPart(type="thinking", thinking=draw(untagged))
        content = [thought, TextPart(type="text", text=content)]
    elif kind == "tags" and not calls:
        content = f"<think>{draw(untagged)}</think>{content}"
    message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = draw(st.lists(tool_call, min_size=calls, max_size=calls))
    return message


@st.composite
def conversations(draw, thinking="none", place=None, results=True):
    """System messages or none, then users, answers, and chains of calls with results, in any order.

    Behind calls stand any number of results, none without ``results``. ``place`` are the roles
    behind which an answer may carry thinking, None all.
    """
    system = st.fixed_dictionaries({"role": st.just("system"), "content": words})
    messages = draw(st.lists(system, max_size=3))

    def answer(calls=0):
        before = messages[-1]["role"]
        kinds = thinking if place is None or before in place else "none"
        # Behind results, the template takes text with tags as it is.
        kinds = kinds.replace("tags", "none") if before == "tool" else kinds
        messages.append(draw(answers(thinking=kinds, calls=calls)))

    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(words)})
        for _ in range(draw(st.integers(0, 2))):
            answer(draw(st.integers(1, 3)))
            if results:
                count = draw(st.integers(0, 3))
                messages += [{"role": "tool", "content": draw(words)} for _ in range(count)]
        for _ in range(draw(st.integers(0, 2))):
            answer()
    return messages


@st.composite
def up_to_a_user(draw, strategy):
    """Conversations that end with a question, or before the first."""
    messages = draw(strategy)
    ends = [i for i, m in enumerate(messages) if m["role"] == "user"]
    return messages[: draw(st.sampled_from(ends)) + 1] if ends else messages[:1]


@st.composite
def exact_answers(draw, thinking=True):
    """Answers whose white space, of any kind and anywhere, comes back as it was."""
    content = draw(untagged)
    if thinking and (thought := draw(untagged)):
        text_parts = [TextPart(type="text", text=content)] if content else []
        content = [ThinkingPart(type="thinking", thinking=thought), *text_parts]
    message = {"role": "assistant", "content": content}
    if made := draw(st.lists(tool_call, max_size=3)):
        message["tool_calls"] = made
    return message


THINKING_PLACE = (
    "the renderer keeps the thinking of answers in the last turn, as it was sampled; the template "
    "removes it from every answer"
)
CASES = [
    *[
        Case(
            model="DeepSeek V3.1",
            spec=spec,
            tokenizer="deepseek_v3_1",
            template=V3_1,
            corrections=CLOSED_ONLY_V3_1,
            conversations=cut_conversations(conversations()),
            answers=exact_answers(thinking=False),
            as_template=parsed,
        )
        for spec in ("deepseekv3", "deepseekv3_disable_thinking")
    ],
    Case(
        model="DeepSeek V3.1, thinking=true",
        spec="deepseekv3_thinking",
        tokenizer="deepseek_v3_1",
        template=V3_1,
        corrections=CLOSED_ONLY_V3_1,
        conversations=up_to_a_user(
            conversations(thinking="none part tags", place=["user"], results=False)
        ),
        answers=exact_answers(),
        as_template=parsed,
        options={"thinking": True},
        difference=f"{THINKING_PLACE}, and has no form for thinking after tool results",
    ),
]
