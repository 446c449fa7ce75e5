"""Qwen3-VL: the Instruct models' template, and what the Thinking models' adds to Qwen3's."""

from __future__ import annotations

from family_case import Case
from image_cases import qwen_image_processor, shown, with_images, written_out
from rendering_cases import cut_conversations, qwen_conversations, tagged_answers

CASES = [
    Case(
        model="Qwen3-VL Instruct",
        spec="qwen3_vl_instruct",
        tokenizer="qwen3",
        template="qwen3/chat_template.qwen3_vl.jinja",
        conversations=with_images(cut_conversations(qwen_conversations(thinking=False))),
        answers=tagged_answers(thinking=False),
        as_template=shown,
        declares_tools={},
        image_processor=qwen_image_processor,
    ),
    Case(
        model="Qwen3-VL Thinking",
        spec="qwen3_vl",
        tokenizer="qwen3",
        template="qwen3/chat_template.qwen3_trl.jinja",
        conversations=with_images(cut_conversations(qwen_conversations())),
        answers=tagged_answers(),
        as_template=written_out,
        declares_tools={},
        image_processor=qwen_image_processor,
        corrections={
            "{{- '<|im_start|>assistant\\n' }}": "{{- '<|im_start|>assistant\\n<think>\\n' }}"
        },
        prompt_end="<|im_start|>assistant\n<think>\n",
        difference="compared with Qwen3's template, changed for images and for a prompt that opens "
        "the thinking block, as in the Thinking models. The answer is encoded after this prompt; "
        "the template merges the last line break of the prompt with that of an empty block",
    ),
]
