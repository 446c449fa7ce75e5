"""Llama 3: ``<|start_header_id|>role<|end_header_id|>``, a blank line, the text, ``<|eot_id|>``.

Plain dialogue follows the Llama 3 template. Llama 3.1 and 3.2 insert two dates before every system
prompt, one of them today: ``today_date`` writes them with a fixed date, so that a run can be
repeated (the templates' fallback is ``llama3?today_date=26 Jul 2024``). Tools follow 3.1: one
call in a message, JSON without other text. Text next to a call, and several calls, are written on
separate lines, with a warning.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.renderers.core.answer_form import CallForm
from tinker_cookbook.renderers.core.arguments import arguments_text, to_json
from tinker_cookbook.renderers.core.checks import TEXT, check_parts
from tinker_cookbook.renderers.core.messages import (
    Message,
    Role,
    ToolSpec,
    ensure_text,
    system_message,
)
from tinker_cookbook.renderers.core.parsing import ContentDelta, MessageReader, unread
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage
from tinker_cookbook.renderers.core.renderer import Renderer
from tinker_cookbook.renderers.core.tool_calls import (
    as_openai_tool,
    calls_with_arguments,
    tool_call,
)

_END = "<|eot_id|>"
_END_CALL, _TAG = "<|eom_id|>", "<|python_tag|>"
_BETWEEN = " \t\r\n;"  # characters between calls
_DECODER = json.JSONDecoder()
_WITH_TOOLS = "Environment: ipython\n"
_TOOLS_INTRODUCTION = (
    "You have access to the following functions. To call a function, please respond with JSON for "
    'a function call.Respond in the format {"name": function name, "parameters": dictionary of '
    "argument name and its value}.Do not use variables.\n\n"
)


@dataclass(eq=False, repr=False, kw_only=True)
class Llama3Renderer(Renderer):
    """Llama 3 dialogue and tool calls, with text trimmed as by the template.

    ``today_date`` adds the date header of Llama 3.1 and 3.2.
    """

    today_date: str | None = None

    _encodes_with_codec = True
    stop_token = _END
    _bos = "<|begin_of_text|>"
    _special_tokens = (_bos,)
    _history_as_sampled = True  # except for white space around it
    _call_form = CallForm('{"name": "', '", "parameters": ', "}", separator=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._dates = (
            f"Cutting Knowledge Date: December 2023\nToday Date: {self.today_date}\n\n"
            if self.today_date
            else ""
        )

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns header and trimmed text; tool results are JSON strings of role ``ipython``."""
        check_parts(message, ctx.idx, self._name, TEXT, self.model_name)
        role = message["role"]
        text = ensure_text(message["content"])
        if message.get("tool_calls") or message.get("unparsed_tool_calls"):
            calls = self._written_calls(message, ctx.idx)
            if len(calls) > 1 or text.strip():
                self._warn_once(
                    f"{self._name}: a message has several tool calls, or text next to a call, for "
                    "which Llama 3 has no form: they are written one below the other, and text "
                    "with a call is read back as text; qwen3 and others have a form for them"
                )
            text = "\n".join(part for part in (text.strip(), *calls) if part)
        elif role in ("tool", "ipython"):
            # Quirk of the template: results have role "ipython" and are JSON strings.
            role, text = "ipython", to_json(text)
        elif role == "system" and ctx.idx == 0 and text.startswith(_WITH_TOOLS):
            # With tools, the template trims only the system prompt.
            text = _WITH_TOOLS + self._dates + text.removeprefix(_WITH_TOOLS)
        else:
            # Only the first system message has the dates.
            text = (self._dates if role == "system" and ctx.idx == 0 else "") + text.strip()
        return RenderedMessage(
            header=self.codec.constant(self._header(role)),
            output=[self.codec.encode(f"{text}{_END}")],
        )

    def _written_calls(self, message: Message, idx: int) -> list[str]:
        """Returns the calls as JSON, with arguments dumped again, as in the template."""
        written = [
            f'{{"name": "{call.function.name}", "parameters": {to_json(arguments)}}}'
            for call, arguments in calls_with_arguments(message, idx)
        ]
        return written + [call.raw_text for call in message.get("unparsed_tool_calls", [])]

    def get_stop_sequences(self) -> list[int]:
        """Returns ``<|eot_id|>``, and ``<|eom_id|>``, with which Llama 3.1 ends some calls."""
        end, end_call = self.codec.constant(_END), self.codec.constant(_END_CALL)
        return [*end, *end_call] if len(end_call) == 1 else [*end]

    def _reader(self) -> MessageReader:
        # No token marks a call, so it is known only when the response is complete.
        return _CallsOrText()

    def _declare_tools(self, tools: Sequence[ToolSpec], system_prompt: str) -> list[Message]:
        """Declares tools in the system message, as Llama 3.1's template does with
        ``tools_in_user_message=False``."""
        if not tools:
            return system_message(system_prompt)
        declared = "".join(
            json.dumps(as_openai_tool(tool), indent=4, ensure_ascii=False) + "\n\n"
            for tool in tools
        )
        text = _WITH_TOOLS + _TOOLS_INTRODUCTION + declared + system_prompt.strip()
        return [Message(role="system", content=text)]

    def _conversation_prefix(self, messages: Sequence[Message]) -> list[int]:
        # The template writes the dates even without a system message.
        if not self._dates or (messages and messages[0]["role"] == "system"):
            return []
        return self.codec.constant(self._header("system") + self._dates + _END)

    def _header(self, role: Role) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


class _CallsOrText(MessageReader):
    """Parser that buffers a response which may be JSON objects, and so calls."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: str | None = ""  # None once the response is known to be text

    def feed(self, text: str) -> list[ContentDelta]:
        """Returns the text, unless it may be a call."""
        if self._waiting is None:
            return self.add_text(text)
        self._waiting += text
        # White space, <|python_tag|> and an opening brace may begin a call.
        begun = self._waiting.lstrip()
        if begun[:1] in ("", "{") or (_TAG.startswith(begun) or begun.startswith(_TAG)):
            return []
        ready, self._waiting = self._waiting, None
        return self.add_text(ready)

    def finish(self) -> list[ContentDelta]:
        """Flushes the buffer: calls, or text."""
        text, self._waiting = self._waiting or "", None
        functions = _functions(text)
        if not functions:
            return self.add_text(text)
        try:
            calls = [
                # Rendering dumps the arguments again.
                tool_call(name, arguments_text(given))
                for name, given in functions
            ]
        except ValueError as error:
            self.unparsed.append(unread(text, error))
        else:
            self.calls += calls
        return []


def _functions(text: str) -> list[tuple[str, Any]]:
    """Returns name and arguments of each function that the JSON objects in ``text`` call; nothing
    for other text, such as an answer in JSON."""
    rest = text.strip().removeprefix(_TAG).lstrip()
    functions: list[tuple[str, Any]] = []
    while rest:
        try:
            call, end = _DECODER.raw_decode(rest) if rest.startswith("{") else (None, 0)
        # Besides JSON errors: integers of too many digits, brackets without end.
        except (ValueError, RecursionError):
            return []
        if not isinstance(call, dict) or call.pop("type", "function") != "function":
            return []
        keys = set(call) - {"name"}
        if keys not in ({"parameters"}, {"arguments"}) or not isinstance(call.get("name"), str):
            return []
        functions.append((call["name"], call[keys.pop()]))
        rest = rest[end:].lstrip(_BETWEEN)
    return functions
