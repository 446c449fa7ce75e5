"""DeepSeek V3, R1, V3.1 and V3.2.

The copies of V3.1's and V3.2's templates open and close the thinking in prompts without thinking
(``<think></think>``, V3.1's in history too). V3.1's model card has the closing tag alone, as have
other copies of its template, and V3.2's copy does the same for thinking in its history. The cases
read both copies so: ``</think>``.
"""

from __future__ import annotations

from family_case import Case
from hypothesis import strategies as st
from rendering_cases import (
    cut_conversations,
    openai,
    tagged_answers,
    text,
    tool_call,
    untagged,
)

from tinker_cookbook.renderers import TextPart, ThinkingPart

V3_1 = "deepseek_v3_1/chat_template.jinja"
V3_2 = "templates_only/deepseek-ai-DeepSeek-V3.2.jinja"
CLOSED_ONLY_V3_1 = {"<think></think>": "</think>"}
CLOSED_ONLY_V3_2 = {
    "{{- thinking_start_token + thinking_end_token -}}": "{{- thinking_end_token -}}",
    "'\\n\\n' + thinking_start_token + thinking_end_token": "'\\n\\n' + thinking_end_token",
}
# V3's template looks for text that is None, which no longer reaches templates.
CALLS_V3 = {
    "message['content'] is none": "message['tool_calls']",
    "message['content'] is not none": "not message['tool_calls']",
}
# What the vocabularies hold, and what the formats write besides.
MARKS = [
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜end▁of▁sentence｜>",
    "<｜tool▁calls▁begin｜>",
    "｜DSML｜",
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
def conversations(draw, thinking="none", all_results=False, place=None, results=True):
    """System messages or none, then users, answers, and chains of calls with results, in any order.

    Behind calls stand any number of results: as many as calls with ``all_results``, none without
    ``results``. ``place`` are the roles behind which an answer may carry thinking, None all.
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
            answer(calls := draw(st.integers(1, 3)))
            if results:
                count = calls if all_results else draw(st.integers(0, 3))
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
def whole_rows(draw, strategy):
    """Conversations that end anywhere but before the last result of a row."""
    messages = draw(strategy)
    roles = [*(message["role"] for message in messages[1:]), "end"]
    ends = [i for i, following in enumerate(roles) if following != "tool"]
    return messages[: draw(st.sampled_from(ends)) + 1]


@st.composite
def v3_conversations(draw, calls):
    """At most one message with calls, ``calls`` of them, its results, and an answer to them."""
    messages = draw(cut_conversations(conversations()))
    messages = [m for m in messages if m["role"] != "tool" and "tool_calls" not in m]
    ends = [i for i, m in enumerate(messages) if m["role"] == "user"]
    if ends and draw(st.booleans()):
        at = draw(st.sampled_from(ends)) + 1
        called = draw(answers(calls=draw(calls)))
        rows = [{"role": "tool", "content": draw(words)} for _ in range(draw(calls))]
        messages[at:at] = [called, *rows, *([draw(answers())] if messages[at:] else [])]
    return messages or [{"role": "user", "content": draw(words)}]


def no_text_with_calls(messages):
    """V3's template leaves out the text before calls."""
    return [m | {"content": ""} if "tool_calls" in m else m for m in messages]


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
    Case(
        model="DeepSeek V3",
        spec="deepseekv3?version=3",
        tokenizer="deepseek_v3",
        template="deepseek_v3/chat_template.jinja",
        conversations=v3_conversations(calls=st.just(2)).map(no_text_with_calls),
        answers=exact_answers(thinking=False),
        corrections=CALLS_V3,
        difference="not compared: one call or more than two in a row, calls after results, text "
        "next to calls. The template does not close these calls, or closes them twice, and omits "
        "the text",
    ),
    Case(
        model="DeepSeek R1",
        spec="deepseekv3_thinking?version=3",
        tokenizer="deepseek_v3_1",
        template="deepseek_v3/chat_template.deepseek_v3_trl.jinja",
        conversations=up_to_a_user(v3_conversations(calls=st.integers(1, 3))),
        answers=tagged_answers(),
        difference=THINKING_PLACE,
    ),
    Case(
        model="DeepSeek V3.2",
        spec="deepseekv3_2",
        tokenizer="deepseek_v3_1",
        added_tokens=("｜DSML｜",),
        template=V3_2,
        corrections=CLOSED_ONLY_V3_2,
        conversations=whole_rows(conversations(all_results=True)),
        answers=exact_answers(thinking=False),
        as_template=parsed,
        declares_tools={},
        difference="compared only if every call has a result, because the template does not close "
        "other calls",
    ),
    Case(
        model="DeepSeek V3.2, thinking=true",
        spec="deepseekv3_2_thinking",
        tokenizer="deepseek_v3_1",
        added_tokens=("｜DSML｜",),
        template=V3_2,
        corrections=CLOSED_ONLY_V3_2,
        conversations=whole_rows(
            conversations(thinking="none part", all_results=True, place=["user", "tool"])
        ),
        answers=exact_answers(),
        as_template=parsed,
        options={"thinking": True},
        declares_tools={},
        difference="compared only if every call has a result, because the template does not close "
        "other calls",
    ),
]
