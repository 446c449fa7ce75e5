"""Qwen3: hybrid thinking in two revisions of its template, thinking disabled, and 2507."""

from __future__ import annotations

from family_case import Case
from rendering_cases import cut_conversations, qwen_conversations, tagged_answers

CASES = [
    *[
        Case(
            model=model,
            spec="qwen3",
            tokenizer="qwen3",
            template=f"qwen3/{file}",
            conversations=cut_conversations(qwen_conversations()),
            answers=tagged_answers(),
            declares_tools={},
        )
        for model, file in [
            ("Qwen3", "chat_template.jinja"),
            ("Qwen3, later revision", "chat_template.qwen3_trl.jinja"),
        ]
    ],
    Case(
        model="Qwen3, enable_thinking=false",
        spec="qwen3_disable_thinking",
        tokenizer="qwen3",
        template="qwen3/chat_template.jinja",
        conversations=cut_conversations(qwen_conversations(thinking=False)),
        answers=tagged_answers(thinking=False),
        declares_tools={},
        prompt_options={"enable_thinking": False},
    ),
    Case(
        model="Qwen3-2507 Instruct",
        spec="qwen3_instruct",
        tokenizer="qwen3",
        template="qwen3/chat_template.qwen3_instruct_2507.jinja",
        conversations=cut_conversations(qwen_conversations(thinking=False)),
        answers=tagged_answers(thinking=False),
        declares_tools={},
    ),
]
