"""Kimi K2 Thinking and Kimi K2 Instruct, on another vocabulary: Kimi's own could not be had.

Four things are put right in the copies of the templates. Two change nothing that they say: they
collect ids with ``append`` and ``pop``, which the sandbox of ``apply_chat_template`` forbids.
Tools of K2 Thinking are written as its tokenizer hands them to the template: sorted, without white
space. The last is in K2 Thinking: its comment says that it looks for the last answer without tool
calls, and the loop, which runs backwards, goes on to the first where a ``break`` has been left out.
One case reads the loop as it is, in conversations with one such answer.
"""

from __future__ import annotations

from family_case import Case
from hypothesis import strategies as st
from rendering_cases import openai, tagged_answers, text, untagged
from rendering_cases import tool_call as unnumbered

from tinker_cookbook.renderers import TextPart, ThinkingPart

TOKENS = [
    *["<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"],
    *["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"],
    *["<|tool_call_argument_begin|>", "<|tool_call_end|>"],
]
LISTS = {
    "set _ = tool_response_queue.ids.append(formatted_id)": (
        "set tool_response_queue.ids = tool_response_queue.ids + [formatted_id]"
    ),
    "set tool_call_id = tool_response_queue.ids.pop(0) -%}": (
        "set tool_call_id = tool_response_queue.ids[0] -%}"
        "{%- set tool_response_queue.ids = tool_response_queue.ids[1:] -%}"
    ),
}
TOOLS = {"tools | tojson": "tools | tojson(separators=(',', ':'), sort_keys=true)"}
BREAK = {
    "set ns.last_non_tool_call_assistant_msg = idx -%}": (
        "set ns.last_non_tool_call_assistant_msg = idx -%}{%- break -%}"
    )
}
words = text | st.lists(st.sampled_from([*TOKENS, "<think>", "</think>", "x"]), max_size=4).map(
    "".join
)
other_role = st.sampled_from(["system", "user", "developer"])


def named(message):
    """The template writes a message's name in the place of its role."""
    return openai(message) | {k: message[k] for k in ("name", "tool_call_id") if k in message}


@st.composite
def answers(draw, thinking=False, calls=0):
    """An answer of any text, with ``calls`` calls, whose ids are none or of another API."""
    content = draw(words)
    if thinking and draw(st.booleans()):
        thought = ThinkingPart(type="thinking", thinking=draw(untagged))
        content = [thought, TextPart(type="text", text=content)]
    message = {"role": "assistant", "content": content}
    if calls:
        made = draw(st.lists(unnumbered, min_size=calls, max_size=calls))
        own = st.sampled_from([None, "call_1"])
        message["tool_calls"] = [call.model_copy(update={"id": draw(own)}) for call in made]
    return message


@st.composite
def conversations(draw, thinking=False):
    """Messages of other roles, answers, calls and results, in any order, some with names."""
    messages = []
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["other", "other", "answer", "calls", "result"]))
        if kind == "other":
            message = {"role": draw(other_role), "content": draw(words)}
        elif kind == "result":
            message = {"role": "tool", "content": draw(words)}
        else:
            message = draw(
                answers(thinking=thinking, calls=draw(st.integers(1, 3)) * (kind == "calls"))
            )
        if message["role"] != "assistant" and draw(st.booleans()):
            message["name"] = draw(st.sampled_from(["search", "Ann"]))
        messages.append(message)
    return messages


def is_final(message):
    return message["role"] == "assistant" and "tool_calls" not in message


def answered_without_thinking(messages):
    """Drops the thinking of a turn that is answered at the end."""
    if not is_final(messages[-1]):
        return messages
    start = max((i for i, m in enumerate(messages[:-1]) if is_final(m)), default=-1) + 1
    return [*messages[:start], *(openai_text(m) for m in messages[start:])]


def openai_text(message):
    return message | {"content": openai(message)["content"]}


def one_answer(messages):
    """Cuts a conversation before its second answer without calls."""
    finals = [i for i, message in enumerate(messages) if is_final(message)]
    return messages[: finals[1]] if len(finals) > 1 else messages


@st.composite
def numbered_answers(draw, thinking=True):
    """Answers whose calls have the ids that the model writes."""
    message = draw(tagged_answers(thinking=thinking))
    if "tool_calls" in message:
        message["tool_calls"] = [
            call.model_copy(update={"id": f"functions.{call.function.name}:{i}"})
            for i, call in enumerate(message["tool_calls"])
        ]
    return message


DIFFERENCE = (
    "the renderer keeps the thinking of the last answer and of the calls before it, as it was "
    "sampled; the template removes it"
)
CASES = [
    Case(
        model="Kimi K2 Thinking",
        spec="kimi_k2",
        tokenizer="qwen3",
        added_tokens=TOKENS,
        template="templates_only/Kimi-K2-Thinking.jinja",
        corrections=LISTS | BREAK | TOOLS,
        conversations=conversations(thinking=True).map(answered_without_thinking),
        answers=numbered_answers(),
        as_template=named,
        declares_tools={},
        difference=DIFFERENCE,
    ),
    Case(
        model="Kimi K2 Thinking, loop as it is",
        spec="kimi_k2?strip_thinking_from_history=true",
        tokenizer="qwen3",
        added_tokens=TOKENS,
        template="templates_only/Kimi-K2-Thinking.jinja",
        corrections=LISTS | TOOLS,
        conversations=conversations(thinking=True).map(one_answer).map(answered_without_thinking),
        answers=numbered_answers(),
        as_template=named,
        declares_tools={},
        difference=f"{DIFFERENCE}. Not compared: several answers in a row without tool calls",
    ),
    Case(
        model="Kimi K2 Instruct",
        spec="kimi_k2_instruct",
        tokenizer="qwen3",
        added_tokens=TOKENS,
        template="templates_only/Kimi-K2-Instruct.jinja",
        corrections=LISTS,
        conversations=conversations(),
        answers=numbered_answers(thinking=False),
        as_template=named,
        declares_tools={},
    ),
]
