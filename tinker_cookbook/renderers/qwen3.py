"""Qwen3: ChatML with thinking, tool calls and tool results.

``qwen3`` is the hybrid model with thinking: the last answer always has a ``<think>`` block (empty
without thinking), earlier turns lose theirs. ``qwen3_disable_thinking`` has the empty block in the
prompt. ``qwen3_instruct`` is the 2507 release without thinking. ``qwen3_vl`` is Qwen3-VL Thinking,
whose prompt already opens the ``<think>`` block, ``qwen3_vl_instruct`` Qwen3-VL Instruct.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.base import Example
from tinker_cookbook.renderers.core.blocks import Block, BlockReader
from tinker_cookbook.renderers.core.chatml import START, ChatMLBase
from tinker_cookbook.renderers.core.checks import check_parts, check_role, leading_thinking
from tinker_cookbook.renderers.core.images import (
    ImageProcessorProtocol,
    Segments,
    content_segments,
    encode_segments,
)
from tinker_cookbook.renderers.core.messages import (
    Message,
    Role,
    ToolSpec,
    ensure_list,
    ensure_text,
    format_content_as_string,
    get_text_content,
)
from tinker_cookbook.renderers.core.parsing import MessageReader
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage, TrainOnWhat
from tinker_cookbook.renderers.core.tool_calls import JSON_CALL, declare_tools, format_tool_calls
from tinker_cookbook.tokenizer_utils import Tokenizer

THINKING = Block("<think>", "</think>", trim="\n", after="\n")
"""Thinking block of Qwen's templates; the line breaks around it belong to the format."""
_PLAIN_THINKING = Block("<think>", "</think>")
_EMPTY_THINKING = "<think>\n\n</think>\n\n"
_ROLES = ("system", "user", "assistant", "tool")


