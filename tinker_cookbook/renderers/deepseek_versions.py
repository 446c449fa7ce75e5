"""How the versions of DeepSeek V3 write thinking, tool calls and results of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.renderers.core.messages import Message, ToolCall, ToolSpec
from tinker_cookbook.renderers.core.tool_calls import as_openai_tool, read_calls_in_row

THINK, END_THINK = "<think>", "</think>"
CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
RESULT, END_RESULT = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
_CALL, _END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_RESULTS, _END_RESULTS = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
DECLARED = frozenset({CALLS, END_CALLS, _CALL, _END_CALL, _SEPARATOR, "\uff5cDSML\uff5c"})
"""Control tokens that the declarations of tools show to the model."""
_INSTRUCTIONS = (
    f"IMPORTANT: ALWAYS adhere to this exact format for tool use:\n{CALLS}{_CALL}tool_call_name"
    f"{_SEPARATOR}tool_call_arguments{_END_CALL}{{{{additional_tool_calls}}}}{END_CALLS}\n\nWhere:\n\n"
    "- `tool_call_name` must be an exact match to one of the available tools\n"
    "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters "
    "Schema\n- For multiple tool calls, chain them directly without separators or spaces"
)


@dataclass(frozen=True)
class Version:
    """What differs between the versions of the format."""

    think: str
    """Opens the thinking in prompts."""
    end_think: str
    """Between thinking and answer."""
    no_thinking: str
    """Follows the assistant's token where there is no thinking."""
    call: tuple[str, str, str, str] = ("", "", "", "")
    """Before the name, between name and arguments, behind them, between calls."""
    results: tuple[str, str, str] = ("", "", "")
    """Before, between and behind results in a row."""
    opens_after: tuple[str | None, ...] = ("user",)
    """Roles (None: the beginning) after which an answer begins with the assistant's token."""

    def calls_text(self, message: Message) -> str:
        """Returns the calls of a message as text, arguments as they are spelled."""
        before, between, behind, separator = self.call
        calls = [
            f"{before}{call.function.name}{between}{call.function.arguments}{behind}"
            for call in message.get("tool_calls", [])
        ]
        blocks = [f"{CALLS}{separator.join(calls)}{END_CALLS}"] if calls else []
        return "".join([*blocks, *(c.raw_text for c in message.get("unparsed_tool_calls", []))])

    def read_calls(self, body: str) -> list[ToolCall]:
        """Returns the calls that a block says; ValueError where it says anything else."""
        before, between, behind, separator = map(re.escape, self.call)
        pattern = f"{before}([^<\\n]+){between}(.*?){behind}(?:{separator})?"
        return read_calls_in_row(body, re.compile(pattern, re.DOTALL), _call_of)


V3_1 = Version(
    THINK, END_THINK, END_THINK, call=(_CALL, _SEPARATOR, _END_CALL, ""), opens_after=("user",)
)
V3 = Version(
    f"{THINK}\n",
    f"\n{END_THINK}\n\n",
    "",
    call=(f"{_CALL}function{_SEPARATOR}", "\n```json\n", f"\n```{_END_CALL}", "\n"),
    results=(_RESULTS, "\n", _END_RESULTS),
    opens_after=("user", "assistant", "system", None),
)
R1 = Version(V3.think, V3.end_think, "", V3.call, (_RESULTS, "", _END_RESULTS), V3.opens_after)
VERSIONS = {"3.1": (V3_1, V3_1), "3": (V3, R1)}
"""By name: without thinking, and with."""


def _call_of(found: re.Match[str]) -> ToolCall:
    check_arguments(found[2])
    return ToolCall(function=ToolCall.FunctionBody(name=found[1], arguments=found[2]))


def check_arguments(text: str) -> dict[str, Any]:
    """Returns the arguments of a call; ValueError where the text is no JSON object."""
    try:
        arguments = json.loads(text)
    except RecursionError as error:
        raise ValueError("arguments: the JSON is nested too deeply") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments: got {text[:80]!r}, expected a JSON object")
    return arguments


def declare_tools(tools: Sequence[ToolSpec], system_prompt: str) -> str:
    """Returns the system text that declares tools as the model card of V3.1 says."""
    declared = "".join(_declare(as_openai_tool(tool)["function"]) for tool in tools)
    title = "## Tools\nYou have access to the following tools:"
    return f"{system_prompt}\n\n{title}\n\n{declared}{_INSTRUCTIONS}"


def _declare(function: dict[str, Any]) -> str:
    parameters = json.dumps(function["parameters"], ensure_ascii=False)
    description = function.get("description", "")
    return f"### {function['name']}\nDescription: {description}\n\nParameters: {parameters}\n\n"
