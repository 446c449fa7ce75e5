"""Renderers: messages to tokens with training weights, and sampled tokens back to messages.

``get_renderer("qwen3", tokenizer)`` makes one by its name; a chat format is one file of this
package. Options follow a question mark, as in a URL, so that configs, checkpoints and pickles hold
them in one string: ``qwen3?strip_thinking_from_history=false``. Several are joined by ``&``;
``%xx`` encodes any character. Every renderer has the option ``split_special_tokens`` (see
:mod:`tinker_cookbook.renderers.base`), and those with thinking in answers have
``compact_thinking_every`` (see :meth:`Renderer.compact_thinking`).
"""

# pyright: reportUnsupportedDunderAll=false
from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, quote, urlencode

from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.model_info import other_renderer
from tinker_cookbook.model_table import UNAVAILABLE
from tinker_cookbook.renderers import (
    base,
    chatml,
    deepseek_v4_1,
    gemma3,
    glm4,
    glm5_3,
    kimi_k2,
    kimi_k25,
    kimi_k26,
    llama3,
    mistral,
    nemotron3,
    qwen3,
    qwen3_5,
    qwen3_8,
    role_colon,
    smolvlm,
    template,
)
from tinker_cookbook.renderers.base import *  # noqa: F403
from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.renderers.core.parsing import MissingTokenError
from tinker_cookbook.renderers.deepseek_v3 import (
    DeepSeekV3DisableThinkingRenderer as DeepSeekV3DisableThinkingRenderer,
)
from tinker_cookbook.renderers.deepseek_v3 import DeepSeekV3Renderer as DeepSeekV3Renderer
from tinker_cookbook.renderers.deepseek_v3 import (
    DeepSeekV3ThinkingRenderer as DeepSeekV3ThinkingRenderer,
)
from tinker_cookbook.renderers.gpt_oss import GptOssRenderer as GptOssRenderer
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.utils.imports import official_names

__all__ = [
    "Tokenizer",
    "check_renderer_name",
    "get_registered_renderer_names",
    "get_renderer",
    "get_renderer_names",
    "is_renderer_registered",
    "register_renderer",
    "unregister_renderer",
]
__all__ += base.__all__
# Official names, which are lazy.
__all__ += ["classify_parse_failure", "parse_content_blocks"]  # noqa: F405
__getattr__ = official_names(__name__)

_COMMON_OPTIONS = {"split_special_tokens": True, "compact_thinking_every": 0}
_registered: dict[str, RendererFactory] = {}


def register_renderer(name: str, factory: RendererFactory) -> None:
    """Makes ``get_renderer(name, …)`` call ``factory(tokenizer, image_processor, **options)``.

    A registered name takes precedence over a built-in one. Processes that unpickle such a renderer
    have to register it as well.
    """
    if not name or "?" in name:
        raise ConfigurationError(
            f"renderer_name: got {name!r}, expected a name without '?', which begins the options"
        )
    _registered[name] = factory


def unregister_renderer(name: str) -> bool:
    """Removes a registered renderer; returns whether there was one."""
    return _registered.pop(name, None) is not None


def is_renderer_registered(name: str) -> bool:
    """Returns whether ``register_renderer`` was called for this name."""
    return name in _registered


def get_registered_renderer_names() -> list[str]:
    """Returns the registered names, sorted."""
    return sorted(_registered)


def get_renderer_names() -> list[str]:
    """Returns all names of ``get_renderer``, sorted."""
    return sorted({*BUILT_IN, *_registered})


def check_renderer_name(name: str) -> None:
    """Raises ConfigurationError for an unknown name or option, without a tokenizer."""
    _resolve(name, {})


