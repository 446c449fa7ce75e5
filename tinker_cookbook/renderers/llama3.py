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

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.core.answer_form import CallForm
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
from tinker_cookbook.renderers.core.tool_calls import as_openai_tool, read_json, to_json, tool_call

_END = "<|eot_id|>"
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
        check_parts(message, ctx.idx, self._name, TEXT)
        role = message["role"]
        text = ensure_text(message["content"])
        if message.get("tool_calls") or message.get("unparsed_tool_calls"):
            calls = self._written_calls(message, ctx.idx)
            if len(calls) > 1 or text.strip():
                self._warn_once(
                    f"{self._name}: a message has several tool calls, or text next to a call, for "
                    "which Llama 3 has no form: they are written one below the other, and read "
                    "back as text; qwen3 and others have a form for them"
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
        """Returns the calls as JSON; raises RendererError for arguments that are no JSON."""
        written: list[str] = []
        for i, call in enumerate(message.get("tool_calls", [])):
            arguments = call.function.arguments
            try:
                # Arguments are dumped again, as in the template.
                parameters = to_json(read_json(arguments))
            except ValueError as error:
                raise RendererError(
                    f"messages[{idx}].tool_calls[{i}].function.arguments: got {arguments!r}, "
                    f"expected JSON ({error})"
                ) from error
            written.append(f'{{"name": "{call.function.name}", "parameters": {parameters}}}')
        return written + [call.raw_text for call in message.get("unparsed_tool_calls", [])]

    def _reader(self) -> MessageReader:
        # No token marks a call, so it is known only when the response is complete.
        return _CallOrText()

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
        try:
            call = json.loads(text) if text.lstrip().startswith("{") else None
        # Besides JSON errors: integers of too many digits, brackets without end.
        except (ValueError, RecursionError):
            call = None
        # JSON with other keys is an answer in JSON, not a call.
        if not call or set(call) != {"name", "parameters"} or not isinstance(call["name"], str):
            return self.add_text(text)
        try:
            # Rendering dumps the parameters again, which a lone surrogate does not allow.
            parameters = to_json(read_json(text)["parameters"])
        except ValueError as error:
            self.unparsed.append(unread(text, error))
        else:
            self.calls.append(tool_call(call["name"], parameters))
        return []
