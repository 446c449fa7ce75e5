"""Finds a model's family, size and renderers by its name.

Names are looked up in :mod:`tinker_cookbook.model_table`. For a model that none of its rules
matches, the chat template of a local copy is inspected, and the log states what was assumed. If no
renderer exists for a model, ``template`` is recommended, which derives the format from the model's
own chat template.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from tinker_cookbook.engine.model.resolve import base_name, model_config, resolve_model
from tinker_cookbook.exceptions import ConfigurationError, ModelNotFoundError
from tinker_cookbook.model_files import renderers_by_files
from tinker_cookbook.model_table import BASE, FAMILIES, LINEUP, TEMPLATE, UNAVAILABLE, Family

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelAttributes:
    """Facts about a model; ``recommended_renderers`` has the best one first."""

    organization: str
    version_str: str
    size_str: str
    is_chat: bool
    recommended_renderers: tuple[str, ...]
    is_vl: bool = False
    is_audio_in: bool = False


# Renderers that write the current date into prompts.
_DATED = re.compile(r"gpt_oss_(low|medium|high)_reasoning")
_SIZE = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?[kmbt](?:-a\d+(?:\.\d+)?b)?)(?![a-z0-9])")


def get_llama_info() -> dict[str, ModelAttributes]:
    """Returns the attributes of hosted Llama models by name without organization."""
    return _hosted("meta-llama")


def get_qwen_info() -> dict[str, ModelAttributes]:
    """Returns the attributes of hosted Qwen models by name without organization."""
    return _hosted("Qwen")


def get_deepseek_info() -> dict[str, ModelAttributes]:
    """Returns the attributes of hosted DeepSeek models by name without organization."""
    return _hosted("deepseek-ai")


def get_gpt_oss_info() -> dict[str, ModelAttributes]:
    """Returns the attributes of hosted gpt-oss models by name without organization."""
    return _hosted("openai")


def get_moonshot_info() -> dict[str, ModelAttributes]:
    """Returns the attributes of hosted Kimi models by name without organization."""
    return _hosted("moonshotai")


def get_zai_info() -> dict[str, ModelAttributes]:
    """Returns the attributes of hosted GLM models by name without organization."""
    return _hosted("zai-org")


def get_nvidia_info() -> dict[str, ModelAttributes]:
    """Returns the attributes of hosted Nemotron models by name without organization."""
    return _hosted("nvidia")


def get_thinkingmachines_info() -> dict[str, ModelAttributes]:
    """Returns the attributes of hosted Inkling models by name without organization."""
    return _hosted("thinkingmachines")


def get_model_attributes(model_name: str) -> ModelAttributes:
    """Returns the attributes of a model by Hub name or folder; a ``:peft:…`` suffix is ignored.

    Hosted models are in the line-up, and known families have a rule. The attributes of an
    unknown model are derived from its chat template; a warning, once per name, states what was
    assumed.
    """
    attributes, reason = _attributes(base_name(model_name))
    if reason:
        _warn_once(reason)
    return attributes


def get_recommended_renderer_names(model_name: str) -> list[str]:
    """Returns the names of the renderers that fit ``model_name``, the best first."""
    return list(get_model_attributes(model_name).recommended_renderers)


def get_recommended_renderer_name(model_name: str) -> str:
    """Returns the name of the renderer that fits ``model_name`` best."""
    return get_recommended_renderer_names(model_name)[0]


def resolve_renderer_name(
    model_name: str, renderer_name: str | None, log_path: str | Path | None = None
) -> tuple[str, str]:
    """Returns the renderer that a run uses, and the reason.

    ``renderer_name`` is used if configured; ``None`` selects the recommended renderer. If there is
    no renderer for the model, its own chat template is used (``template``).

    If prompts contain the current date, the date becomes an option of the name, so that the
    saved configuration has it. If the run's folder ``log_path`` already has a configuration,
    its date is kept, so that a resumed run writes the same prompts.
    """
    if renderer_name is not None:
        warn_if_renderer_not_recommended(model_name, renderer_name)
        return _with_date(renderer_name, log_path), "asked for"
    attributes, reason = _attributes(base_name(model_name))
    if reason:
        _warn_once(reason)
    kind = "chat" if attributes.is_chat else "base"
    name = _renderer_for_runs(attributes)
    if not reason and name in TEMPLATE:
        reason = (
            f"no renderer was written for {attributes.organization} models of this family: the "
            "format is derived from the template of the model's tokenizer"
        )
    name = _with_date(name, log_path)
    return name, reason or f"recommended for {attributes.organization} {kind} models of this family"


def resolve_max_length(model_name: str, max_length: int | None) -> int | None:
    """Returns the maximum tokens of an example: as configured, or the model's context.

    Returns ``None`` if the model's config is not on this machine.

    Raises:
        ConfigurationError: ``max_length`` is longer than the context.
    """
    try:
        folder = resolve_model(model_name, allow_download=False, need="tokenizer").folder
        config = model_config(folder)
        # Models with a vision part have the settings of their language model in a part of its own.
        text_config = config.get("text_config") or config
        context = int(text_config.get("max_position_embeddings") or 0)
    except (ModelNotFoundError, ConfigurationError):
        # The context is unknown, so a configured length cannot be checked.
        return max_length
    if max_length is not None and 0 < context < max_length:
        raise ConfigurationError(
            f"max_length: got {max_length}, but the context of {model_name} is {context}; expected "
            f"at most {context}"
        )
    return max_length if max_length is not None else context or None


def warn_if_renderer_not_recommended(model_name: str, renderer_name: str | None) -> bool:
    """Warns if ``renderer_name`` does not fit the model; returns whether it warned."""
    if renderer_name is None:
        return False
    attributes, guessed = _attributes(base_name(model_name))
    requested = renderer_name.partition("?")[0]  # options are the user's choice
    family = _family(base_name(model_name))
    # The family may have renderers that are not in the hosted line-up, such as other efforts.
    recommended = (*attributes.recommended_renderers, *(family.renderers if family else ()))
    fitting = {name.partition("?")[0] for name in recommended}
    # A chat model's own template always fits.
    if requested in fitting or (requested in TEMPLATE and attributes.is_chat):
        return False
    # A registered renderer may fit any model.
    if requested not in {name for row in FAMILIES for name in row.renderers}:
        return False
    # Without a chat template any format may do, and one that no rule knows may be any of ours.
    if guessed and (fitting <= {*BASE} or (fitting <= {*TEMPLATE} and requested not in BASE)):
        return False
    _warn_once(
        f"renderer_name: got {renderer_name!r}, which is not recommended for {model_name}: the "
        "model was trained with another format; expected one of: "
        f"{', '.join(attributes.recommended_renderers)}. Leave renderer_name unset to use "
        f"{attributes.recommended_renderers[0]!r}."
    )
    return True


def other_renderer(model_name: str | None, renderer_name: str, images: bool = False) -> str:
    """Returns what to choose instead of a renderer that cannot write a model's prompts, or, with
    ``images``, no images, as the end of an error; empty if the renderer is not the reason."""
    if not model_name:
        return "expected the renderer of the model's family" + (
            ", which must take images, such as qwen3_vl_instruct" if images else ""
        )
    attributes, _ = _attributes(base_name(model_name))
    best = _renderer_for_runs(attributes)
    if images and not attributes.is_vl:
        return f"expected text: {model_name} is not known to take images"
    if best.partition("?")[0] == renderer_name.partition("?")[0]:
        if images:
            is_template = renderer_name in TEMPLATE
            return (
                "" if is_template else "expected renderer_name=template, the model's own template"
            )
        return "expected another model: this is the renderer of the model's family"
    return f"expected renderer_name={best}, which fits {model_name}, or no renderer_name"


@cache
def _hosted(organization: str) -> dict[str, ModelAttributes]:
    names = [name for name in LINEUP if name.startswith(f"{organization}/")]
    return {name.partition("/")[2]: _attributes(name)[0] for name in names}


@cache
def _differing_facts() -> dict[str, Mapping[str, Any]]:
    return {Path(row.name).name.lower(): row.differs for row in LINEUP.values()}


def _attributes(name: str) -> tuple[ModelAttributes, str]:
    """Returns the attributes and, if no rule matches, a sentence about the assumptions."""
    # The last part decides, so that a local folder of a known model is recognised.
    last = Path(name).name.lower()
    if family := _family(name):
        # Some rules read the version from the name; the others have a fixed one.
        match = re.match(family.pattern, last)
        version = match.groupdict().get("version") if match else None
        family = replace(family, version=version or family.version, size=family.size or _size(last))
        family = replace(family, **_differing_facts().get(last, {}))
        attributes = ModelAttributes(
            family.organization,
            family.version,
            family.size,
            family.renderers != BASE,
            family.renderers,
            family.is_vl,
            family.is_audio_in,
        )
        return attributes, ""
    renderers, is_vl, why = renderers_by_files(name)
    organization = name.split("/")[0] if name.count("/") == 1 else ""
    is_chat = renderers != BASE
    attributes = ModelAttributes(organization, "", _size(last), is_chat, renderers, is_vl)
    return attributes, (
        f"model {name!r} is not in the table of known models; renderer {renderers[0]!r} was "
        f"assumed, because {why}; set renderer_name to choose another"
    )


def _family(name: str) -> Family | None:
    last = Path(name).name.lower()
    return next((family for family in FAMILIES if re.match(family.pattern, last)), None)


def _renderer_for_runs(attributes: ModelAttributes) -> str:
    name = attributes.recommended_renderers[0]
    if name in UNAVAILABLE:
        return TEMPLATE[0]
    # Qwen3.6's chat template writes scalars of tool calls as JSON; Qwen3.5's does not.
    is_qwen36 = attributes.organization == "Qwen" and attributes.version_str == "3.6"
    return f"{name}?json_scalars=true" if is_qwen36 and attributes.is_chat else name


def _with_date(name: str, log_path: str | Path | None) -> str:
    base, _, options = name.partition("?")
    if not _DATED.fullmatch(base) or "_date=" in options:
        return name
    folder = Path(log_path).expanduser() if log_path else None
    # A run with several stages has a configuration in the folder of each stage.
    saved = [*folder.glob("config.json"), *sorted(folder.glob("*/config.json"))] if folder else []
    pattern = re.compile(rf"{re.escape(base)}\?[^\"]*current_date=([\d-]+)")
    found = (pattern.search(file.read_text(encoding="utf-8")) for file in saved)
    # Keep the date of the first start; a new run gets today's date.
    day = next((match[1] for match in found if match), date.today().isoformat())
    return f"{base}?{options}{'&' if options else ''}current_date={day}"


def _size(last: str) -> str:
    match = _SIZE.search(last)
    return match.group(1).upper() if match else ""


@lru_cache(maxsize=256)
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