def get_renderer(
    name: str,
    tokenizer: Tokenizer,
    image_processor: Any = None,
    model_name: str | None = None,
    **options: Any,
) -> Renderer:
    """Returns the renderer called ``name``, with options after a question mark or without.

    ``image_processor`` counts the tokens of images; by default the first image loads that of
    ``model_name``, which is by default the tokenizer's name. ``options`` override those in the
    name. Raises ConfigurationError for an unknown name, option or value.

    Names: those of :func:`register_renderer`, role_colon for base models, template for any
    model with a chat template, chatml, smollm2, llama3, gemma3, idefics3, smolvlm, mistral,
    deepseekv3, deepseekv3_disable_thinking, deepseekv3_thinking, deepseekv4_1,
    deepseekv4_1_low_reasoning, deepseekv4_1_max_reasoning, deepseekv4_1_disable_thinking,
    deepseekv4_1_preserve_thinking, kimi_k2, kimi_k2_instruct, kimi_k25,
    kimi_k25_disable_thinking, kimi_k26, kimi_k26_disable_thinking, kimi_k26_preserve_thinking,
    glm4_6, glm4_6_disable_thinking, glm5_3_max_reasoning, glm5_3_high_reasoning,
    glm5_3_low_reasoning, nemotron3, nemotron3_low_thinking, nemotron3_preserve_thinking,
    nemotron3_disable_thinking, nemotron3_ultra, nemotron3_ultra_medium_thinking,
    nemotron3_ultra_preserve_thinking, nemotron3_ultra_disable_thinking, gpt_oss_no_sysprompt,
    gpt_oss_low_reasoning, gpt_oss_medium_reasoning, gpt_oss_high_reasoning, qwen2_5,
    qwen2_5_vl, qwen3, qwen3_disable_thinking, qwen3_instruct, qwen3_vl, qwen3_vl_instruct,
    qwen3_5, qwen3_5_disable_thinking, qwen3_5_preserve_thinking, qwen3_8_xhigh_reasoning,
    qwen3_8_medium_reasoning, qwen3_8_low_reasoning, qwen3_8_disable_thinking, tml_v0.
    """
    base, factory, chosen = _resolve(name, options)
    # Options common to all renderers are set after the construction.
    special = {key: value for key, value in chosen.items() if key not in _COMMON_OPTIONS}
    source = model_name or getattr(tokenizer, "name_or_path", None)
    try:
        # The second parameter of two classes of the official cookbook is an option.
        if "image_processor" in inspect.signature(factory).parameters:
            renderer = factory(tokenizer, image_processor=image_processor, **special)
        else:
            renderer = factory(tokenizer, image_processor, **special)
    except MissingTokenError as error:
        # A setting: the row of data that is rendered first is not the reason.
        raise ConfigurationError(
            f"renderer_name: got {base!r}, but {error}; {other_renderer(source, base)}"
        ) from error
    if "split_special_tokens" in chosen:
        renderer.split_special_tokens(chosen["split_special_tokens"])
    # The spec includes options that the renderer resolved itself, such as the date.
    words = {
        key: str(value).lower() if isinstance(value, bool) else value
        for key, value in sorted({**chosen, **renderer.resolved_options}.items())
        if value is not None
    }
    # The full name, from which a checkpoint or a pickle rebuilds the renderer.
    renderer._renderer_name = f"{base}?{urlencode(words, quote_via=quote)}" if words else base
    renderer._model_name = source
    renderer._has_image_processor = image_processor is not None
    if "compact_thinking_every" in chosen:
        renderer.compact_thinking(chosen["compact_thinking_every"])
    return renderer


