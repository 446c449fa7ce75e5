"""gpt-oss: channels, three efforts of reasoning."""

from __future__ import annotations

from family_case import Case
from hypothesis import strategies as st
from rendering_cases import body, cut_conversations, openai, tagged_answers, text, tool_call

from tinker_cookbook.renderers import TextPart, ThinkingPart

# The template writes the day on which it is run, as the renderer does unless it is told a date.
TODAY = {'strftime_now("%Y-%m-%d")': '"2025-08-05"'}


def said(inside):
    """Text with the format's own tokens in it, but for headers that the template refuses."""
    fragments = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"]
    return st.one_of(inside, st.lists(inside | st.sampled_from(fragments), max_size=4).map("".join))


spoken = said(text).filter(
    lambda t: not any(f"<|channel|>{c}<|message|>" in t for c in ("analysis", "final"))
)


@st.composite
def answers(draw, calls, thinks=True):
    """An answer, or a call of one tool; thinking with either."""
    thinking = draw(st.none() | spoken) if thinks else None
    content = draw(spoken)
    if calls:
        content = ""
    if thinking is not None:
        parts = [ThinkingPart(type="thinking", thinking=thinking)]
        kept = [TextPart(type="text", text=content)] if content else []
        content = [*parts, *kept]
    message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [draw(tool_call)]
    return message


@st.composite
def conversations(draw, open_thinking=False):
    """Turns with chains of calls, some without an answer at the end.

    Where a turn is left without an answer, and another follows, calls carry thinking only with
    ``open_thinking``: the template writes such thinking in the prompt of the next answer, but
    leaves it out where that answer is there, so the prompt is not the beginning of the example.
    """
    messages = []
    if draw(st.booleans()):
        role = draw(st.sampled_from(["system", "developer"]))
        messages.append({"role": role, "content": draw(said(text))})
    turns = draw(st.integers(1, 3))
    for turn in range(turns):
        for _ in range(draw(st.integers(1, 2))):
            messages.append({"role": "user", "content": draw(said(text))})
        answered = draw(st.booleans())
        thinks = open_thinking or answered or turn == turns - 1
        for _ in range(draw(st.integers(0, 3))):
            messages.append(draw(answers(True, thinks)))
            for _ in range(draw(st.integers(0, 2))):
                messages.append({"role": "tool", "content": draw(said(text))})
        if answered:
            messages.append(draw(answers(False)))
    return messages


def one_call(message):
    return (
        {**message, "tool_calls": message["tool_calls"][:1]} if "tool_calls" in message else message
    )


@st.composite
def interleaved(draw):
    """Thinking between preambles, which the template has no words for."""
    first, *others = draw(st.lists(body.filter(bool), min_size=3, max_size=4))
    content = [TextPart(type="text", text=first)]
    for i, words in enumerate(others):
        content.append(
            TextPart(type="text", text=words)
            if i % 2
            else ThinkingPart(type="thinking", thinking=words)
        )
    message = {"role": "assistant", "content": content}
    return message | ({"tool_calls": [draw(tool_call)]} if draw(st.booleans()) else {})


def as_template(message):
    """The template calls thinking ``thinking`` and takes arguments as an object."""
    result = openai(message, parsed_arguments=True)
    if "reasoning_content" in result:
        result["thinking"] = result.pop("reasoning_content")
    return result


AS_TEMPLATE = "current_date=2025-08-05&tool_format=template"


def case(effort):
    return Case(
        model="gpt-oss",
        spec=f"gpt_oss_{effort}_reasoning?{AS_TEMPLATE}",
        tokenizer="gptoss",
        template="gptoss/chat_template.jinja",
        conversations=cut_conversations(conversations()),
        answers=tagged_answers().map(one_call) | interleaved(),
        as_template=as_template,
        options={"reasoning_effort": effort},
        corrections=TODAY,
        declares_tools={},
        difference=PREAMBLES,
    )


PREAMBLES = (
    "without tool_format=template, calls have `<|constrain|>json` and tool results are plain text, "
    "as in OpenAI's description of the format and in the official cookbook. The renderer writes "
    "text next to a tool call on the commentary channel. The template writes it as thinking, and "
    "raises an error if the message also has thinking"
)
CASES = [case(effort) for effort in ("low", "medium", "high")]
