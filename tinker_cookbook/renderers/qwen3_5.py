"""Qwen3.5 and Qwen3.6: ChatML with thinking, images, and tool calls as XML.

The prompt of ``qwen3_5`` opens the ``<think>`` block, every answer after the last question has one,
and earlier answers lose theirs. ``qwen3_5_disable_thinking`` has an empty block in the prompt.
``qwen3_5_preserve_thinking`` keeps every block, as Qwen3.6's template with ``preserve_thinking``.
Text is trimmed, as in the templates. Qwen3.6 writes numbers, booleans and null in calls as JSON:
add ``?json_scalars=true`` for it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.renderers.core.images import Segments, trim_segments
from tinker_cookbook.renderers.core.messages import (
    Message,
    ToolSpec,
    get_text_content,
    has_thinking,
)
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage
from tinker_cookbook.renderers.core.tool_calls import (
    XML_CALL,
    XML_CALL_INSTRUCTIONS,
    format_xml_calls,
    json_tools,
)
from tinker_cookbook.renderers.qwen3 import THINKING, Qwen3VLRenderer, ThinkingDisabled


@dataclass(eq=False, repr=False, kw_only=True)
class Qwen3_5Renderer(Qwen3VLRenderer):  # noqa: N801 - the model's name has the number
    """Qwen3.5 and Qwen3.6 with thinking.

    ``strip_thinking_from_history=False`` keeps the block of every answer. ``json_scalars=True``
    writes arguments of calls as Qwen3.6 (``true``, ``null``), ``False`` as Qwen3.5 (``True``,
    ``None``); both are parsed. The format has no types: an argument is parsed as the JSON value
    that it may be; tools and the server take types, and texts as written, from the schema.
    """

    json_scalars: bool = False

    _blocks = (THINKING, XML_CALL)
    _system_only_first = True

    @property
    def has_extension_property(self) -> bool:
        """False: history trims white space that a model may sample, and merges the line breaks of
        an empty thinking block. ``build_merged_examples`` finds where it holds by comparing
        tokens."""
        return False

    def _declare_tools(self, tools: Sequence[ToolSpec], system_prompt: str) -> list[Message]:
        """Declares tools in the system message, as the template does with ``tools=``."""
        system_prompt = system_prompt.strip()
        if not tools:
            return [Message(role="system", content=system_prompt)]
        text = (
            "# Tools\n\nYou have access to the following functions:\n\n"
            f"<tools>\n{json_tools(tools)}\n</tools>\n\n{XML_CALL_INSTRUCTIONS}"
        )
        # Unlike in Qwen3, the system prompt follows the declaration of tools.
        return [Message(role="system", content=f"{text}\n\n{system_prompt}".rstrip())]

    def _to_openai_tool_arguments(self, arguments: str) -> str | dict[str, Any]:
        # The template iterates over arguments, so they must be objects.
        return json.loads(arguments)

    def _content(self, message: Message, ctx: RenderContext) -> Segments:
        return trim_segments(super()._content(message, ctx))

    def _last_user_index(self, messages: Sequence[Message]) -> int:
        # The template refuses a conversation without a question. Its answers follow a prompt like
        # all others, so they have a block.
        return self._last_question(messages)

    def _question(self, message: Message) -> str:
        return super()._question(message).strip()

    def _render_answer(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        keeps = ctx.in_last_assistant_turn or not self.strip_thinking_from_history
        thinking, text = self._split_thinking(message, keeps)
        calls = format_xml_calls(message, ctx.idx, json_scalars=self.json_scalars)
        # A blank line separates calls from text; without text there is none.
        answer = text + ("\n\n" if calls and text else "") + "\n".join(calls)
        # Unlike in Qwen3, every answer of the last turn has a block, if need be an empty one.
        if keeps:
            return self._answer_after_block(thinking.strip(), answer, ctx)
        return self._answer(self._begin("assistant", ctx), answer)

    def _split_thinking(self, message: Message, keeps: bool) -> tuple[str, str]:
        thinking, text = super()._split_thinking(message, keeps)
        # The template trims before it searches for tags: the line break after a tag is dropped,
        # spaces between it and the text are not.
        content = message["content"]
        given = not isinstance(content, str) and has_thinking(content)
        tagged = "</think>" in get_text_content(message) and not given
        return thinking, text.rstrip() if tagged else text.strip()


class Qwen3_5DisableThinkingRenderer(ThinkingDisabled, Qwen3_5Renderer):  # noqa: N801 - as above
    """Qwen3.5 and Qwen3.6 without thinking."""
