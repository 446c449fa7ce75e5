"""Qwen2.5 and Qwen3: ChatML with tool calls, tool results and thinking.

``qwen3`` is the hybrid model with thinking: the last answer always has a ``<think>`` block (empty
without thinking), earlier turns lose theirs. ``qwen3_disable_thinking`` has the empty block in the
prompt. ``qwen3_instruct`` is the 2507 release without thinking. ``qwen3_vl`` is Qwen3-VL Thinking,
whose prompt already opens the ``<think>`` block, ``qwen3_vl_instruct`` Qwen3-VL Instruct, and
``qwen2_5_vl`` Qwen2.5-VL, which has no tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.chatml import ChatMLBase
from tinker_cookbook.renderers.core.blocks import Block
from tinker_cookbook.renderers.core.checks import (
    TEXT,
    TEXT_AND_IMAGES,
    TEXT_AND_THINKING,
    check_parts,
    text_of,
)
from tinker_cookbook.renderers.core.images import Segments, content_segments, encode_segments
from tinker_cookbook.renderers.core.messages import (
    Message,
    Role,
    ToolSpec,
    ensure_list,
    ensure_text,
    format_content_as_string,
    get_text_content,
)
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage, TrainOnWhat
from tinker_cookbook.renderers.core.renderer import Example
from tinker_cookbook.renderers.core.thinking import (
    ChecksTrainedAnswers,
    LeadingThinking,
    split_thinking,
)
from tinker_cookbook.renderers.core.tool_calls import JSON_CALL, declare_tools, format_tool_calls

THINKING = Block("<think>", "</think>", trim="\n", after="\n")
"""Thinking block of Qwen's templates; the line breaks around it belong to the format."""
AROUND_IMAGE = ("<|vision_start|>", "<|vision_end|>")
QWEN2_5_SYSTEM_PROMPT = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
_EMPTY_THINKING = "<think>\n\n</think>\n\n"


