"""Qwen2.5: tools behind its own system prompt."""

from __future__ import annotations

from family_case import Case
from rendering_cases import cut_conversations, openai, qwen_conversations, tagged_answers


def parsed(message):
    """The template writes arguments with ``tojson``: it takes them as an object."""
    return openai(message, parsed_arguments=True)


CASES = [
    Case(
        model="Qwen2.5",
        spec="qwen2_5",
        tokenizer="qwen2_5",
        template="qwen2_5/chat_template.jinja",
        conversations=cut_conversations(qwen_conversations(thinking=False)),
        answers=tagged_answers(thinking=False),
        as_template=parsed,
        declares_tools={},
    )
]
