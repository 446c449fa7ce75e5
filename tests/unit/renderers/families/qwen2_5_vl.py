"""Qwen2.5-VL: ChatML with images, a default system prompt and no tools."""

from __future__ import annotations

from family_case import Case
from image_cases import qwen_image_processor, shown, with_images
from rendering_cases import dialogues, plain_answers

CASES = [
    Case(
        model="Qwen2.5-VL",
        spec="qwen2_5_vl",
        tokenizer="qwen2_5",
        template="templates_only/trl_qwen2_5_vl.jinja",
        conversations=with_images(dialogues()),
        answers=plain_answers(),
        as_template=shown,
        image_processor=qwen_image_processor,
    )
]
