"""Nemotron 3: ChatML with thinking, tool calls as XML, and always a system message.

A prompt opens the ``<think>`` block of the answer; without thinking it has a closed empty block.
The template writes an answer without thinking after the closed block, so such an answer never
continues the prompt of a thinking model: train on it with ``nemotron3_disable_thinking``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError, RendererError
from tinker_cookbook.renderers.chatml import END, ChatMLBase
from tinker_cookbook.renderers.core.answer_form import AnswerForm
from tinker_cookbook.renderers.core.arguments import to_json
from tinker_cookbook.renderers.core.checks import TEXT_AND_THINKING
from tinker_cookbook.renderers.core.messages import (
    Message,
    ToolSpec,
    ensure_text,
    system_message,
)
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage
from tinker_cookbook.renderers.core.thinking import LeadingThinking, thinking_and_rest
from tinker_cookbook.renderers.core.tool_calls import (
    XML_CALL,
    XML_CALL_INSTRUCTIONS,
    as_openai_tool,
    format_xml_calls,
    with_parsed_arguments,
)
from tinker_cookbook.renderers.qwen3 import THINKING

_OPEN, _CLOSE = "<think>", "</think>"
_OPENED, _EMPTY = "<think>\n", "<think></think>"


@dataclass(eq=False, repr=False, kw_only=True)
class Nemotron3Renderer(LeadingThinking, ChatMLBase):
    """Nemotron 3 Nano and Super with thinking and tools.

    ``strip_thinking_from_history=False`` keeps the thinking of earlier turns
    (``nemotron3_preserve_thinking``). Thinking must precede the text. ``merge_text_chunks=False``
    encodes the texts of neighbouring parts apart.
    """

    strip_thinking_from_history: bool = True
    merge_text_chunks: bool = True

    _roles = ("system", "user", "assistant", "tool")
    _answer_parts = TEXT_AND_THINKING
    _blocks = (THINKING, replace(XML_CALL, after="\n"))  # a line break ends each call
    _inside = THINKING
    _prompt_opening = _OPENED
    # Quirk of the template: without a system message it writes an empty one.
    _inserted_system = ""
    _effort = "\n\n{reasoning effort: low}"
    _low_effort = False
    """Whether the last question ends with ``_effort``."""
    _closing = f"\n{_CLOSE}\n"
    _trims_before_calls = True
    """Whether text before calls is trimmed in history."""

    @property
    def has_extension_property(self) -> bool:
        """True where thinking stays in history, for answers that have some."""
        # The words on the effort move to the last question, which changes earlier prompts.
        return not (self.strip_thinking_from_history or self._low_effort)

    def compact_thinking(self, every: int) -> None:
        """Removes the thinking of all earlier answers after each ``every`` answers."""
        if self._low_effort:
            raise ConfigurationError(
                f"compact_thinking_every: {self._name} writes the effort into the last question, "
                "which changes earlier prompts anyway; use nemotron3"
            )
        super().compact_thinking(every)

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns the tokens of a message; consecutive tool results share a user message."""
        self._check(message, ctx.idx)
        role = message["role"]
        if role == "assistant":
            return self._render_answer(message, ctx)
        text = ensure_text(message["content"])
        if role != "tool":
            # Only the last question has the words on the effort.
            low = self._low_effort and ctx.idx == ctx.last_user_index
            return self._context(self._begin(role, ctx), text + self._effort if low else text)
        # Quirk of the template: it opens no message for results at the very beginning.
        first = ctx.prev_role is None or (ctx.prev_role == "system" and ctx.idx == 1)
        header = self._separator(ctx) if first else self._begin("user", ctx)
        header = "" if ctx.prev_role == "tool" else header
        last = ctx.next_role != "tool"
        result = f"<tool_response>\n{text}\n</tool_response>\n{END if last else ''}"
        return RenderedMessage(
            header=self.codec.constant(header),
            output=[self.codec.encode(result)],
        )

    def _declare_tools(self, tools: Sequence[ToolSpec], system_prompt: str) -> list[Message]:
        """Declares tools in the system message, as the template does with ``tools=``."""
        if not tools:
            return system_message(system_prompt)
        declared = "".join(_declare(as_openai_tool(tool)["function"]) for tool in tools)
        text = (
            f"{system_prompt}\n\n" if system_prompt else ""
        ) + f"# Tools\n\nYou have access to the following functions:\n\n<tools>{declared}\n</tools>"
        return [Message(role="system", content=f"{text}\n\n{XML_CALL_INSTRUCTIONS}")]

    def to_openai_message(self, message: Message) -> dict[str, Any]:
        """Returns the message with call arguments as objects, as the template expects them."""
        return with_parsed_arguments(super().to_openai_message(message))

    def _to_openai_tool_arguments(self, arguments: str) -> str | dict[str, Any]:
        return json.loads(arguments)

    def answer_form(self) -> AnswerForm:
        """Returns the form, in which a line break precedes a call."""
        return replace(super().answer_form(), leading="\n")

    def _render_answer(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        answer = self._thinking_and_text(message)
        calls = "".join(f"{block}\n" for block in format_xml_calls(message, ctx.idx))
        # Thinking is kept from the last question on.
        if not self.strip_thinking_from_history or ctx.idx >= ctx.last_user_index:
            if ctx.is_last and not (self.disables_thinking or answer.startswith(_OPENED)):
                self._warn_once(
                    f"{self._name}: the last answer carries no thinking: the chat template writes "
                    "it after an empty block, which the prompt of a thinking model does not have; "
                    "use nemotron3_disable_thinking to train on such answers"
                )
            answer = answer.strip()
        elif calls:
            # In history the template writes text and calls after an empty block. A single tag is
            # enough for it to cut the thinking.
            closed = _CLOSE in answer
            text = answer.split(_CLOSE)[-1] if closed else answer.split(_OPEN)[0]
            answer = _EMPTY + (text.strip() if self._trims_before_calls else text)
        else:
            if _OPEN in answer and _CLOSE in answer:
                answer = _EMPTY + answer.split(_CLOSE)[-1]
            answer = answer.strip()
        # The opening of the block is in the prompt, so it is header.
        opening = next((o for o in (_OPENED, _EMPTY) if answer.startswith(o)), "")
        text = answer.removeprefix(opening) + ("\n" + calls if calls else "")
        return self._answer(self._begin("assistant", ctx) + opening, text)

    def _thinking_and_text(self, message: Message) -> str:
        """Returns the answer before its calls, with thinking in tags.

        Text with a tag in it is verbatim: the template expects the thinking there.
        """
        thinking, text = thinking_and_rest(message)
        if thinking and thinking.strip():
            return f"{_OPENED}{thinking}{self._closing}{text}"
        # Text without thinking follows an empty block.
        return text if _OPEN in text or _CLOSE in text else _EMPTY + text


@dataclass(eq=False, repr=False, kw_only=True)
class Nemotron3PreserveThinkingRenderer(Nemotron3Renderer):
    """Nemotron 3 that keeps the thinking of earlier turns."""

    strip_thinking_from_history: bool = field(default=False, init=False)
    merge_text_chunks: bool = field(default=True, init=False)


class Nemotron3LowThinkingRenderer(Nemotron3Renderer):
    """Nemotron 3 Super with low reasoning effort; Nano was not trained for it."""

    _low_effort = True


class Nemotron3DisableThinkingRenderer(Nemotron3Renderer):
    """Nemotron 3 without thinking: the prompt ends with an empty block.

    A trained answer with thinking raises RendererError, since no prompt continues with it. In
    context of the last turn it is rendered as by the template; in history thinking is dropped.
    """

    _inside = None
    _prompt_opening = _EMPTY
    disables_thinking = True

    def _check_trained(self, messages: Sequence[Message], idx: int) -> None:
        super()._check_trained(messages, idx)
        # Only a trained answer must continue the prompt; others follow the template.
        if not self._thinking_and_text(messages[idx]).startswith(_EMPTY):
            raise RendererError(
                f"messages[{idx}].content: got thinking, or a tag of it in the text, expected an "
                f"answer without: the prompt of {self._name} closes the think block; drop it "
                "with remove_thinking(content), or use nemotron3"
            )


class Nemotron3UltraRenderer(Nemotron3Renderer):
    """Nemotron 3 Ultra thinking: no line break before or after ``</think>``."""

    _effort = "\n\n{reasoning effort: efficient}"
    _closing = _CLOSE
    _trims_before_calls = False  # a quirk of the template


class Nemotron3UltraPreserveThinkingRenderer(
    Nemotron3PreserveThinkingRenderer, Nemotron3UltraRenderer
):
    """Nemotron 3 Ultra that keeps the thinking of earlier turns."""


class Nemotron3UltraMediumThinkingRenderer(Nemotron3UltraRenderer):
    """Nemotron 3 Ultra with medium reasoning effort."""

    _low_effort = True


class Nemotron3UltraDisableThinkingRenderer(
    Nemotron3DisableThinkingRenderer, Nemotron3UltraRenderer
):
    """Nemotron 3 Ultra without thinking."""


def _declare(function: Mapping[str, Any]) -> str:
    lines = ["", "<function>", *_tags(function, ("name", "description")), "<parameters>"]
    parameters = function.get("parameters") or {}
    for name, fields in (parameters.get("properties") or {}).items():
        # The template writes known fields first, in this order, and others after them.
        first = ("type", "description", "enum")
        lines += ["<parameter>", f"<name>{name}</name>", *_tags(fields, first)]
        lines += [*_others(fields, ("name", *first)), "</parameter>"]
    lines += _others(parameters, ("type", "properties", "required"))
    if "required" in parameters:
        lines.append(f"<required>{to_json(parameters['required'])}</required>")
    lines += ["</parameters>", *_others(function, ("type", "name", "description", "parameters"))]
    return "\n".join([*lines, "</function>"])


def _tags(fields: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    written = {"description": lambda text: text.strip(), "enum": to_json}
    return [f"<{n}>{written.get(n, str)(fields[n])}</{n}>" for n in names if n in fields]


def _others(fields: Mapping[str, Any], named: Sequence[str]) -> list[str]:
    """Returns the fields that a declaration has no certain position for, as tags."""
    return [
        f"<{key}>{to_json(v) if isinstance(v, (Mapping, list, tuple)) else v}</{key}>"
        for key, v in fields.items()
        if key not in named
    ]