def _resolve(name: str, options: dict[str, Any]) -> tuple[str, RendererFactory, dict[str, Any]]:
    base, _, query = name.partition("?")
    # A registered name takes precedence, so that users can replace a built-in renderer.
    factory = _registered.get(base) or BUILT_IN.get(base)
    if factory is None and base in UNAVAILABLE:
        raise ConfigurationError(
            f"renderer_name: got {base!r}, the format of {UNAVAILABLE[base]}: its tokenizer and "
            "format are in tml-renderers 0.4.1 and later, and PyPI has 0.2.1, so no renderer of it "
            "could be checked and none is offered. Use 'template', which takes the format from "
            "the template that comes with the model's tokenizer"
        )
    if factory is None:
        raise ConfigurationError(
            f"renderer_name: got {base!r}, expected one of {', '.join(get_renderer_names())}"
            f"{nearest(base, get_renderer_names())} (Unknown renderer; register_renderer adds one)"
        )
    try:
        # Strict parsing, so that a misspelled option raises an error instead of being dropped.
        spelled = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ConfigurationError(
            f"renderer_name: got options {query!r}, expected option=value&option=value"
        ) from error
    known = _options(factory)
    known = known if known is None else known | _COMMON_OPTIONS
    chosen: dict[str, Any] = {}
    # Arguments come last, so that they override options in the name.
    for option, value in [*spelled, *options.items()]:
        if known is not None and option not in known:
            raise ConfigurationError(
                f"renderer_name: {base} has no option {option!r}, expected "
                f"{'one of ' + ', '.join(known) if known else 'none'}{nearest(option, known)}"
            )
        # Without known options a factory takes any; values then stay as they are.
        default = (known or _COMMON_OPTIONS).get(option)
        chosen[option] = _value(f"{base}?{option}", value, default)
    return base, factory, chosen


def _options(factory: RendererFactory) -> dict[str, Any] | None:
    # The options of a factory with their defaults; None where it takes any.
    parameters = inspect.signature(factory).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {
        p.name: p.default
        for p in parameters
        if p.default is not p.empty and p.name not in ("image_processor", "tokenizer")
    }


def _value(where: str, value: Any, default: Any) -> Any:
    """Converts a value to the type of the option's default."""
    # Booleans first, since they are also integers.
    if isinstance(default, bool):
        words = {"true": True, "1": True, "false": False, "0": False}
        found = value if isinstance(value, bool) else words.get(str(value).lower())
        if found is None:
            raise ConfigurationError(f"{where}: got {value!r}, expected true or false")
        return found
    if isinstance(default, (int, float)):
        try:
            return type(default)(value)
        except (TypeError, ValueError) as error:
            expected = "a whole number" if isinstance(default, int) else "a number"
            raise ConfigurationError(f"{where}: got {value!r}, expected {expected}") from error
    return value


def _make_tml_v0(tokenizer: Tokenizer, image_processor: Any = None) -> Renderer:
    # Imported here, because it needs torch.
    from tinker_cookbook.renderers.tml_v0 import TmlV0Renderer

    return TmlV0Renderer(tokenizer, image_processor)


RendererFactory: TypeAlias = Callable[..., Renderer]
"""``factory(tokenizer, image_processor, **options)``; its keyword-only arguments are options."""

