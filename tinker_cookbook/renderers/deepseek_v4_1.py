"""DeepSeek V4.1: messages of V3.1, with a system token, a reasoning effort, and DSML calls.

Prompts with thinking begin with ``<｜System｜>`` and the effort, also without system message. Tool
results and user messages that follow each other are one turn of the user, with blank lines between
them, and results in the order of the calls. Answers before the last turn of the user lose their
thinking, unless tools are declared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.core.answer_form import AnswerForm
from tinker_cookbook.renderers.core.arguments import to_json
from tinker_cookbook.renderers.core.blocks import Block
from tinker_cookbook.renderers.core.checks import TEXT_AND_THINKING
from tinker_cookbook.renderers.core.messages import Message, ToolSpec, ensure_text, system_message
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage
from tinker_cookbook.renderers.core.thinking import LeadingThinking, thinking_and_rest
from tinker_cookbook.renderers.core.tool_calls import as_openai_tool, results_in_call_order
from tinker_cookbook.renderers.deepseek_v3 import ASSISTANT, BOS, END, END_THINK, THINK, USER
from tinker_cookbook.renderers.deepseek_v3_2 import Dsml

_SYSTEM = "<｜System｜>"
_DECLARE = "tool_declare"
_USER_TURN = ("user", "tool")
_DSML = Dsml("calls", gap=" ", no_arguments="\n")
(_CALLS, _), _CALL_FORM = _DSML.calls()
_THINKING = Block(THINK, END_THINK)
_DECLARATION = (
    "## Tools\n\nYou have access to a set of tools to help answer the user's question. You can "
    f'invoke tools by writing a "{_DSML.opening}" block like the following:\n\n{_DSML.opening}\n'
    '<｜DSML｜ invoke name="$TOOL_NAME">\n'
    '<｜DSML｜ parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE'
    "</｜DSML｜ parameter>\n...\n</｜DSML｜ invoke>\n"
    '<｜DSML｜ invoke name="$TOOL_NAME2">\n...\n</｜DSML｜ invoke>\n</｜DSML｜ calls>\n\n'
    'String parameters should be specified as is and set `string="true"`. For all other types '
    "(numbers, booleans, arrays, objects), pass the value in JSON format and set "
    f'`string="false"`.\n\nIf thinking_mode is enabled (triggered by {THINK}), you MUST output '
    f"your complete reasoning inside {THINK}...{END_THINK} BEFORE any tool calls or final "
    "response.\n\n"
    f"Otherwise, output directly after {END_THINK} with tool calls or final response.\n\n"
    "### Available Tool Schemas\n\n"
)
_DECLARATION_END = (
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool "
    "calls.\n"
)


@dataclass(eq=False, repr=False, kw_only=True)
class DeepSeekV4_1Renderer(LeadingThinking):  # noqa: N801 - the public name
    """DeepSeek V4.1 with thinking and high reasoning effort.

    ``strip_thinking_from_history=False`` keeps all thinking: then the extension property holds.
    Tools are declared in a message of role ``tool_declare`` behind the system message. Argument
    values of calls are verbatim, where the template dumps them again.
    """

    strip_thinking_from_history: bool = True

    reasoning_effort = 75
    _encodes_with_codec = True
    stop_token = END
    _special_tokens = (USER, ASSISTANT, _SYSTEM, THINK, END_THINK)
    _bos = BOS
    _roles = ("system", _DECLARE, "user", "assistant", "tool")
    _answer_parts = TEXT_AND_THINKING
    _blocks = (_THINKING, _CALLS)
    _inside = _THINKING
    _call_form = _CALL_FORM

    def answer_form(self) -> AnswerForm:
        """Returns the form, in which a blank line precedes calls."""
        return replace(super().answer_form(), leading="\n")

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns the tokens of a message; a turn of the user is in its first message."""
        self._check(message, ctx.idx)
        role = message["role"]
        if role == "assistant":
            return self._render_answer(message, ctx)
        text = ensure_text(message["content"])
        if role in _USER_TURN:
            header = "" if ctx.prev_role in _USER_TURN else USER
        elif ctx.idx == 0:
            # Line breaks around the border may be one token.
            *effort, output = self.codec.encode_after(self._effort, text)
            header = [*self.codec.constant(_SYSTEM), *(t for run in effort for t in run)]
            return RenderedMessage(header=header, output=[output])
        else:
            header = "" if role == _DECLARE else _SYSTEM
        return RenderedMessage(header=self.codec.constant(header), output=[self.codec.encode(text)])

    def _render_answer(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        keeps = not self.disables_thinking and ctx.idx > ctx.last_user_index
        thinking, text = thinking_and_rest(message, keeps)
        # The first system message and another answer are no turn that opens an answer.
        opens = ctx.prev_role in _USER_TURN or (ctx.prev_role == "system" and ctx.idx > 1)
        header = ASSISTANT + (THINK if keeps else END_THINK) if opens else ""
        body = (f"{thinking or ''}{END_THINK}" if keeps else "") + text
        body += _DSML.write(message, ctx.idx) + END
        return RenderedMessage(header=self.codec.constant(header), output=[self.codec.encode(body)])

    @property
    def _effort(self) -> str:
        if self.disables_thinking:
            return ""
        return (
            f"Reasoning Effort: {self.reasoning_effort} (range 1-100, the higher the value, the "
            "more thorough the reasoning)\n\n"
        )

    def _conversation_prefix(self, messages: Sequence[Message]) -> list[int]:
        # A system message, or a declaration of tools, writes the effort itself.
        if not self._effort or (messages and messages[0]["role"] in ("system", _DECLARE)):
            return []
        return self.codec.constant(_SYSTEM + self._effort)

    def _last_user_index(self, messages: Sequence[Message]) -> int:
        roles = [message["role"] for message in messages]
        if _DECLARE in roles or not self.strip_thinking_from_history:
            return -1
        turns = (i for i, r in enumerate(roles) if r in _USER_TURN or (r == "system" and i))
        return max(turns, default=-1)

    def _declare_tools(self, tools: Sequence[ToolSpec], system_prompt: str) -> list[Message]:
        """Returns the system prompt, and a message with the tools as JSON."""
        declared = to_json([as_openai_tool(tool) for tool in tools])
        declaration = [Message(role=_DECLARE, content=declared)] if tools else []
        return [*system_message(system_prompt), *declaration]

    def _normalize(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Joins turns of the user in their first message, and system prompt and tools; the other
        messages of a turn become empty, so that each keeps its index."""
        normal = super()._normalize(messages)
        joined = results_in_call_order(normal, _USER_TURN, known_only=False)
        start = 0
        for i, message in enumerate(joined):
            role, text = message["role"], message["content"]
            if role == _DECLARE:
                self._declare(joined, i)
            if role not in _USER_TURN:
                start = i + 1
                continue
            text = ensure_text(text)
            text = f"<tool_result>{text}</tool_result>" if role == "tool" else text
            if start < i:
                before = ensure_text(joined[start]["content"])
                joined[start] = Message(**{**joined[start], "content": f"{before}\n\n{text}"})
                text = ""
            joined[i] = Message(**{**message, "content": text})
        return joined

    def _declare(self, messages: list[Message], idx: int) -> None:
        """Writes the declaration of tools at ``idx`` into the first message."""
        if idx > 1 or (idx == 1 and messages[0]["role"] != "system"):
            raise RendererError(
                f"messages[{idx}].role: got {_DECLARE!r}, expected it first or behind the first "
                "system message, as create_conversation_prefix_with_tools returns it"
            )
        content = messages[idx]["content"]
        try:
            functions = [tool["function"] for tool in json.loads(ensure_text(content))]
        except (KeyError, TypeError, ValueError) as error:
            raise RendererError(
                f"messages[{idx}].content: got {content!r:.200}, expected a JSON list of tools, as "
                "create_conversation_prefix_with_tools returns it"
            ) from error
        system = ensure_text(messages[0]["content"]) if idx else ""
        schemas = "\n".join(map(to_json, functions))
        text = f"{system}\n\n{_DECLARATION}{schemas}{_DECLARATION_END}"
        messages[idx] = Message(role=_DECLARE, content="")
        messages[0] = Message(**{**messages[0], "content": text})


class DeepSeekV4_1LowReasoningRenderer(DeepSeekV4_1Renderer):  # noqa: N801 - the public name
    """DeepSeek V4.1 with low reasoning effort."""

    reasoning_effort = 50


class DeepSeekV4_1MaxReasoningRenderer(DeepSeekV4_1Renderer):  # noqa: N801 - the public name
    """DeepSeek V4.1 with the maximum reasoning effort."""

    reasoning_effort = 100


class DeepSeekV4_1DisableThinkingRenderer(DeepSeekV4_1Renderer):  # noqa: N801 - the public name
    """DeepSeek V4.1 without thinking: prompts close it, and state no effort.

    Thinking in a trained answer raises RendererError; in history it is dropped.
    """

    reasoning_effort = None
    _inside = None
    disables_thinking = True
    _history_as_sampled = True
