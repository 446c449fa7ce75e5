"""Chat template of a tokenizer as a function from messages to text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from typing import Any, Literal

from tinker_cookbook.engine.model.resolve import resolve_model
from tinker_cookbook.exceptions import ModelNotFoundError, RendererError, nearest
from tinker_cookbook.model_files import chat_template_of
from tinker_cookbook.renderers.core.arguments import read_json
from tinker_cookbook.renderers.core.checks import (
    TEXT,
    TEXT_AND_IMAGES,
    TEXT_AND_THINKING,
    check_caller,
    check_parts,
)
from tinker_cookbook.renderers.core.messages import (
    Message,
    checked_arguments,
    has_thinking,
    openai_message,
)
from tinker_cookbook.renderers.core.thinking import thinking_and_rest
from tinker_cookbook.tokenizer_utils import Tokenizer, tokenizer_name

_TODAY = re.compile(r"strftime_now\(\s*(?P<quote>['\"])(?P<format>.*?)(?P=quote)\s*\)")
_WORDS = {"true": True, "false": False, "none": None, "null": None}


class TemplateRefusal(RendererError):  # noqa: N818
    """Error that a template raised for a conversation, with the template's own message."""


@dataclass(frozen=True)
class Form:
    """Forms of content, thinking and calls that a template expects."""

    parts: bool = False
    """Content is a list of parts, never a string."""
    thinking: Literal["field", "inline"] | None = "field"
    """``reasoning_content``, or ``<think>`` tags in the text; None: no thinking."""
    arguments: Literal["text", "object"] | None = "text"
    """Arguments of calls as verbatim JSON text or as an object; None: it writes no calls."""
    why_no_calls: str = ""


def argument(value: Any) -> Any:
    """Converts true, false, none, numbers and JSON of a template argument; returns other text
    unchanged."""
    if not isinstance(value, str):
        return value
    word = value.strip().lower()
    if word in _WORDS:
        return _WORDS[word]
    # Only numbers, lists and objects are read as JSON; other text is a string.
    if not re.match(r"[\[{]|-?\d+(\.\d+)?$", word):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


class TemplateText:
    """Template ``name`` of a tokenizer (None: the default one) with ``arguments``.

    The date in a template (``strftime_now``) is fixed to ``today``, so that tokens do not change at
    midnight.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        name: str | None,
        today: str | None,
        arguments: Mapping[str, Any],
    ) -> None:
        self._tokenizer = tokenizer
        self._arguments = {key: argument(value) for key, value in arguments.items()}
        try:
            day = date.fromisoformat(today) if today else date.today()
        except ValueError as error:
            raise RendererError(
                f"template?today: got {today!r}, expected a day such as 2026-01-31"
            ) from error
        self.source = _TODAY.sub(
            lambda call: json.dumps(day.strftime(call["format"])), _template(tokenizer, name)
        )
        # A template renders whole conversations only, so the contribution of a message is found by
        # rendering prefixes. With this cache and that of answers, a growing conversation needs two
        # renderings a turn.
        self.render_keys = lru_cache(256)(self._render_keys)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Returns the text of a conversation in the template's form; raises TemplateRefusal."""
        try:
            # The changed source is passed, in which the date is fixed.
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=prompt,
                **self._arguments,
            )
        except Exception as error:  # a template is a program and may raise anything
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TemplateRefusal(
                f"messages: the tokenizer's chat template refuses roles {roles or '(none)'}"
                f"{' and a prompt' if prompt else ''}: {type(error).__name__}: {error}; change the "
                "conversation, or the template's arguments (template?name=value)"
            ) from error
        return str(text)

    def _render_keys(self, keys: tuple[str, ...], prompt: bool = False) -> str:
        """Returns the text of messages that are JSON strings."""
        return self.render([json.loads(key) for key in keys], prompt=prompt)


def _template(tokenizer: Tokenizer, name: str | None) -> str:
    found = getattr(tokenizer, "chat_template", None) or _of_processor(tokenizer)
    if not found:
        raise RendererError(
            "renderer_name: template needs a tokenizer with a chat template, which "
            f"{getattr(tokenizer, 'name_or_path', '')!r} does not have; use role_colon for a base "
            "model, or set tokenizer.chat_template"
        )
    # A tokenizer has one template, or a dictionary of named ones.
    if isinstance(found, str):
        if name not in (None, "default"):
            raise RendererError(
                f"template?template: got {name!r}, but the tokenizer has one template, without a "
                "name; leave the option out"
            )
        return found
    chosen = name or "default"
    if chosen not in found:
        raise RendererError(
            f"template?template: got {name!r}, expected one of {', '.join(sorted(found))}"
            f"{nearest(chosen, found)}"
        )
    return found[chosen]


def _of_processor(tokenizer: Tokenizer) -> str | None:
    """Returns the template of a processor, in a file that its tokenizer does not read."""
    name = str(tokenizer_name(tokenizer))
    try:
        return chat_template_of(resolve_model(name, allow_download=False, need="config").folder)
    except ModelNotFoundError:
        return None


def plain(role: str, text: str, form: Form) -> dict[str, Any]:
    """Returns a text message in the template's form."""
    content = [{"type": "text", "text": text}] if form.parts else text
    return {"role": role, "content": content}


def as_template_message(message: Message, form: Form, idx: int) -> dict[str, Any]:
    """Returns the message as the template expects it; raises RendererError if it cannot be."""
    role, content = message["role"], message["content"]
    known = {"assistant": TEXT_AND_THINKING, "user": TEXT_AND_IMAGES, "tool": TEXT_AND_IMAGES}
    check_parts(message, idx, "template", known.get(role, TEXT))
    result = openai_message(message)
    check_caller(message, idx)
    if isinstance(result["content"], list):  # with images, of which a template gets the type alone
        result["content"] = [
            {"type": "image"} if part["type"] == "image" else part for part in result["content"]
        ]
        return result
    if not isinstance(content, str) and has_thinking(content):
        if form.thinking is None:
            name = "template (whose chat template knows none)"
            check_parts(message, idx, name, frozenset({"text"}))
        elif form.thinking == "inline":
            result["content"] = "".join(
                f"<think>{part['thinking']}</think>"
                if part["type"] == "thinking"
                else str(part.get("text", ""))
                for part in content
            )
            # The thinking is in the text now; it must not be written twice.
            del result["reasoning_content"]
        # The field holds one text, which the template writes before the answer. (Its name is
        # ``thinking`` in gpt-oss's template.)
        else:
            first, result["content"] = thinking_and_rest(message)
            result |= {"reasoning_content": first or "", "thinking": first or ""}
    if "tool_calls" in result:
        _convert_arguments(result["tool_calls"], form, idx)
    # An unparsed call followed the text.
    raw = [call.raw_text for call in message.get("unparsed_tool_calls", [])]
    text = "\n".join(part for part in (result["content"], *raw) if part)
    return result | plain(role, text, form)


def _convert_arguments(calls: list[dict[str, Any]], form: Form, idx: int) -> None:
    if form.arguments is None:
        raise RendererError(
            f"messages[{idx}].tool_calls: got tool calls, expected a message without: the "
            f"tokenizer's chat template writes none ({form.why_no_calls}); use the renderer of the "
            "model's family, or write the calls into the text"
        )
    # Arguments as text are already in the form that the template writes.
    for at, call in enumerate(calls if form.arguments == "object" else ()):
        where = f"messages[{idx}].tool_calls[{at}].function.arguments"
        text = checked_arguments(call["function"]["arguments"], where)
        call["function"]["arguments"] = read_json(text)
