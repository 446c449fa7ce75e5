"""Kimi K2: ``<|im_user|>user<|im_middle|>`` text ``<|im_end|>``, and the same for other roles.

``kimi_k2`` is K2 Thinking, ``kimi_k2_instruct`` K2 Instruct. The id of a call has its function and
its number in the conversation, ``functions.search:0``; a result names the id of its call. Tools are
declared in a message of role ``tool_declare`` before the system message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.renderers.core.blocks import Block, BlockReader
from tinker_cookbook.renderers.core.checks import check_caller, check_parts, leading_thinking
from tinker_cookbook.renderers.core.images import Segment, Segments, encode_segments
from tinker_cookbook.renderers.core.messages import (
    Message,
    Role,
    ToolCall,
    ToolSpec,
    get_text_content,
    system_message,
)
from tinker_cookbook.renderers.core.parsing import MessageReader, special_token_id
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage, contexts
from tinker_cookbook.renderers.core.tool_calls import as_openai_tool, read_calls_in_row
from tinker_cookbook.tokenizer_utils import Tokenizer

KIMI_SYSTEM_PROMPT = "You are Kimi, an AI assistant created by Moonshot AI."
_MIDDLE, _END = "<|im_middle|>", "<|im_end|>"
_OPENINGS = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}
_SYSTEM = "<|im_system|>"
_CALLS, _END_CALLS = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _END_CALL = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
DECLARE = "tool_declare"
_READ_CALL = re.compile(
    rf"\s*{re.escape(_CALL)}\s*(?P<id>functions\.(?P<name>[^<\n]+):\d+)\s*{re.escape(_ARGUMENTS)}"
    rf"(?P<arguments>.*?){re.escape(_END_CALL)}\s*",
    flags=re.DOTALL,
)
KIMI_THINKING = Block("<think>", "</think>")


class KimiK2InstructRenderer(Renderer):
    """Kimi K2 Instruct: tools, no thinking.

    ``default_system`` is inserted where a conversation does not begin with a system message; ``""``
    inserts none. A message's ``name`` replaces its role in the header, as in the template.

    Calls are numbered through the conversation. A call keeps its own id if that has the format's
    form (the model sampled it), and a result with its ``tool_call_id`` belongs to it; the template
    always renumbers, and assigns results by order.
    """

    _encodes_with_codec = True
    stop_token = _END
    _history_as_sampled = True
    _parts = frozenset({"text"})
    _behind_default = "\n"
    _opened = ""
    """Beginning of an answer that stands in the prompt."""
    _context_parts = frozenset({"text"})

    def __init__(
        self,
        tokenizer: Tokenizer,
        image_processor: Any = None,
        *,
        default_system: str = KIMI_SYSTEM_PROMPT,
    ) -> None:
        super().__init__(tokenizer, image_processor)
        special_token_id(tokenizer, _MIDDLE, type(self).__name__)
        self._default_system = default_system

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns the tokens of one message; rendered alone, its call ids count from 0."""
        return self._render(message, ctx, _call_ids([message])[0])

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        """Declares tools in a separate message, as the template does with ``tools=``."""
        declared = json.dumps([as_openai_tool(tool) for tool in tools], ensure_ascii=False)
        messages = [Message(role=DECLARE, content=declared)] if tools else []
        return messages + system_message(system_prompt)

    def _reader(self) -> MessageReader:
        return BlockReader((KIMI_CALLS,))

    def _generation_suffix(self, role: Role) -> list[int]:
        return self.codec.constant(_header(role, role))

    def _conversation_prefix(self, messages: Sequence[Message]) -> list[int]:
        begins = messages and messages[0]["role"] in ("system", DECLARE)
        return [] if begins else self._default_tokens()

    def _default_tokens(self) -> list[int]:
        if not self._default_system:
            return []
        header = _header("system", "system")
        text = f"{header}{self._default_system}{_END}{self._behind_default}"
        return self.codec.constant(text)

    def _render_all(self, messages: Sequence[Message]) -> list[RenderedMessage]:
        placed = contexts(messages, self._last_user_index(messages))
        ids = _call_ids(messages)
        return [self._render(message, ctx, ids[ctx.idx]) for message, ctx in placed]

    def _render(self, message: Message, ctx: RenderContext, ids: Sequence[str]) -> RenderedMessage:
        role = message["role"]
        answers = role == "assistant"
        check_parts(message, ctx.idx, self._name, self._parts if answers else self._context_parts)
        check_caller(message, ctx.idx)
        # Roles other than user and assistant have the header <|im_system|>.
        header = _header(role, message.get("name") or role)
        if answers:
            text = self._thinking_text(message, ctx) + get_text_content(message)
            text += _calls_text(message, ids)
            header += self._opened
            segments: list[Segment] = [text.removeprefix(self._opened)]
        else:
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

    def _thinking_text(self, message: Message, ctx: RenderContext) -> str:
        return ""


