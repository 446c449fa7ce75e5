"""Llama 3: ``<|start_header_id|>role<|end_header_id|>``, a blank line, the text, ``<|eot_id|>``.

Plain dialogue follows the Llama 3 template. Llama 3.1 and 3.2 insert two dates before every system
prompt, one of them today: ``today_date`` writes them with a fixed date, so that a run can be
repeated (the templates' own fallback is ``llama3?today_date=26 Jul 2024``). Tools follow 3.1: one
call in a message, JSON without other text. Text beside a call, and several calls, are written on
separate lines, with a warning.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.renderers.core.checks import check_parts
from tinker_cookbook.renderers.core.messages import (
    Message,
    Role,
    ToolCall,
    ToolSpec,
    ensure_text,
    system_message,
)
from tinker_cookbook.renderers.core.parsing import ContentDelta, MessageReader, special_token_id
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage
from tinker_cookbook.renderers.core.tool_calls import as_openai_tool
from tinker_cookbook.tokenizer_utils import Tokenizer

_BOS, _END = "<|begin_of_text|>", "<|eot_id|>"
_WITH_TOOLS = "Environment: ipython\n"
_TOOLS_INTRODUCTION = (
    "You have access to the following functions. To call a function, please respond with JSON for "
    'a function call.Respond in the format {"name": function name, "parameters": dictionary of '
    "argument name and its value}.Do not use variables.\n\n"
)


class Llama3Renderer(Renderer):
    """Llama 3 dialogue and tool calls, with text trimmed as by the template.

    ``today_date`` adds the date header of Llama 3.1 and 3.2.
    """

    _encodes_with_codec = True
    stop_token = _END
    _history_as_sampled = True  # except for white space around it

    def __init__(
        self, tokenizer: Tokenizer, image_processor: Any = None, *, today_date: str | None = None
    ) -> None:
        super().__init__(tokenizer, image_processor)
        self._bos = special_token_id(tokenizer, _BOS, type(self).__name__)
        self._dates = (
            f"Cutting Knowledge Date: December 2023\nToday Date: {today_date}\n\n"
            if today_date
            else ""
        )

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns header and trimmed text; tool results are JSON strings of role ``ipython``."""
        check_parts(message, ctx.idx, self._name, frozenset({"text"}))
        role = message["role"]
        text = ensure_text(message["content"])
        if message.get("tool_calls") or message.get("unparsed_tool_calls"):
            text = self._tool_call_text(message, text, ctx.idx)
        elif role in ("tool", "ipython"):
            # Quirk of the template: results have role "ipython" and are JSON strings.
            role, text = "ipython", json.dumps(text, ensure_ascii=False)
        elif role == "system" and ctx.idx == 0:
            text = self._system_text(text)
        else:
            text = text.strip()
        return RenderedMessage(
            header=self._generation_suffix(role), output=[self.codec.encode(f"{text}{_END}")]
        )

    def _reader(self) -> MessageReader:
        return _CallOrText()

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
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

    @property
    def _bos_tokens(self) -> list[int]:
        return [self._bos]

    def _conversation_prefix(self, messages: Sequence[Message]) -> list[int]:
        if not self._dates or not messages or messages[0]["role"] == "system":
            return []
        return [*self._generation_suffix("system"), *self.codec.constant(self._dates + _END)]

    def _generation_suffix(self, role: Role) -> list[int]:
        return self.codec.constant(f"<|start_header_id|>{role}<|end_header_id|>\n\n")

    def _system_text(self, text: str) -> str:
        if text.startswith(_WITH_TOOLS):  # the template trims the system prompt alone
            return _WITH_TOOLS + self._dates + text.removeprefix(_WITH_TOOLS)
        return self._dates + text.strip()

    def _tool_call_text(self, message: Message, text: str, idx: int) -> str:
        unparsed = message.get("unparsed_tool_calls", [])
        calls = [
            _call_text(call, f"messages[{idx}].tool_calls[{i}]")
            for i, call in enumerate(message.get("tool_calls", []))
        ]
        calls += [call.raw_text for call in unparsed]
        if len(calls) > 1 or text.strip():
            self._warn_once(
                f"{self._name}: a message has several tool calls, or text next to a call, for "
                "which Llama 3 has no form: they are written one below the other, and read back "
                "as text; qwen3 and others have a form for them"
            )
        return "\n".join([*([text.strip()] if text.strip() else []), *calls])


def _call_text(call: ToolCall, where: str) -> str:
    try:
        arguments = json.loads(call.function.arguments)
    except json.JSONDecodeError as error:
        raise RendererError(
            f"{where}.function.arguments: got {call.function.arguments!r}, expected JSON ({error})"
        ) from error
    parameters = json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": "{call.function.name}", "parameters": {parameters}}}'


class _CallOrText(MessageReader):
    """Parser that buffers a response which may be one JSON object, and so a call."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: str | None = ""  # None once the response is known to be text

    def feed(self, text: str) -> list[ContentDelta]:
        """Returns the text, unless it may be a call."""
        if self._waiting is None:
            return self.add_text(text)
        self._waiting += text
        # White space and an opening brace may begin a call.
        if self._waiting.lstrip()[:1] in ("", "{"):
            return []
        ready, self._waiting = self._waiting, None
        return self.add_text(ready)

    def finish(self) -> list[ContentDelta]:
        """Flushes the buffer: a call, or text."""
        text, self._waiting = self._waiting or "", None
        call = _parse_call(text)
        if call is None:
            return self.add_text(text)
        self.calls.append(call)
        return []


def _parse_call(text: str) -> ToolCall | None:
    if not text.lstrip().startswith("{"):
        return None
    try:
        call = json.loads(text)
    except (json.JSONDecodeError, RecursionError):  # the latter: brackets without end
        return None
    # JSON with other keys is an answer in JSON, not a call.
    if set(call) != {"name", "parameters"} or not isinstance(call["name"], str):
        return None
    arguments = json.dumps(call["parameters"], ensure_ascii=False)
    return ToolCall(function=ToolCall.FunctionBody(name=call["name"], arguments=arguments))
