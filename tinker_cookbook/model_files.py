"""What the files of a model say about its format, where its name is unknown.

Its chat template decides, or for a vision-language model without a template its type.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tinker_cookbook.engine.model.resolve import model_config, resolve_model
from tinker_cookbook.exceptions import ModelNotFoundError, TinkerCookbookError
from tinker_cookbook.model_table import BASE, TEMPLATE, TEMPLATE_RULES, VISION_TYPES


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
    shown = next((kind for kind in VISION_TYPES if is_vl and model_type.startswith(kind)), None)
    # The other renderers have no images, which the template itself places.
    for rule in () if is_vl and shown is None else TEMPLATE_RULES:
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
        return VISION_TYPES[shown], True, why
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