class KimiK2Renderer(KimiK2InstructRenderer):
    """Kimi K2 Thinking: every answer begins with a ``<think>`` block, which the model writes.

    The blocks are emptied up to the last answer without tool calls: a chain of calls and results
    keeps its thinking until it is answered. The answer at the end of a supervised example keeps its
    thinking and that of the chain before it, as at inference; the template empties both.
    ``strip_thinking_from_history=False`` keeps all thinking: then the extension property holds.
    """

    _parts = frozenset({"text", "thinking"})
    _behind_default = ""

    def __init__(
        self,
        tokenizer: Tokenizer,
        image_processor: Any = None,
        *,
        default_system: str = KIMI_SYSTEM_PROMPT,
        strip_thinking_from_history: bool = True,
    ) -> None:
        super().__init__(tokenizer, image_processor, default_system=default_system)
        self.strip_thinking_from_history = strip_thinking_from_history

    @property
    def has_extension_property(self) -> bool:
        """True where thinking stays in history."""
        return not self.strip_thinking_from_history

    def _reader(self) -> MessageReader:
        return BlockReader((KIMI_THINKING, KIMI_CALLS))

    def _last_user_index(self, messages: Sequence[Message]) -> int:
        """Returns the last answer without tool calls, up to which thinking is history; the last
        message does not count, because it has just been sampled."""
        answers = (
            i
            for i, message in enumerate(messages[:-1])
            if message["role"] == "assistant" and not _calls(message)
        )
        return max(answers, default=-1)

    def _thinking_text(self, message: Message, ctx: RenderContext) -> str:
        thinking = leading_thinking(message, ctx.idx, self._name) or ""
        keeps = ctx.in_last_assistant_turn or not self.strip_thinking_from_history
        return f"{KIMI_THINKING.opening}{thinking if keeps else ''}{KIMI_THINKING.closing}"


def _header(role: Role, name: str) -> str:
    return f"{_OPENINGS.get(role, _SYSTEM)}{name}{_MIDDLE}"


def _calls(message: Message) -> list[Any]:
    return [*message.get("tool_calls", []), *message.get("unparsed_tool_calls", [])]


def _calls_text(message: Message, ids: Sequence[str]) -> str:
    calls = [
        f"{_CALL}{call_id}{_ARGUMENTS}{call.function.arguments}{_END_CALL}"
        for call_id, call in zip(ids, message.get("tool_calls", []), strict=True)
    ]
    blocks = [f"{_CALLS}{''.join(calls)}{_END_CALLS}"] if calls else []
    return "".join([*blocks, *(c.raw_text for c in message.get("unparsed_tool_calls", []))])


def _call_ids(messages: Sequence[Message]) -> list[list[str]]:
    """Returns the ids in each message: those of its calls, or that of its result."""
    waiting: list[tuple[str | None, str]] = []  # calls without a result: own id, written id
    ids: list[list[str]] = []
    count = 0
    for message in messages:
        written: list[str] = []
        for call in message.get("tool_calls", []) if message["role"] == "assistant" else []:
            own, name = call.id or "", call.function.name
            # An id in the format's form was sampled, so it must render to the same tokens.
            keeps = re.fullmatch(rf"functions\.{re.escape(name)}:\d+", own)
            written.append(own if keeps else f"functions.{name}:{count}")
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


def _read_calls(body: str) -> list[ToolCall]:
    """Returns the calls of a section; raises ValueError for anything else."""
    return read_calls_in_row(
        body, _READ_CALL, _call_of, "a call with an id such as functions.search:0"
    )


def _call_of(found: re.Match[str]) -> ToolCall:
    json.loads(found["arguments"])
    function = ToolCall.FunctionBody(name=found["name"], arguments=found["arguments"])
    return ToolCall(function=function, id=found["id"])


KIMI_CALLS = Block(_CALLS, _END_CALLS, read=_read_calls)
"""Section of calls."""
