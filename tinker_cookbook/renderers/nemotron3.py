"""Nemotron 3: ChatML with thinking, tool calls as XML, and always a system message.

A prompt opens the ``<think>`` block of the answer; without thinking it has a closed empty block.
The template writes an answer without thinking after the closed block, so such an answer never
continues the prompt of a thinking model: train on it with ``nemotron3_disable_thinking``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.base import Example
from tinker_cookbook.renderers.core.blocks import BlockReader
from tinker_cookbook.renderers.core.chatml import END, START, ChatMLBase
from tinker_cookbook.renderers.core.checks import check_parts, check_role, leading_thinking
from tinker_cookbook.renderers.core.messages import (
    Message,
    Role,
    ToolSpec,
    ensure_text,
    get_text_content,
    system_message,
)
from tinker_cookbook.renderers.core.parsing import MessageReader
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage, TrainOnWhat
from tinker_cookbook.renderers.core.tool_calls import (
    XML_CALL,
    XML_CALL_INSTRUCTIONS,
    as_openai_tool,
    format_xml_calls,
    with_parsed_arguments,
)
from tinker_cookbook.renderers.qwen3 import THINKING
from tinker_cookbook.tokenizer_utils import Tokenizer

_OPEN, _CLOSE = "<think>", "</think>"
_OPENED, _EMPTY = "<think>\n", "<think></think>"
_ROLES = ("system", "user", "assistant", "tool")
_CALL = dataclasses.replace(XML_CALL, after="\n")  # a line break ends each call


class Nemotron3Renderer(ChatMLBase):
    """Nemotron 3 Nano and Super with thinking and tools.

    ``strip_thinking_from_history=False`` keeps the thinking of earlier turns
    (``nemotron3_preserve_thinking``).
    Thinking must precede the text. ``merge_text_chunks=False`` encodes the texts of neighbouring
    parts apart.
    """

    _effort = "\n\n{reasoning effort: low}"
    _low_effort = False
    """Whether the last question ends with ``_effort``."""
    _closing = f"\n{_CLOSE}\n"
    _prompt_opening = _OPENED

    def __init__(
        self,
        tokenizer: Tokenizer,
        image_processor: Any = None,
        *,
        strip_thinking_from_history: bool = True,
        merge_text_chunks: bool = True,
    ) -> None:
        super().__init__(tokenizer, image_processor)
        self.strip_thinking_from_history = strip_thinking_from_history
        self.merge_text_chunks = merge_text_chunks

    @property
    def has_extension_property(self) -> bool:
        """True where thinking stays in history, for answers that have some."""
        return not (self.strip_thinking_from_history or self._low_effort)

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns the tokens of a message; consecutive tool results share a user message."""
        role = message["role"]
        check_role(message, ctx.idx, self._name, _ROLES)
        if role == "assistant":
            return self._render_answer(message, ctx)
        check_parts(message, ctx.idx, self._name, frozenset({"text"}))
        text = ensure_text(message["content"])
        if role == "tool":
            return self._render_tool_result(text, ctx)
        # Only the last question has the words on the effort.
        low = self._low_effort and ctx.idx == ctx.last_user_index
        return self._context(f"{START}{role}\n", text + self._effort if low else text)

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
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

    def _conversation_prefix(self, messages: Sequence[Message]) -> list[int]:
        # Quirk of the template: without a system message it writes an empty one.
        if messages and messages[0]["role"] == "system":
            return []
        return self.codec.constant(f"{START}system\n{END}\n")

    def _generation_suffix(self, role: Role) -> list[int]:
        opening = self._prompt_opening if role == "assistant" else ""
        return self.codec.constant(f"{START}{role}\n{opening}")

    def _reader(self) -> MessageReader:
        return BlockReader((THINKING, _CALL), inside=THINKING)

    def _render_answer(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        check_parts(message, ctx.idx, self._name, frozenset({"text", "thinking"}))
        said = self._thinking_and_text(message, ctx.idx)
        calls = "".join(f"{block}\n" for block in format_xml_calls(message, ctx.idx))
        if self.strip_thinking_from_history and ctx.idx < ctx.last_user_index:
            said = self._as_history(said, has_calls=bool(calls))
        else:
            self._check_kept(said, ctx)
            said = said.strip()
        # The opening of the block stands in the prompt, so it is header.
        opening = next((o for o in (_OPENED, _EMPTY) if said.startswith(o)), "")
        text = said.removeprefix(opening) + ("\n" + calls if calls else "")
        return self._answer(f"{START}assistant\n{opening}", text)

    def _check_kept(self, said: str, ctx: RenderContext) -> None:
        if ctx.is_last and not said.startswith(_OPENED):
            self._warn_once(
                f"{self._name}: the last answer carries no thinking: the chat template writes it "
                "behind an empty block, which the prompt of a thinking model does not have; use "
                "nemotron3_disable_thinking to train on such answers"
            )

    def _thinking_and_text(self, message: Message, idx: int) -> str:
        """Returns the answer before its calls, with thinking in tags.

        Text with a tag in it is verbatim: the template expects the thinking there.
        """
        thinking, text = leading_thinking(message, idx, self._name), get_text_content(message)
        if thinking and thinking.strip():
            return f"{_OPENED}{thinking}{self._closing}{text}"
        return text if _OPEN in text or _CLOSE in text else _EMPTY + text

    def _as_history(self, said: str, *, has_calls: bool) -> str:
        """Returns an answer of an earlier turn as by the template: trimmed, and with calls after an
        empty block."""
        said = _without_thinking(said, has_calls=has_calls).strip()
        return _EMPTY + said.removeprefix(_EMPTY).strip() if has_calls else said

    def _render_tool_result(self, text: str, ctx: RenderContext) -> RenderedMessage:
        # Quirk of the template: it opens no message for results at the very beginning.
        first = ctx.prev_role is None or (ctx.prev_role == "system" and ctx.idx == 1)
        header = "" if first or ctx.prev_role == "tool" else f"{START}user\n"
        last = ctx.next_role != "tool"
        result = f"<tool_response>\n{text}\n</tool_response>\n{END if last else ''}"
        return RenderedMessage(
            header=self.codec.constant(header),
            output=[self.codec.encode(result)],
            footer=self.codec.constant("\n") if last else (),
        )


class Nemotron3PreserveThinkingRenderer(Nemotron3Renderer):
    """Nemotron 3 that keeps the thinking of earlier turns."""

    def __init__(self, tokenizer: Tokenizer, image_processor: Any = None) -> None:
        super().__init__(tokenizer, image_processor, strip_thinking_from_history=False)


class Nemotron3LowThinkingRenderer(Nemotron3Renderer):
    """Nemotron 3 Super with low reasoning effort; Nano was not trained for it."""

    _low_effort = True


class Nemotron3DisableThinkingRenderer(Nemotron3Renderer):
    """Nemotron 3 without thinking: the prompt ends with an empty block.

    A trained answer with thinking raises RendererError, since no prompt continues with it. In
    context of the last turn it is rendered as by the template; in history thinking is dropped.
    """

    _prompt_closes_thinking = True
    _prompt_opening = _EMPTY

    def _reader(self) -> MessageReader:
        return BlockReader((THINKING, _CALL))

    def _check_kept(self, said: str, ctx: RenderContext) -> None:
        """Does nothing: ``_example`` checks the trained answers."""

    def _example(
        self, messages: Sequence[Message], trained: Sequence[bool], what: TrainOnWhat
    ) -> Example:
        for i, (message, trains) in enumerate(zip(messages, trained, strict=True)):
            if not trains or message["role"] != "assistant":
                continue
            if not self._thinking_and_text(message, i).startswith(_EMPTY):
                raise RendererError(
                    f"messages[{i}].content: got thinking, or a tag of it in the text, expected an "
                    f"answer without: the prompt of {self._name} closes the think block; drop it "
                    "with remove_thinking(content), or use nemotron3"
                )
        return super()._example(messages, trained, what)


class Nemotron3UltraRenderer(Nemotron3Renderer):
    """Nemotron 3 Ultra thinking: no line break before or after ``</think>``."""

    _effort = "\n\n{reasoning effort: efficient}"
    _closing = _CLOSE

    def _as_history(self, said: str, *, has_calls: bool) -> str:
        # Quirk of the template: it does not trim text before calls.
        if has_calls:
            return _without_thinking(said, has_calls=True)
        return super()._as_history(said, has_calls=False)


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


def _without_thinking(said: str, *, has_calls: bool) -> str:
    """Returns an answer with an empty thinking block; with calls a single tag counts too."""
    if has_calls:
        return _EMPTY + (said.split(_CLOSE)[-1] if _CLOSE in said else said.split(_OPEN)[0])
    if _OPEN in said and _CLOSE in said:
        return _EMPTY + said.split(_CLOSE)[-1]
    return said


def _declare(function: Mapping[str, Any]) -> str:
    lines = ["", "<function>", f"<name>{function['name']}</name>"]
    if "description" in function:
        lines.append(f"<description>{function['description'].strip()}</description>")
    lines.append("<parameters>")
    parameters = function.get("parameters") or {}
    for name, fields in (parameters.get("properties") or {}).items():
        lines += ["<parameter>", f"<name>{name}</name>"]
        if "type" in fields:
            lines.append(f"<type>{fields['type']}</type>")
        if "description" in fields:
            lines.append(f"<description>{fields['description'].strip()}</description>")
        if "enum" in fields:
            lines.append(f"<enum>{json.dumps(fields['enum'], ensure_ascii=False)}</enum>")
        lines += _others(fields, ("name", "type", "description", "enum"))
        lines.append("</parameter>")
    lines += _others(parameters, ("type", "properties", "required"))
    if "required" in parameters:
        required = json.dumps(parameters["required"], ensure_ascii=False)
        lines.append(f"<required>{required}</required>")
    lines.append("</parameters>")
    lines += _others(function, ("type", "name", "description", "parameters"))
    return "\n".join([*lines, "</function>"])


def _others(fields: Mapping[str, Any], named: Sequence[str]) -> list[str]:
    return [
        f"<{key}>{json.dumps(value, ensure_ascii=False) if _is_json(value) else value}</{key}>"
        for key, value in fields.items()
        if key not in named
    ]


def _is_json(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple))
