"""Kimi K2: ``<|im_user|>user<|im_middle|>`` text ``<|im_end|>``, and the same for other roles.

``kimi_k2`` is K2 Thinking, ``kimi_k2_instruct`` K2 Instruct. The id of a call has its function and
its number in the conversation, ``functions.search:0``; a result names the id of its call. Tools are
declared in a message of role ``tool_declare`` before the system message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from tinker_cookbook.renderers.core.answer_form import CallForm
from tinker_cookbook.renderers.core.arguments import arguments_text, to_json
from tinker_cookbook.renderers.core.blocks import Block
from tinker_cookbook.renderers.core.checks import TEXT_AND_THINKING
from tinker_cookbook.renderers.core.images import Segments, encode_segments
from tinker_cookbook.renderers.core.messages import (
    Message,
    Role,
    ToolCall,
    ToolSpec,
    get_text_content,
    system_message,
)
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage
from tinker_cookbook.renderers.core.renderer import Renderer
from tinker_cookbook.renderers.core.thinking import LeadingThinking, thinking_and_rest
from tinker_cookbook.renderers.core.tool_calls import (
    as_openai_tool,
    json_before,
    json_end,
    read_calls_in_row,
    tool_call,
)

KIMI_SYSTEM_PROMPT = "You are Kimi, an AI assistant created by Moonshot AI."
_MIDDLE, _END = "<|im_middle|>", "<|im_end|>"
_CALLS, _END_CALLS = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _END_CALL = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
DECLARE = "tool_declare"
_READ_CALL = re.compile(
    rf"\s*{re.escape(_CALL)}\s*(?P<id>(?:functions\.)?(?P<name>[^<\n]+):\d+)\s*"
    rf"{re.escape(_ARGUMENTS)}(?P<arguments>{json_before(_END_CALL)}){re.escape(_END_CALL)}\s*",
    flags=re.DOTALL,
)
KIMI_THINKING = Block("<think>", "</think>")


def _read_calls(body: str) -> list[ToolCall]:
    """Returns the calls of a section; raises ValueError for anything else."""

    def call_of(found: re.Match[str]) -> ToolCall:
        return tool_call(found["name"], arguments_text(found["arguments"]), found["id"])

    expected = "a call with an id such as functions.search:0"
    return read_calls_in_row(body, _READ_CALL, call_of, expected)


KIMI_CALLS = Block(_CALLS, _END_CALLS, read=_read_calls, find_end=json_end(_END_CALLS))
"""Section of calls."""


@dataclass(eq=False, repr=False, kw_only=True)
class KimiK2InstructRenderer(Renderer):
    """Kimi K2 Instruct: tools, no thinking.

    ``default_system`` is inserted where a conversation does not begin with a system message; ``""``
    inserts none. A message's ``name`` replaces its role in the header, as in the template.

    Calls are numbered through the conversation. A call keeps its id if that has the format's form
    (the model sampled it), and a result with its ``tool_call_id`` belongs to it; the template
    always renumbers, and assigns results by order.
    """

    default_system: str = KIMI_SYSTEM_PROMPT

    DEFAULT_SYSTEM_PROMPT: ClassVar[str] = KIMI_SYSTEM_PROMPT
    _encodes_with_codec = True
    stop_token = _END
    _special_tokens = (_MIDDLE,)
    _history_as_sampled = True
    _blocks = (KIMI_CALLS,)
    _call_form = CallForm(
        before=f"{_CALL}functions.",
        number="/:[0-9]{1,4}/",
        between=_ARGUMENTS,
        after=_END_CALL,
        begin=_CALLS,
        end=_END_CALLS,
        marker=_CALLS,
    )
    _tools_json = staticmethod(to_json)
    _after_default = "\n"
    """Text after the default system message."""

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns the tokens of one message; rendered alone, its call ids count from 0."""
        return self._render(message, ctx, _call_ids([message])[0])

    def _declare_tools(self, tools: Sequence[ToolSpec], system_prompt: str) -> list[Message]:
        """Declares tools in a separate message, as the template does with ``tools=``."""
        declared = self._tools_json([as_openai_tool(tool) for tool in tools])
        messages = [Message(role=DECLARE, content=declared)] if tools else []
        return messages + system_message(system_prompt)

    def _header(self, role: Role, name: str = "") -> str:
        # Roles other than user and assistant have the header <|im_system|>.
        kind = role if role in ("user", "assistant") else "system"
        return f"<|im_{kind}|>{name or role}{_MIDDLE}"

    def _conversation_prefix(self, messages: Sequence[Message]) -> list[int]:
        begins = messages and messages[0]["role"] in ("system", DECLARE)
        return [] if begins else self._default_tokens()

    def _default_tokens(self) -> list[int]:
        if not self.default_system:
            return []
        header = self._header("system")
        return self.codec.constant(f"{header}{self.default_system}{_END}{self._after_default}")

    def _render_all(self, messages: Sequence[Message]) -> list[RenderedMessage]:
        # Ids depend only on earlier messages, so messages can be cached with them.
        ids = _call_ids(messages)
        return self._render_cache.render_all(
            lambda message, ctx: self._render(message, ctx, ids[ctx.idx]),
            messages,
            self._history_end(messages),
        )

    def _render(self, message: Message, ctx: RenderContext, ids: Sequence[str]) -> RenderedMessage:
        self._check(message, ctx.idx)
        role = message["role"]
        header = self._header(role, message.get("name", ""))
        if role == "assistant":
            text = self._thinking_and_text(message, ctx)
            calls = "".join(
                f"{_CALL}{call_id}{_ARGUMENTS}{call.function.arguments}{_END_CALL}"
                for call_id, call in zip(ids, message.get("tool_calls", []), strict=True)
            )
            text += f"{_CALLS}{calls}{_END_CALLS}" if calls else ""
            # Unparsed calls are verbatim, because the model sampled them.
            text += "".join(call.raw_text for call in message.get("unparsed_tool_calls", []))
            # The prompt has the beginning of the thinking block.
            header += self._prompt_opening
            segments: Segments = [text.removeprefix(self._prompt_opening)]
        else:
            # As in the template, the text of a result begins with the id of its call.
            result = f"## Return of {ids[0]}\n" if role == "tool" else ""
            segments = [result, *self._segments(message, ctx.idx)]
        # The template inserts the default system message after a declaration of tools too.
        alone = ctx.idx == 0 and role == DECLARE and ctx.next_role != "system"
        return RenderedMessage(
            header=self.codec.constant(header),
            output=encode_segments([*segments, _END], self.codec.encode),
            footer=self._default_tokens() if alone else [],
        )

    def _segments(self, message: Message, idx: int) -> Segments:
        """Returns the content of a message that the model only reads."""
        return [get_text_content(message)]

    def _thinking_and_text(self, message: Message, ctx: RenderContext) -> str:
        """Returns an answer without its calls."""
        return get_text_content(message)


