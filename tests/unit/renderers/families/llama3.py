"""Llama 3, 3.1 and 3.2: dialogue, dates, one tool call a message."""

from __future__ import annotations

from family_case import Case
from hypothesis import strategies as st
from rendering_cases import dialogues, openai, plain_answers, text, tool_call

DATES = {"date_string": "26 Jul 2024"}


@st.composite
def with_calls(draw):
    """Turns in which an answer may be a call, followed by its result."""
    messages = draw(dialogues(reply=text))
    for at in [i for i, m in enumerate(messages) if m["role"] == "assistant"][::-1]:
        if draw(st.booleans()):
            called = {"role": "assistant", "content": "", "tool_calls": [draw(tool_call)]}
            messages[at:at] = [called, {"role": "tool", "content": draw(text)}]
    return messages


def parsed(message):
    """The template writes arguments with ``tojson``: it takes them as an object."""
    return openai(message, parsed_arguments=True)


def call_answers():
    return st.builds(
        lambda call: {"role": "assistant", "content": "", "tool_calls": [call]}, tool_call
    )


CASES = [
    Case(
        model="Llama 3",
        spec="llama3",
        tokenizer="llama3",
        template="llama3/chat_template.llama3.jinja",
        conversations=dialogues(reply=text),
        answers=plain_answers(),
    ),
    *[
        Case(
            model=model,
            spec="llama3?today_date=26%20Jul%202024",
            tokenizer="llama3",
            template=f"llama3/{file}",
            conversations=with_calls(),
            answers=plain_answers() | call_answers(),
            options=DATES,
            as_template=parsed,
            declares_tools={"tools_in_user_message": False},
        )
        for model, file in [
            ("Llama 3.1, 3.3", "chat_template.jinja"),
            ("Llama 3.2", "chat_template.llama3_2.jinja"),
        ]
    ],
]
