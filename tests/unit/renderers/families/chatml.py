"""SmolLM2 and Qwen2.5: plain ChatML."""

from __future__ import annotations

from family_case import Case
from rendering_cases import dialogues, plain_answers

CASES = [
    Case(
        model=model,
        spec=spec,
        tokenizer=family,
        template=f"{family}/chat_template.jinja",
        conversations=dialogues(),
        answers=plain_answers(),
    )
    for model, spec, family in [
        ("SmolLM2", "smollm2", "smollm2"),
        ("SmolLM2", "chatml", "smollm2"),
        ("Qwen2.5", "chatml", "qwen2_5"),
    ]
]
