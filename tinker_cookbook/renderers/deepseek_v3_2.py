"""DeepSeek V3.2: messages of V3.1, tools in DSML markup, and thinking between tool results.

A call is ``<｜DSML｜invoke name="…">`` with a ``<｜DSML｜parameter …>`` for each argument: strings
are bare, other values JSON. Results are between ``<function_results>`` tags; in the last turn the
model thinks again after them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tinker_cookbook.renderers.core.answer_form import AnswerForm, ArgumentForm, CallForm
from tinker_cookbook.renderers.core.arguments import arguments_text, read_json, to_json
from tinker_cookbook.renderers.core.blocks import Block
from tinker_cookbook.renderers.core.messages import Message, ToolCall, ToolSpec, system_message
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage
from tinker_cookbook.renderers.core.tool_calls import (
    as_openai_tool,
    calls_with_arguments,
    read_calls_in_row,
    tags_end,
    tool_call,
)
from tinker_cookbook.renderers.deepseek_v3 import (
    ASSISTANT,
    END_THINK,
    THINK,
    Calls,
    DeepSeekV3Renderer,
    Version,
)
from tinker_cookbook.tokenizer_utils import Tokenizer

_MARK = "｜DSML｜"


@dataclass(frozen=True)
class Dsml:
    """Markup of tool calls: ``block`` is the tag around all calls of an answer."""

    block: str
    gap: str = ""  # before the name of each tag
    no_arguments: str = ""  # in a call without arguments

    @cached_property
    def _tags(self) -> dict[str, tuple[str, str]]:
        # The beginning of the opening tag, which may have attributes, and the closing tag.
        mark, names = f"{_MARK}{self.gap}", (self.block, "invoke", "parameter")
        return {name: (f"<{mark}{name}", f"</{mark}{name}>") for name in names}

    @cached_property
    def opening(self) -> str:
        """The tag that begins the calls of an answer."""
        return f"{self._tags[self.block][0]}>"

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        (invoke, end_invoke), (parameter, end) = self._tags["invoke"], self._tags["parameter"]
        return (
            re.compile(
                rf'\s*+{invoke} name="([^"\n]++)">\s*+(.*?){end_invoke}\s*+', flags=re.DOTALL
            ),
            re.compile(
                rf'{parameter} name="(?P<name>[^"\n]*)" string="(?P<kind>true|false)">'
                rf"(?P<value>.*?){end}\s*",
                flags=re.DOTALL,
            ),
        )

    def read(self, body: str) -> list[ToolCall]:
        """Returns the calls of a block; raises ValueError for anything else."""
        invoke, parameter_pattern = self._patterns

        def call_of(found: re.Match[str]) -> ToolCall:
            spelled, text, at = [], found[2], 0
            while at < len(text):
                parameter = parameter_pattern.match(text, at)
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

        return read_calls_in_row(body, invoke, call_of)

    def write(self, message: Message, idx: int) -> str:
        """Returns the calls of a message with the blank line before them; ``idx`` is the index of
        the message, for errors."""
        (invoke, end_invoke), (parameter, end) = self._tags["invoke"], self._tags["parameter"]
        written = ""
        for call, arguments in calls_with_arguments(message, idx):
            written += f'{invoke} name="{call.function.name}">\n'
            written += "" if arguments else self.no_arguments
            for name, value, spelled in _spelled(call.function.arguments, len(arguments)):
                is_string = isinstance(value, str)
                written += (
                    f'{parameter} name="{name}" string="{str(is_string).lower()}">'
                    f"{value if is_string else spelled}{end}\n"
                )
            written += f"{end_invoke}\n"
        blocks = [f"{self.opening}\n{written}{self._tags[self.block][1]}"] if written else []
        # Unparsed calls are verbatim, because the model sampled them.
        blocks += [call.raw_text for call in message.get("unparsed_tool_calls", [])]
        return "".join(f"\n\n{block}" for block in blocks)

    def calls(self) -> tuple[Calls, CallForm]:
        """Returns the form of the calls."""
        (invoke, end_invoke), (parameter, end) = self._tags["invoke"], self._tags["parameter"]
        closing = self._tags[self.block][1]
        form = CallForm(
            before=f'{invoke} name="',
            between='">\n',
            after=f"{end_invoke}\n",
            begin=f"{self.opening}\n",
            end=closing,
            arguments=ArgumentForm(
                before=f'{parameter} name="',
                between='" string="false">',
                after=f"{end}\n",
                marks=(f"</{_MARK}",),
                string_between='" string="true">',
            ),
            marker=self.opening,
        )
        block = Block(
            self.opening,
            closing,
            read=self.read,
            before=("\n\n",),  # the blank line before calls belongs to the format
            find_end=tags_end(closing, (f"{invoke} ", end_invoke), (f"{parameter} ", end)),
        )
        return (block, self.write), form


_DSML = Dsml("function_calls")
_CALLS, _END_CALLS = f"<{_MARK}function_calls>", f"</{_MARK}function_calls>"
_DECLARATION = (
    "## Tools\n\nYou have access to a set of tools you can use to answer the user's question.\n"
    f'You can invoke functions by writing a "{_CALLS}" block like the following as part of your '
    f'reply to the user:\n{_CALLS}\n<{_MARK}invoke name="$FUNCTION_NAME">\n'
    f'<{_MARK}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE'
    f'</{_MARK}parameter>\n...\n</{_MARK}invoke>\n<{_MARK}invoke name="$FUNCTION_NAME2">\n...\n'
    f"</{_MARK}invoke>\n{_END_CALLS}\n\nString and scalar parameters should be specified as is "
    "without any escaping or quotes, while lists and objects should use JSON format. The "
    '"string" attribute should be set to "true" for string type parameters and "false" for other '
    "types (numbers, booleans, arrays, objects).\n\nIf the thinking_mode is enabled, then after "
    "function results you should strongly consider outputting a thinking block. Here is an "
    f"example:\n\n{_CALLS}\n...\n{_END_CALLS}\n\n<function_results>\n...\n</function_results>\n\n"
    f"{THINK}...thinking about results{END_THINK}\n\nHere are the functions available in "
    "JSONSchema format:\n<functions>\n"
)


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


_VERSION = Version(
    *_DSML.calls(),
    # After results the blank line is part of the result: it merges with what it follows.
    openings={"user": ASSISTANT, "tool": ""},
)


class DeepSeekV32Renderer(DeepSeekV3Renderer):
    """DeepSeek V3.2 without thinking.

    Consecutive tool results are opened before the first and closed after the last; the template
    counts the calls before them, and leaves results of another number open. Argument values are
    verbatim, where the template dumps them again.
    """

    _versions = {"3.2": (_VERSION, _VERSION)}  # noqa: RUF012

    def __init__(self, tokenizer: Tokenizer, image_processor: Any = None) -> None:
        super().__init__(tokenizer, image_processor=image_processor, version="3.2")

    def answer_form(self) -> AnswerForm:
        """Returns the form, in which a blank line precedes calls."""
        return replace(super().answer_form(), leading="\n")

    def _declare_tools(self, tools: Sequence[ToolSpec], system_prompt: str) -> list[Message]:
        """Declares tools after the system prompt, as the template does with ``tools=``."""
        if not tools:
            return system_message(system_prompt)
        functions = (as_openai_tool(tool)["function"] for tool in tools)
        declared = "".join(to_json(f) + "\n" for f in functions)
        before = f"{system_prompt}\n\n" if system_prompt else ""
        text = f"{before}{_DECLARATION}{declared}</functions>\n"
        return [Message(role="system", content=text)]

    def _render_result(self, text: str, ctx: RenderContext) -> RenderedMessage:
        opening = "" if ctx.prev_role == "tool" else "\n\n<function_results>\n"
        closing = "\n" if ctx.next_role == "tool" else "\n</function_results>"
        closing += "\n\n" if ctx.next_role == "assistant" else ""
        return RenderedMessage(
            output=[self.codec.encode(f"{opening}<result>{text}</result>{closing}")]
        )


class DeepSeekV32ThinkingRenderer(DeepSeekV32Renderer):
    """DeepSeek V3.2 with thinking, which every answer of the last turn keeps, also between tool
    results; earlier turns lose it.

    ``strip_thinking_from_history=False`` keeps all thinking: then the extension property holds.
    """

    _thinking = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        image_processor: Any = None,
        *,
        strip_thinking_from_history: bool = True,
    ) -> None:
        super().__init__(tokenizer, image_processor)
        self.strip_thinking_from_history = strip_thinking_from_history