@dataclass(eq=False, repr=False, kw_only=True)
class Qwen3InstructRenderer(ChatMLBase):
    """Qwen3-*-Instruct-2507: tools, and no thinking by the model itself.

    Thinking from another model is written in tags in the last answer, with
    ``strip_thinking_from_history=False`` in earlier ones too.
    """

    strip_thinking_from_history: bool = True

    _roles = ("system", "user", "assistant", "tool")
    _answer_parts = _context_parts = TEXT_AND_THINKING  # _content rejects thinking
    _history_as_sampled = True
    _blocks = (Block("<think>", "</think>"), JSON_CALL)
    _samples_thinking = False
    _system_only_first = False
    """Whether a system message must be the first message."""

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns the tokens of a message; consecutive tool results share a user message."""
        self._check(message, ctx.idx)
        role = message["role"]
        if role == "system" and ctx.idx and self._system_only_first:
            raise RendererError(
                f"messages[{ctx.idx}].role: got 'system', expected it at the beginning only: "
                f"{self._name} has no form for it elsewhere; join it with messages[0]"
            )
        if role == "assistant":
            return self._render_answer(message, ctx)
        content = self._content(message, ctx)
        if role != "tool":
            return self._context(self._begin(role, ctx), *content)
        content = ["<tool_response>\n", *content, "\n</tool_response>"]
        header = "" if ctx.prev_role == "tool" else self._begin("user", ctx)
        if ctx.next_role != "tool":
            return self._context(header, *content)
        # The line break before the next result belongs here: Qwen2.5 merges it with the tag.
        return RenderedMessage(
            header=self.codec.constant(header),
            output=encode_segments([*content, "\n"], self.codec.encode),
        )

    def _content(self, message: Message, ctx: RenderContext) -> Segments:
        """Returns the content of a message that the model only reads."""
        return [ensure_text(message["content"])]

    def _declare_tools(self, tools: Sequence[ToolSpec], system_prompt: str) -> list[Message]:
        """Declares tools in the system message, as the template does with ``tools=``."""
        return [Message(role="system", content=declare_tools(tools, system_prompt))]

    def _render_answer(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        text = get_text_content(message)
        # Thinking comes from another model, and only the last answer keeps it.
        if ctx.is_last or not self.strip_thinking_from_history:
            text = format_content_as_string(message["content"], separator="")
        text = _with_tool_calls(text, message, bool(text))
        return self._answer(self._begin("assistant", ctx), text)


class Qwen2_5Renderer(ChecksTrainedAnswers, Qwen3InstructRenderer):  # noqa: N801 - model's name
    """Qwen2.5-*-Instruct: the format of Qwen3-2507 after a default system prompt.

    Sampled thinking stays in the history as text in tags, as in the template; a trained answer
    with a thinking part raises RendererError.
    """

    _context_parts = TEXT
    _inserted_system = QWEN2_5_SYSTEM_PROMPT

    def _declare_tools(self, tools: Sequence[ToolSpec], system_prompt: str) -> list[Message]:
        """Declares tools in the system message, by default after the default prompt."""
        return super()._declare_tools(tools, system_prompt or QWEN2_5_SYSTEM_PROMPT)

    def _render_answer(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        text = format_content_as_string(message["content"], separator="")
        text = _with_tool_calls(text, message, bool(text))
        return self._answer(self._begin("assistant", ctx), text)

    def _check_trained(self, messages: Sequence[Message], idx: int) -> None:
        check_parts(messages[idx], idx, self._name, TEXT)


class Qwen3Renderer(LeadingThinking, Qwen3InstructRenderer):
    """Qwen3 hybrid models with thinking.

    As in the template, answers before the last question lose their thinking, so each turn needs a
    separate training example. ``strip_thinking_from_history=False`` writes every answer with its
    block: the extension property holds.
    """

    _history_as_sampled = False
    _blocks = (THINKING, JSON_CALL)
    _samples_thinking = True

    def _last_user_index(self, messages: Sequence[Message]) -> int:
        # Without a question the template treats every message as history.
        question = self._last_question(messages)
        return len(messages) - 1 if question < 0 else question

    def _last_question(self, messages: Sequence[Message]) -> int:
        """Returns the last user message that is not a tool result in tags, -1 without one."""
        for i in reversed(range(len(messages))):
            text = self._question(messages[i])
            # The template writes tool results as user messages.
            result = text.startswith("<tool_response>") and text.endswith("</tool_response>")
            if messages[i]["role"] == "user" and not result:
                return i
        return -1

    def _question(self, message: Message) -> str:
        """Returns the text that distinguishes a question from a tool result."""
        parts = ensure_list(message["content"])
        return "".join(part.get("text", AROUND_IMAGE[0]) for part in parts)

    def _render_answer(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        keeps = ctx.in_last_assistant_turn or not self.strip_thinking_from_history
        thinking, text = self._split_thinking(message, keeps)
        # Quirk of the template: of the last turn only the last answer has an empty block.
        has_block = ctx.is_last or bool(thinking) or self._compact_thinking_every > 0
        in_turn = ctx.in_last_assistant_turn and has_block
        if in_turn or not self.strip_thinking_from_history:
            # The format sets the line breaks around the block; line breaks of the message are
            # dropped.
            answer = _with_tool_calls(text.lstrip("\n"), message, bool(text))
            return self._answer_after_block(thinking.strip("\n"), answer, ctx)
        text = _with_tool_calls(text, message, bool(text))
        return self._answer(self._begin("assistant", ctx), text)

    def _answer_after_block(self, thinking: str, text: str, ctx: RenderContext) -> RenderedMessage:
        # The prompt ends before the block: the model samples all of it.
        block = f"<think>\n{thinking}\n</think>\n\n"
        return self._answer(self._begin("assistant", ctx), text, block)

    def _split_thinking(self, message: Message, keeps: bool) -> tuple[str, str]:
        return split_thinking(message, keeps)

    def _thinking_of(self, message: Message) -> str:
        return self._split_thinking(message, True)[0]


class ThinkingDisabled(ChatMLBase):
    """Mixin without thinking: the prompt ends with an empty ``<think>`` block.

    Thinking in a trained answer raises RendererError; in history it is dropped.
    """

    _inside = None
    _prompt_opening = _EMPTY_THINKING
    disables_thinking = True

    def _answer_after_block(self, thinking: str, text: str, ctx: RenderContext) -> RenderedMessage:
        # The prompt contains the empty block, so it is header and not trained. A model may think
        # all the same.
        block = f"<think>\n{thinking}\n</think>\n\n" if thinking else ""
        return self._answer(self._begin("assistant", ctx) + _EMPTY_THINKING, text, block)


class Qwen3DisableThinkingRenderer(ThinkingDisabled, Qwen3Renderer):
    """Qwen3 hybrid models without thinking."""

    def _example(
        self, messages: Sequence[Message], trained: Sequence[bool], what: TrainOnWhat
    ) -> Example:
        example = super()._example(messages, trained, what)
        # Without a question the template writes no block, but the prompt has one.
        if any(message["role"] == "user" for message in messages):
            return example
        for i, message in enumerate(messages):
            if trained[i] and message["role"] == "assistant":
                raise RendererError(
                    f"messages[{i}]: got a trained answer and no user message before it, expected "
                    f"one: the chat template then writes no think block, while the prompt of "
                    f"{self._name} has one; add the question"
                )
        return example


def _with_tool_calls(text: str, message: Message, has_text: bool) -> str:
    """Appends tool calls, each on a separate line; ``has_text``: whether there was text before it
    was trimmed."""
    calls = format_tool_calls(message)
    # A line break separates calls from text; without text there is none.
    return text + ("\n" if calls and has_text else "") + "\n".join(calls)


@dataclass(eq=False, repr=False, kw_only=True)
class _WithImages(Qwen3InstructRenderer):
    """Qwen3 with images in messages of users and tools.

    ``max_image_size`` limits the longest side of images in pixels, 0 does not.
    ``merge_text_chunks=False`` encodes the texts of neighbouring parts apart.
    """

    merge_text_chunks: bool = True
    max_image_size: int = 0

    def _allowed_parts(self, role: Role) -> frozenset[str]:
        return self._answer_parts | ({"image"} if role in ("user", "tool") else set())

    def _content(self, message: Message, ctx: RenderContext) -> Segments:
        return content_segments(message, ctx.idx, self, AROUND_IMAGE, self.max_image_size)


@dataclass(eq=False, repr=False, kw_only=True)
class Qwen25VLRenderer(ChatMLBase):
    """Qwen2.5-VL: ChatML with images and a default system prompt, without tools.

    ``max_image_size`` limits the longest side of images in pixels, 0 does not.
    """

    max_image_size: int = 0

    _context_parts = TEXT_AND_IMAGES
    _history_as_sampled = True
    _inserted_system = "You are a helpful assistant."

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns header, text and images, and ``<|im_end|>``."""
        header = self._begin(message["role"], ctx)
        if message["role"] == "assistant":
            return self._answer(header, text_of(message, ctx.idx, self._name))
        self._check(message, ctx.idx)
        segments = content_segments(message, ctx.idx, self, AROUND_IMAGE, self.max_image_size)
        return self._context(header, *segments)


class Qwen3VLInstructRenderer(_WithImages):
    """Qwen3-VL-*-Instruct: tools and images, no thinking; a system message only at the start."""

    _system_only_first = True


class Qwen3VLRenderer(_WithImages, Qwen3Renderer):
    """Qwen3-VL-*-Thinking: tools, images and thinking."""

    _inside = THINKING
    _prompt_opening = "<think>\n"

    def _answer_after_block(self, thinking: str, text: str, ctx: RenderContext) -> RenderedMessage:
        header = self._begin("assistant", ctx)
        if not (thinking or ctx.is_last):
            # The line breaks of an empty block merge into one token in history.
            return self._answer(header + _EMPTY_THINKING, text)
        # The prompt opens the block, so training begins inside it.
        return self._answer(header + "<think>\n", text, f"{thinking}\n</think>\n\n")
