"""DeepSeek V4.1: messages of V3.1, with a system token, a reasoning effort, and DSML calls.

Prompts with thinking begin with ``<｜System｜>`` and the effort, also without system message. Tool
results and user messages that follow each other are one turn of the user, with blank lines between
them, and results in the order of the calls. Answers before the last turn of the user lose their
thinking, unless tools are declared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.core.answer_form import AnswerForm, ArgumentForm, CallForm
from tinker_cookbook.renderers.core.arguments import arguments_text, read_json, to_json
from tinker_cookbook.renderers.core.blocks import Block
from tinker_cookbook.renderers.core.checks import TEXT_AND_THINKING
from tinker_cookbook.renderers.core.messages import (
    END_THINK,
    THINK,
    Message,
    ToolCall,
    ToolSpec,
    ensure_text,
    system_message,
)
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage
from tinker_cookbook.renderers.core.thinking import LeadingThinking, thinking_and_rest
from tinker_cookbook.renderers.core.tool_calls import (
    as_openai_tool,
    calls_with_arguments,
    read_calls_in_row,
    results_in_call_order,
    tags_end,
    tool_call,
)
from tinker_cookbook.renderers.deepseek_v3 import ASSISTANT, BOS, END, USER

_SYSTEM = "<｜System｜>"
_DECLARE = "tool_declare"
_USER_TURN = ("user", "tool")
_MARK = "｜DSML｜"
_CALLS, _END_CALLS = f"<{_MARK} calls>", f"</{_MARK} calls>"
_INVOKE, _END_INVOKE = f"<{_MARK} invoke", f"</{_MARK} invoke>"
_PARAMETER, _END_PARAMETER = f"<{_MARK} parameter", f"</{_MARK} parameter>"
_READ_INVOKE = re.compile(
    rf'\s*+{_INVOKE} name="([^"\n]++)">\s*+(.*?){_END_INVOKE}\s*+', flags=re.DOTALL
)
_READ_PARAMETER = re.compile(
    rf'{_PARAMETER} name="(?P<name>[^"\n]*)" string="(?P<kind>true|false)">'
    rf"(?P<value>.*?){_END_PARAMETER}\s*",
    flags=re.DOTALL,
)


def read_dsml(body: str) -> list[ToolCall]:
    """Returns the calls of a block; raises ValueError for anything else."""

    def call_of(found: re.Match[str]) -> ToolCall:
        spelled, text, at = [], found[2], 0
        while at < len(text):
            parameter = _READ_PARAMETER.match(text, at)
            if parameter is None:
                raise ValueError(f"got {text[at : at + 80]!r}, expected a parameter")
            value, name = parameter["value"], to_json(parameter["name"])
            # In the markup strings are bare; the arguments of a call are JSON.
            if parameter["kind"] == "true":
                value = to_json(value)
            # Not parsed and dumped: the call must render to the sampled tokens.
            spelled.append(f"{name}: {value}")
            at = parameter.end()
        arguments = arguments_text(f"{{{', '.join(spelled)}}}")
        # JSON keeps the last of equal names, and a bare value may contain a comma and a name.
        if len(read_json(arguments)) != len(spelled):
            raise ValueError("got a parameter twice, or two values in one, expected each once")
        return tool_call(found[1], arguments)

    return read_calls_in_row(body, _READ_INVOKE, call_of)


def _written_calls(message: Message, idx: int) -> str:
    """Returns the calls of a message with the blank line before them; ``idx`` is the index of the
    message, for errors."""
    written = ""
    for call, arguments in calls_with_arguments(message, idx):
        written += f'{_INVOKE} name="{call.function.name}">\n' + ("" if arguments else "\n")
        for name, value, spelled in _spelled(call.function.arguments, len(arguments)):
            is_string = isinstance(value, str)
            written += (
                f'{_PARAMETER} name="{name}" string="{str(is_string).lower()}">'
                f"{value if is_string else spelled}{_END_PARAMETER}\n"
            )
        written += f"{_END_INVOKE}\n"
    blocks = [f"{_CALLS}\n{written}{_END_CALLS}"] if written else []
    # Unparsed calls are verbatim, because the model sampled them.
    blocks += [call.raw_text for call in message.get("unparsed_tool_calls", [])]
    return "".join(f"\n\n{block}" for block in blocks)


def _spelled(arguments: str, count: int) -> Iterator[tuple[str, Any, str]]:
    """Yields name, value and verbatim JSON of ``count`` arguments."""
    # json.loads would lose the spelling of numbers and the white space.
    decoder, rest = json.JSONDecoder(), arguments.partition("{")[2]
    for _ in range(count):
        rest = rest.lstrip(" \t\r\n,")
        name, end = decoder.raw_decode(rest)
        rest = rest[end:].lstrip(" \t\r\n:")
        value, end = decoder.raw_decode(rest)
        yield name, value, rest[:end]
        rest = rest[end:]


_CALLS_BLOCK = Block(
    _CALLS,
    _END_CALLS,
    read=read_dsml,
    before=("\n\n",),  # the blank line before calls belongs to the format
    find_end=tags_end(_END_CALLS, (f"{_INVOKE} ", _END_INVOKE), (f"{_PARAMETER} ", _END_PARAMETER)),
)
_CALL_FORM = CallForm(
    before=f'{_INVOKE} name="',
    between='">\n',
    call_id="/\\n?/",  # the empty line in a call without arguments
    after=f"{_END_INVOKE}\n",
    begin=f"{_CALLS}\n",
    end=_END_CALLS,
    arguments=ArgumentForm(
        before=f'{_PARAMETER} name="',
        between='" string="false">',
        after=f"{_END_PARAMETER}\n",
        marks=(f"</{_MARK}",),
        string_between='" string="true">',
    ),
    marker=_CALLS,
)
_THINKING = Block(THINK, END_THINK)
_DECLARATION = (
    "## Tools\n\nYou have access to a set of tools to help answer the user's question. You can "
    f'invoke tools by writing a "{_CALLS}" block like the following:\n\n{_CALLS}\n'
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
    _blocks = (_THINKING, _CALLS_BLOCK)
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
        body += _written_calls(message, ctx.idx) + END
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
