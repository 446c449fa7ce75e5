"""What the files of a model say about its format, where its name is unknown.

Its chat template decides, or for a vision-language model without a template its type.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_cookbook.engine.model.resolve import model_config, resolve_model
from tinker_cookbook.exceptions import ModelNotFoundError, TinkerCookbookError
from tinker_cookbook.model_lineup import (
    BASE,
    LLAMA3,
    QWEN3,
    QWEN3_5,
    QWEN3_INSTRUCT,
    QWEN3_VL_INSTRUCT,
)

TEMPLATE = ("template",)


@dataclass(frozen=True)
class _TemplateRule:
    """A rule on the chat template and the model type of a model with an unknown name."""

    family: str
    renderers: tuple[str, ...]
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    model_type: str = ""


_CHATML, _XML_CALLS, _IMAGES = "<|im_start|>", "<function=", "<|vision_start|>"
# In templates that think by default.
_CAN_DISABLE = "enable_thinking is false"
_TEMPLATE_RULES = (
    _TemplateRule(
        "Qwen3.6",
        # Qwen3.6 writes numbers, booleans and null in tool calls as JSON.
        ("qwen3_5?json_scalars=true", *QWEN3_5[1:]),
        (_CHATML, _XML_CALLS, _CAN_DISABLE, "preserve_thinking"),
        ("reasoning_effort",),
        "qwen3_5",
    ),
    _TemplateRule(
        "Qwen3.5",
        QWEN3_5,
        (_CHATML, _XML_CALLS, _CAN_DISABLE),
        ("preserve_thinking", "reasoning_effort"),
        "qwen3_5",
    ),
    # Qwen3-2507 Thinking cannot disable thinking; its prompt opens the block.
    _TemplateRule(
        "Qwen3", QWEN3, (_CHATML, "<think>", _CAN_DISABLE), (_XML_CALLS, _IMAGES), "qwen3"
    ),
    _TemplateRule(
        "Qwen3-2507 Instruct",
        QWEN3_INSTRUCT,
        (_CHATML, "<tool_call>"),
        ("<think>", _XML_CALLS, _IMAGES),
        "qwen3",
    ),
    _TemplateRule(
        "Qwen3-VL Thinking",
        ("qwen3_vl",),
        (_CHATML, "<think>", _IMAGES),
        (_XML_CALLS, _CAN_DISABLE),
        "qwen3_vl",
    ),
    _TemplateRule(
        "Qwen3-VL Instruct",
        QWEN3_VL_INSTRUCT,
        (_CHATML, "<tool_call>", _IMAGES),
        ("<think>", _XML_CALLS),
        "qwen3_vl",
    ),
    _TemplateRule(
        "Qwen2.5-VL", ("qwen2_5_vl",), (_CHATML, _IMAGES), ("<tool_call>", "<think>"), "qwen2_5_vl"
    ),
    _TemplateRule("SmolVLM", ("smolvlm",), (_CHATML, "<end_of_utterance>")),
    _TemplateRule("Idefics3", ("idefics3",), ("<|begin_of_text|>", "<end_of_utterance>")),
    _TemplateRule("SmolLM2", ("smollm2", "chatml"), (_CHATML, "named SmolLM"), ("<think>",)),
    _TemplateRule(
        "Qwen2.5",
        ("qwen2_5", "chatml"),
        (_CHATML, "You are Qwen, created by Alibaba Cloud"),
        ("<think>",),
    ),
    _TemplateRule(
        "ChatML", ("chatml",), (_CHATML,), ("<think>", "<tool_call>", _XML_CALLS, _IMAGES)
    ),
    _TemplateRule("Llama 3", LLAMA3, ("<|start_header_id|>",)),
    _TemplateRule("Gemma 3", ("gemma3",), ("<start_of_turn>",), model_type="gemma3"),
)
# Processors of vision-language models may have the template in a file of their own, or none.
_VISION_TYPES = {
    "qwen3_vl": QWEN3_VL_INSTRUCT,
    "qwen2_vl": ("qwen2_5_vl",),
    "qwen2_5_vl": ("qwen2_5_vl",),
    "qwen3_5": QWEN3_5,
    "smolvlm": ("smolvlm",),
    "idefics3": ("idefics3",),
    "gemma3": ("gemma3",),
}


def renderers_by_files(name: str) -> tuple[tuple[str, ...], bool, str]:
    """Returns renderers guessed from a local copy, whether it takes images, and the reason."""
    try:
        folder = resolve_model(name, allow_download=False, need="tokenizer").folder
    except ModelNotFoundError:
        return BASE, False, "there is no copy of its tokenizer on this machine"
    template = chat_template_of(folder)
    try:
        config = model_config(folder)
    except TinkerCookbookError:
        config = {}
    model_type, is_vl = str(config.get("model_type", "")), "vision_config" in config
    shown = next((kind for kind in _VISION_TYPES if is_vl and model_type.startswith(kind)), None)
    # The other renderers have no images, which the template itself places.
    for rule in () if is_vl and shown is None else _TEMPLATE_RULES:
        if (
            model_type.startswith(rule.model_type)
            and all(text in template for text in rule.has)
            and not any(text in template for text in rule.lacks)
        ):
            return rule.renderers, is_vl, f"it has the chat template of {rule.family}"
    if template:
        why = "no renderer is known for its chat template, which defines the format"
        return TEMPLATE, is_vl, why
    if shown is not None:
        why = f"its model_type is {model_type!r}, and its tokenizer has no chat template"
        return _VISION_TYPES[shown], True, why
    return BASE, is_vl, "its tokenizer has no chat template, as is usual for base models"


def chat_template_of(folder: Path) -> str:
    """Returns the chat template of a model's tokenizer or processor, "" if it has none."""
    # Newer versions of transformers save the template in this file, which takes precedence.
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        return separate.read_text(encoding="utf-8")
    template: Any = ""
    # Processors of older vision-language models have it in the last two.
    for name in ("tokenizer_config.json", "chat_template.json", "processor_config.json"):
        try:
            config = json.loads((folder / name).read_text(encoding="utf-8"))
            template = template or config.get("chat_template") or ""
        except (OSError, ValueError, AttributeError):
            continue
    if isinstance(template, list):  # several named templates; the default one is used
        named = {entry.get("name"): entry.get("template", "") for entry in template}
        return str(named.get("default", ""))
    return str(template)