class Qwen3InstructRenderer(ChatMLBase):
    """Qwen3-*-Instruct-2507: tools, no thinking of its own.

    Thinking from another model is written in tags in the last answer, with
    ``strip_thinking_from_history=False`` in earlier ones too.
    """

    _history_as_sampled = True
    _parts = frozenset({"text", "thinking"})

    def __init__(
        self,
        tokenizer: Tokenizer,
        image_processor: Any = None,
        *,
        strip_thinking_from_history: bool = True,
    ) -> None:
        super().__init__(tokenizer, image_processor)
        self.strip_thinking_from_history = strip_thinking_from_history

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns the tokens of a message; consecutive tool results share a user message."""
        check_parts(message, ctx.idx, self._name, self._allowed_parts(message["role"]))
        role = message["role"]
        check_role(message, ctx.idx, self._name, _ROLES)
        if role == "assistant":
            return self._render_answer(message, ctx)
        if role == "tool":
            return self._render_tool_result(message, ctx)
        return self._context(f"{START}{role}\n", *self._content(message, ctx))

    def _allowed_parts(self, role: Role) -> frozenset[str]:
        return self._parts

    def _content(self, message: Message, ctx: RenderContext) -> Segments:
        """Returns the content of a message that the model only reads."""
        return [ensure_text(message["content"])]

    def _reader(self) -> MessageReader:
        return BlockReader((_PLAIN_THINKING, JSON_CALL))

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        """Declares tools in the system message, as the template does with ``tools=``."""
        return [Message(role="system", content=declare_tools(tools, system_prompt))]

    def _render_answer(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        text = get_text_content(message)
        if ctx.is_last or not self.strip_thinking_from_history:
            text = format_content_as_string(message["content"], separator="")
        return self._answer(f"{START}assistant\n", _with_tool_calls(text, message))

    def _render_tool_result(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        content = ["<tool_response>\n", *self._content(message, ctx), "\n</tool_response>"]
        header = "" if ctx.prev_role == "tool" else f"{START}user\n"
        if ctx.next_role != "tool":
            return self._context(header, *content)
        # The line break before the next result belongs here: Qwen2.5 merges it with the tag.
        return RenderedMessage(
            header=self.codec.constant(header),
            output=encode_segments([*content, "\n"], self.codec.encode),
        )


class Qwen3Renderer(Qwen3InstructRenderer):
    """Qwen3 hybrid models with thinking.

    As in the template, answers before the last question lose their thinking, so each turn needs its
    own training example. ``strip_thinking_from_history=False`` writes every answer with its block:
    the extension property holds.
    """

    _parts = frozenset({"text", "thinking"})

    @property
    def has_extension_property(self) -> bool:
        """True where thinking stays in history."""
        return not self.strip_thinking_from_history

    def _last_user_index(self, messages: Sequence[Message]) -> int:
        """Returns the last user message that is not a tool result in tags.

        Without one the template treats every message as history.
        """
        for i in reversed(range(len(messages))):
            text = self._question(messages[i])
            result = text.startswith("<tool_response>") and text.endswith("</tool_response>")
            if messages[i]["role"] == "user" and not result:
                return i
        return len(messages) - 1

    def _question(self, message: Message) -> str:
        """Returns the text that distinguishes a question from a tool result."""
        return get_text_content(message)

    def _render_answer(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        thinking, text = self._split_thinking(message, ctx)
        # Quirk of the template: of the last turn only the last answer has an empty block.
        in_turn = ctx.in_last_assistant_turn and (ctx.is_last or bool(thinking))
        if in_turn or not self.strip_thinking_from_history:
            answer = _with_tool_calls(text.lstrip("\n"), message, bool(text))
            return self._answer_behind_block(thinking.strip("\n"), answer, ctx)
        return self._answer(f"{START}assistant\n", _with_tool_calls(text, message))

    def _answer_behind_block(self, thinking: str, text: str, ctx: RenderContext) -> RenderedMessage:
        block = f"<think>\n{thinking}\n</think>\n\n"
        return self._answer(f"{START}assistant\n", text, block)

    def _split_thinking(self, message: Message, ctx: RenderContext) -> tuple[str, str]:
        """Returns thinking and text; in a string, thinking is found by its tags."""
        part, text = leading_thinking(message, ctx.idx, self._name), get_text_content(message)
        if part is not None:
            return part, text
        before, closed, _ = text.partition("</think>")
        if not closed:
            return "", text
        # As in the template: thinking is between the last <think> and the first </think>.
        thinking = before.rstrip("\n").split("<think>")[-1].lstrip("\n")
        return thinking, text.split("</think>")[-1].lstrip("\n")

    def _reader(self) -> MessageReader:
        return BlockReader((THINKING, JSON_CALL))


class ThinkingDisabled(ChatMLBase):
    """Mixin without thinking: the prompt ends with an empty ``<think>`` block.

    Thinking in an answer of the last turn raises RendererError; in history it is dropped.
    """

    _prompt_closes_thinking = True

    def _generation_suffix(self, role: Role) -> list[int]:
        block = _EMPTY_THINKING if role == "assistant" else ""
        return self.codec.constant(f"{START}{role}\n{block}")

    def _example(
        self, messages: Sequence[Message], trained: Sequence[bool], what: TrainOnWhat
    ) -> Example:
        example = super()._example(messages, trained, what)
        # Without a question the template writes no block, but the prompt has one.
        asked = any(message["role"] == "user" for message in messages)
        for i, (message, trains) in enumerate(zip(messages, trained, strict=True)):
            if trains and message["role"] == "assistant" and not asked:
                raise RendererError(
                    f"messages[{i}]: got a trained answer and no user message before it, expected "
                    f"one: the chat template then writes no think block, while the prompt of "
                    f"{self._name} has one; add the question"
                )
        return example

    def _answer_behind_block(self, thinking: str, text: str, ctx: RenderContext) -> RenderedMessage:
        if thinking:
            raise RendererError(
                f"messages[{ctx.idx}].content: got thinking, expected an answer without: "
                f"the prompt of {self._name} closes the think block; drop it with "
                f"remove_thinking(content), or use {self._name.partition('_disable')[0]}"
            )
        return self._answer(f"{START}assistant\n{_EMPTY_THINKING}", text)


class Qwen3DisableThinkingRenderer(ThinkingDisabled, Qwen3Renderer):
    """Qwen3 hybrid models without thinking."""


def _with_tool_calls(text: str, message: Message, has_text: bool | None = None) -> str:
    """Appends tool calls, each on its own line; ``has_text`` overrides trimmed text."""
    text_before = bool(text) if has_text is None else has_text
    blocks = format_tool_calls(message)
    joined = "\n".join(blocks)
    # A line break separates calls from text; without text there is none.
    return text + ("\n" if blocks and text_before else "") + joined


AROUND_IMAGE = ("<|vision_start|>", "<|vision_end|>")
_MAY_SHOW_IMAGES = ("user", "tool")


class _WithImages(Qwen3InstructRenderer):
    """Qwen3 with images in messages of users and tools.

    Images need ``image_processor``; ``max_image_size`` limits their longest side in pixels, 0 does
    not. ``merge_text_chunks=False`` encodes the texts of neighbouring parts apart.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        image_processor: ImageProcessorProtocol | None = None,
        *,
        strip_thinking_from_history: bool = True,
        merge_text_chunks: bool = True,
        max_image_size: int = 0,
    ) -> None:
        super().__init__(
            tokenizer, image_processor, strip_thinking_from_history=strip_thinking_from_history
        )
        self.merge_text_chunks = merge_text_chunks
        self.max_image_size = max_image_size

    def _allowed_parts(self, role: Role) -> frozenset[str]:
        return self._parts | {"image"} if role in _MAY_SHOW_IMAGES else self._parts

    def _content(self, message: Message, ctx: RenderContext) -> Segments:
        return content_segments(
            message, ctx.idx, self._name, self.image_processor, AROUND_IMAGE, self.max_image_size
        )


class Qwen3VLInstructRenderer(_WithImages):
    """Qwen3-VL-*-Instruct: tools and images, no thinking; a system message only at the start."""

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns the tokens of a message; a system message must be the first."""
        check_system_is_first(message, ctx, self._name)
        return super().render_message(message, ctx)


class Qwen3VLRenderer(_WithImages, Qwen3Renderer):
    """Qwen3-VL-*-Thinking: tools, images and thinking."""

    def _question(self, message: Message) -> str:
        parts = ensure_list(message["content"])
        return "".join(part.get("text", AROUND_IMAGE[0]) for part in parts)

    def _generation_suffix(self, role: Role) -> list[int]:
        opening = "<think>\n" if role == "assistant" else ""
        return self.codec.constant(f"{START}{role}\n{opening}")

    def _answer_behind_block(self, thinking: str, text: str, ctx: RenderContext) -> RenderedMessage:
        if not (thinking or ctx.is_last):
            # The line breaks of an empty block merge into one token in history.
            return self._answer(f"{START}assistant\n<think>\n\n</think>\n\n", text)
        return self._answer(f"{START}assistant\n<think>\n", text, f"{thinking}\n</think>\n\n")

    def _reader(self) -> MessageReader:
        return BlockReader((THINKING, JSON_CALL), inside=THINKING)


def check_system_is_first(message: Message, ctx: RenderContext, renderer: str) -> None:
    """Raises RendererError for a system message that is not the first message."""
    if message["role"] == "system" and ctx.idx:
        raise RendererError(
            f"messages[{ctx.idx}].role: got 'system', expected it at the beginning only: "
            f"{renderer} has no form for it elsewhere; join it with messages[0]"
        )