@dataclass(eq=False, repr=False, kw_only=True)
class KimiK2Renderer(LeadingThinking, KimiK2InstructRenderer):
    """Kimi K2 Thinking: every answer begins with a ``<think>`` block, which the model writes.

    The blocks are emptied up to the last answer without tool calls: a chain of calls and results
    keeps its thinking until it is answered. The answer at the end of a supervised example keeps its
    thinking and the thinking of the chain before it, as at inference; the template empties both.
    ``strip_thinking_from_history=False`` keeps all thinking: then the extension property holds.
    """

    strip_thinking_from_history: bool = True

    _history_as_sampled = False
    _answer_parts = TEXT_AND_THINKING
    _blocks = (KIMI_THINKING, KIMI_CALLS)
    # The tokenizer's own apply_chat_template sorts declarations, and writes no white space.
    _tools_json = staticmethod(
        partial(json.dumps, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    )
    _after_default = ""

    def _last_user_index(self, messages: Sequence[Message]) -> int:
        """Returns the last answer without tool calls, up to which thinking is history; the last
        message does not count, because it has just been sampled."""
        answers = (
            i
            for i, m in enumerate(messages[:-1])
            if m["role"] == "assistant"
            and not (m.get("tool_calls") or m.get("unparsed_tool_calls"))
        )
        return max(answers, default=-1)

    def _thinking_and_text(self, message: Message, ctx: RenderContext) -> str:
        keeps = ctx.in_last_assistant_turn or not self.strip_thinking_from_history
        thinking, text = thinking_and_rest(message, keeps)
        # Where thinking is removed, the empty block stays.
        thinking = thinking if thinking and keeps else ""
        return f"{KIMI_THINKING.opening}{thinking}{KIMI_THINKING.closing}{text}"


def _call_ids(messages: Sequence[Message]) -> list[list[str]]:
    """Returns the ids in each message: the ids of its calls, or the id of its result."""
    waiting: list[tuple[str | None, str]] = []  # calls without a result: given id, written id
    ids: list[list[str]] = []
    count = 0
    for message in messages:
        written: list[str] = []
        for call in message.get("tool_calls", []) if message["role"] == "assistant" else []:
            given, name = call.id or "", call.function.name
            # An id in the format's form was sampled, so it must render to the same tokens.
            keeps = re.fullmatch(rf"(functions\.)?{re.escape(name)}:\d+", given)
            written.append(given if keeps else f"functions.{name}:{count}")
            waiting.append((call.id, written[-1]))
            count += 1
        if message["role"] == "tool":
            # A result without a known id belongs to the oldest call without a result.
            wanted = message.get("tool_call_id")
            found = (i for i, known in enumerate(waiting) if wanted and wanted in known)
            unknown = f"functions.{message.get('name', 'unknown')}:{count}"
            written.append(waiting.pop(next(found, 0))[1] if waiting else unknown)
        ids.append(written)
    return ids
