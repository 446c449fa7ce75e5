"""Gemma 3: dialogue whose system prompt stands in the first question."""

from __future__ import annotations

from family_case import Case
from rendering_cases import dialogues, plain_answers, text

CASES = [
    Case(
        model="Gemma 3",
        spec="gemma3",
        tokenizer="gemma3",
        template="gemma3/chat_template.jinja",
        conversations=dialogues(reply=text),
        answers=plain_answers(),
    )
]
