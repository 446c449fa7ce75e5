"""DeepSeek V3.1: ``<｜User｜>`` text ``<｜Assistant｜>`` text ``<｜end▁of▁sentence｜>``.

``deepseekv3`` is told not to think: the answer follows ``<｜Assistant｜></think>``, in history as
in prompts. ``deepseekv3_thinking`` opens the prompt with ``<think>``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.core.answer_form import CallForm
from tinker_cookbook.renderers.core.arguments import arguments_text, to_json
from tinker_cookbook.renderers.core.blocks import Block
from tinker_cookbook.renderers.core.checks import TEXT_AND_THINKING
from tinker_cookbook.renderers.core.messages import (
    END_THINK,
    THINK,
    Message,
    ToolCall,
    ToolSpec,
    ensure_text,
    get_text_content,
    system_message,
)
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage
from tinker_cookbook.renderers.core.thinking import LeadingThinking, thinking_and_rest
from tinker_cookbook.renderers.core.tool_calls import (
    as_openai_tool,
    json_before,
    json_end,
    read_calls_in_row,
    tool_call,
)
from tinker_cookbook.tokenizer_utils import Tokenizer

BOS, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_RESULT, _END_RESULT = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
_INSTRUCTIONS = (
    f"IMPORTANT: ALWAYS adhere to this exact format for tool use:\n{CALLS}{_CALL}tool_call_name"
    f"{_SEPARATOR}tool_call_arguments{_END_CALL}{{{{additional_tool_calls}}}}{END_CALLS}\n\nWhere:\n\n"
    "- `tool_call_name` must be an exact match to one of the available tools\n"
    "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters "
    "Schema\n- For multiple tool calls, chain them directly without separators or spaces"
)
_READ_CALL = re.compile(
    f"{re.escape(_CALL)}([^<\\n]+){re.escape(_SEPARATOR)}({json_before(_END_CALL)})"
    f"{re.escape(_END_CALL)}",
    re.DOTALL,
)


def _read_calls(body: str) -> list[ToolCall]:
    """Returns the calls of a block; raises ValueError for anything else."""

    def call_of(found: re.Match[str]) -> ToolCall:
        return tool_call(found[1], arguments_text(found[2]))

    return read_calls_in_row(body, _READ_CALL, call_of)


_CALLS_BLOCK = Block(CALLS, END_CALLS, read=_read_calls, find_end=json_end(END_CALLS))
_THINKING = Block(THINK, END_THINK)


class DeepSeekV3Renderer(LeadingThinking):
    """DeepSeek V3.1 without thinking.

    Thinking is dropped, in the last turn with a warning. In text without tool calls, text before
    ``</think>`` is thinking, as in the template. A system message after other messages raises
    RendererError: the template moves it to the beginning, which changes earlier prompts.
    ``system_role_as_user`` renders it as a user message. Several system messages at the beginning
    are one. The template does not declare tools, so the declaration in the model card is used.
    """

    _encodes_with_codec = True
    stop_token = END
    _bos = BOS
    _special_tokens = (THINK,)
    _answer_parts = TEXT_AND_THINKING
    _declared_tokens = frozenset({CALLS, END_CALLS, _CALL, _END_CALL, _SEPARATOR})
    _roles = ("system", "user", "assistant", "tool")
    _blocks = (_CALLS_BLOCK,)
    _call_form = CallForm(_CALL, _SEPARATOR, _END_CALL, begin=CALLS, end=END_CALLS, marker=CALLS)
    _history_as_sampled = True
    disables_thinking = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        system_role_as_user: bool = False,
        strip_thinking_from_history: bool = True,
        *,
        image_processor: Any = None,
    ) -> None:
        super().__init__(tokenizer, image_processor)
        self.system_role_as_user = system_role_as_user
        self.strip_thinking_from_history = strip_thinking_from_history

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns the tokens of a message; the system message has no header."""
        self._check(message, ctx.idx)
        role = message["role"]
        if role == "system" and ctx.idx:
            raise RendererError(
                f"messages[{ctx.idx}].role: got 'system', expected it before all others: "
                f"{self._name} has no form for it elsewhere; ?system_role_as_user=true writes it "
                "as a question"
            )
        if role == "assistant":
            return self._render_answer(message, ctx)
        header = {"user": USER, "tool": _RESULT}.get(role, "")
        return RenderedMessage(
            header=self.codec.constant(header),
            output=[self.codec.encode(ensure_text(message["content"]))],
            footer=self.codec.constant(_END_RESULT) if role == "tool" else (),
        )

    def _declare_tools(self, tools: Sequence[ToolSpec], system_prompt: str) -> list[Message]:
        """Declares tools after the system prompt, as in the model card."""
        if not tools:
            return system_message(system_prompt)
        declared = ""
        for tool in tools:
            function = as_openai_tool(tool)["function"]
            declared += (
                f"### {function['name']}\nDescription: {function.get('description', '')}\n\n"
                f"Parameters: {to_json(function['parameters'])}\n\n"
            )
        title = "## Tools\nYou have access to the following tools:"
        text = f"{system_prompt}\n\n{title}\n\n{declared}{_INSTRUCTIONS}"
        return [Message(role="system", content=text)]

    def _normalize(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        normal: list[Message] = []
        for i, message in enumerate(super()._normalize(messages)):
            if message["role"] != "system" or not i:
                normal.append(message)
            # The template joins system messages, so they are encoded in one piece.
            elif normal[-1]["role"] == "system" and not self.system_role_as_user:
                texts = [ensure_text(one["content"]) for one in (normal[-1], message)]
                normal[-1] = Message(**{**normal[-1], "content": "\n\n".join(texts)})
            # A system message at the beginning has a form; only later ones become questions.
            else:
                role = "user" if self.system_role_as_user else "system"
                normal.append(Message(**{**message, "role": role}))
        return normal

    def _render_answer(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        strips, calls = self.strip_thinking_from_history, message.get("tool_calls", [])
        keeps = not self.disables_thinking and (ctx.in_last_assistant_turn or not strips)
        given, text = thinking_and_rest(message, keeps)
        thinking = given or ""
        # In text without calls and results, the template treats everything before a tag as
        # thinking; not if a thinking part follows the text.
        plain = not calls and ctx.prev_role != "tool" and text == get_text_content(message)
        if plain and END_THINK in text:
            before, _, text = text.partition(END_THINK)
            thinking += before.removeprefix(THINK)
        # The template closes thinking before a call in history.
        writes = keeps and (bool(thinking) or ctx.is_last or not (strips and calls))
        # Thinking belongs to the block that the prompt has opened. After tool results the prompt
        # opens none: then both tags are text.
        header = ""
        if ctx.prev_role == "user":
            # The prompt contains the opening of the block, so it is header and not trained.
            header = ASSISTANT + (THINK if writes else END_THINK)
            text = f"{thinking}{END_THINK}{text}" if writes else text
        elif thinking and writes:
            text = f"{THINK}{thinking}{END_THINK}{text}"
        if thinking and self.disables_thinking and ctx.in_last_assistant_turn:
            self._warn_once(
                f"{self._name}: the thinking of an answer is left out, because the prompt closes "
                "it before the answer begins; to train on it, use deepseekv3_thinking"
            )
        written = "".join(
            f"{_CALL}{call.function.name}{_SEPARATOR}{call.function.arguments}{_END_CALL}"
            for call in calls
        )
        text += f"{CALLS}{written}{END_CALLS}" if written else ""
        # Unparsed calls are verbatim, because the model sampled them.
        text += "".join(call.raw_text for call in message.get("unparsed_tool_calls", []))
        # The stop token is sampled, so it is trained with the answer.
        return RenderedMessage(
            header=self.codec.constant(header), output=[self.codec.encode(text + END)]
        )

    def _thinking_of(self, message: Message) -> str:
        return ""  # without thinking, that of a trained answer is left out with a warning


class DeepSeekV3ThinkingRenderer(DeepSeekV3Renderer):
    """DeepSeek V3.1 with thinking.

    An answer of the last turn follows ``<｜Assistant｜><think>``, as it is sampled; the template
    renders every answer as history. ``strip_thinking_from_history=False`` renders all answers like
    that, so that the extension property holds. Prompts after tool results open no thinking block;
    thinking there is written between both tags before the text.
    """

    _blocks = (_THINKING, _CALLS_BLOCK)
    _inside = _THINKING
    _history_as_sampled = False
    disables_thinking = False


DeepSeekV3DisableThinkingRenderer = DeepSeekV3Renderer