BUILT_IN: dict[str, RendererFactory] = {
    # Base models, any model with a chat template, and plain ChatML.
    "role_colon": role_colon.RoleColonRenderer,
    "template": template.TemplateRenderer,
    "chatml": chatml.ChatMLRenderer,
    "smollm2": partial(chatml.ChatMLRenderer, default_system=chatml.SMOLLM2_SYSTEM_PROMPT),
    "llama3": llama3.Llama3Renderer,
    "gemma3": gemma3.Gemma3Renderer,
    "idefics3": smolvlm.Idefics3Renderer,
    "smolvlm": smolvlm.SmolVLMRenderer,
    "mistral": mistral.MistralRenderer,
    # deepseekv3 is V3.1 without thinking, so both names are one renderer.
    "deepseekv3": DeepSeekV3Renderer,
    "deepseekv3_disable_thinking": DeepSeekV3Renderer,
    "deepseekv3_thinking": DeepSeekV3ThinkingRenderer,
    "deepseekv4_1": deepseek_v4_1.DeepSeekV4_1Renderer,
    "deepseekv4_1_low_reasoning": deepseek_v4_1.DeepSeekV4_1LowReasoningRenderer,
    "deepseekv4_1_max_reasoning": deepseek_v4_1.DeepSeekV4_1MaxReasoningRenderer,
    "deepseekv4_1_disable_thinking": deepseek_v4_1.DeepSeekV4_1DisableThinkingRenderer,
    "deepseekv4_1_preserve_thinking": partial(
        deepseek_v4_1.DeepSeekV4_1Renderer, strip_thinking_from_history=False
    ),
    "kimi_k2": kimi_k2.KimiK2Renderer,
    "kimi_k2_instruct": kimi_k2.KimiK2InstructRenderer,
    "kimi_k25": kimi_k25.KimiK25Renderer,
    "kimi_k25_disable_thinking": kimi_k25.KimiK25DisableThinkingRenderer,
    # K2.6 has the format of K2.5, unless it keeps all thinking.
    "kimi_k26": kimi_k25.KimiK25Renderer,
    "kimi_k26_disable_thinking": kimi_k25.KimiK25DisableThinkingRenderer,
    "kimi_k26_preserve_thinking": kimi_k26.KimiK26PreserveThinkingRenderer,
    "glm4_6": glm4.Glm46Renderer,
    "glm4_6_disable_thinking": glm4.Glm46DisableThinkingRenderer,
    "glm5_3_max_reasoning": glm5_3.Glm5_3Renderer,
    "glm5_3_high_reasoning": glm5_3.Glm5_3HighReasoningRenderer,
    "glm5_3_low_reasoning": glm5_3.Glm5_3LowReasoningRenderer,
    "nemotron3": nemotron3.Nemotron3Renderer,
    "nemotron3_low_thinking": nemotron3.Nemotron3LowThinkingRenderer,
    "nemotron3_preserve_thinking": nemotron3.Nemotron3PreserveThinkingRenderer,
    "nemotron3_disable_thinking": nemotron3.Nemotron3DisableThinkingRenderer,
    "nemotron3_ultra": nemotron3.Nemotron3UltraRenderer,
    "nemotron3_ultra_medium_thinking": nemotron3.Nemotron3UltraMediumThinkingRenderer,
    "nemotron3_ultra_preserve_thinking": nemotron3.Nemotron3UltraPreserveThinkingRenderer,
    "nemotron3_ultra_disable_thinking": nemotron3.Nemotron3UltraDisableThinkingRenderer,
    "gpt_oss_no_sysprompt": GptOssRenderer,
    **{
        f"gpt_oss_{effort}_reasoning": partial(
            GptOssRenderer, use_system_prompt=True, reasoning_effort=effort
        )
        for effort in ("low", "medium", "high")
    },
    "qwen2_5": qwen3.Qwen2_5Renderer,
    "qwen2_5_vl": qwen3.Qwen25VLRenderer,
    "qwen3": qwen3.Qwen3Renderer,
    "qwen3_disable_thinking": qwen3.Qwen3DisableThinkingRenderer,
    "qwen3_instruct": qwen3.Qwen3InstructRenderer,
    "qwen3_vl": qwen3.Qwen3VLRenderer,
    "qwen3_vl_instruct": qwen3.Qwen3VLInstructRenderer,
    "qwen3_5": qwen3_5.Qwen3_5Renderer,
    "qwen3_5_disable_thinking": qwen3_5.Qwen3_5DisableThinkingRenderer,
    "qwen3_5_preserve_thinking": partial(
        qwen3_5.Qwen3_5Renderer, strip_thinking_from_history=False
    ),
    "qwen3_8_xhigh_reasoning": qwen3_8.Qwen3_8Renderer,
    "qwen3_8_medium_reasoning": partial(qwen3_8.Qwen3_8Renderer, reasoning_effort="medium"),
    "qwen3_8_low_reasoning": partial(qwen3_8.Qwen3_8Renderer, reasoning_effort="low"),
    "qwen3_8_disable_thinking": qwen3_8.Qwen3_8DisableThinkingRenderer,
    "tml_v0": _make_tml_v0,
}

# For pickles, which have the name of their renderer.
Renderer._by_name = get_renderer
