"""Tool calls as XML between tags: ``<function=…>`` with one ``<parameter=…>`` for each argument.

The form says nothing of types: a parameter is bare text, whether the argument is the number 12 or
the string ``"12"``. Reading takes for a number, a truth value, null, an object or a list what
spells one, and everything else for a string. So a string that spells such a value comes back as
that value, and an argument whose text has a closing tag of the form in it may not be read; all
others come back as they were.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.core.blocks import Block
from tinker_cookbook.renderers.core.messages import Message, ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>(?P<inside>.*)</function>\s*", re.DOTALL)
# A value ends at the first closing tag that another parameter or the end of the function follows:
# values may contain closing tags.
_PARAMETER = re.compile(
    r"\s*<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))",
    re.DOTALL,
)
_CONSTANTS = {
    "true": True,
    "false": False,
    "null": None,
    "True": True,
    "False": False,
    "None": None,
}

XML_CALL_INSTRUCTIONS = (
    "If you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n"
    "</parameter>\n<parameter=example_parameter_2>\nThis is the value for the second parameter\n"
    "that can span\nmultiple lines\n</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\n"
    "Reminder:\n- Function calls MUST follow the specified format: an inner "
    "<function=...></function> block must be nested within <tool_call></tool_call> XML tags\n"
    "- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the "
    "function call, but NOT after\n"
    "- If there is no function call available, answer the question like normal with your current "
    "knowledge and do not tell the user about function calls\n</IMPORTANT>"
)
"""What templates tell the model of this form, behind the declarations of tools."""


def format_xml_calls(message: Message, idx: int, *, json_scalars: bool = False) -> list[str]:
    """Returns each call of the message as a tagged block without line breaks around it.

    ``idx`` is the message's place, for errors. Templates write strings bare, and objects and lists
    as JSON; numbers, truth values and null as Python's ``str`` does (``True``, ``None``), with
    ``json_scalars`` as JSON (``true``, ``null``). Calls that could not be read are written as they
    were. Raises RendererError for arguments that are no JSON object.
    """
    blocks = [
        _format_call(call, f"messages[{idx}].tool_calls[{i}].function.arguments", json_scalars)
        for i, call in enumerate(message.get("tool_calls", []))
    ]
    return blocks + [call.raw_text for call in message.get("unparsed_tool_calls", [])]


def arguments_of(call: ToolCall, where: str) -> dict[str, Any]:
    """Returns the arguments of a call for formats that write them one by one.

    Raises RendererError, which names ``where``, for arguments that are no JSON object.
    """
    written = call.function.arguments
    try:
        arguments = json.loads(written)
    except (ValueError, RecursionError):  # the latter: brackets without end
        arguments = None
    if not isinstance(arguments, dict):
        raise RendererError(
            f"{where}: got {written!r}, expected a JSON object in a string: this chat format "
            'writes arguments one by one; use "{}" for none'
        )
    return arguments


def _format_call(call: ToolCall, where: str, json_scalars: bool) -> str:
    parameters = "".join(
        f"<parameter={name}>\n{_spell(value, json_scalars)}\n</parameter>\n"
        for name, value in arguments_of(call, where).items()
    )
    return f"{_OPEN}\n<function={call.function.name}>\n{parameters}</function>\n{_CLOSE}"


def _spell(value: Any, json_scalars: bool) -> str:
    if isinstance(value, str):
        return value
    if json_scalars or isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def read_xml_call(body: str) -> list[ToolCall]:
    """Returns the call that a block says; ValueError where it is none."""
    function = _FUNCTION.fullmatch(body)
    if not function:
        raise ValueError("tool call: expected <function=name>, parameters and </function>")
    inside = function["inside"]
    arguments: dict[str, Any] = {}
    end = 0
    for match in _PARAMETER.finditer(inside):
        if match.start() != end:
            break
        if match["name"] in arguments:
            raise ValueError(f"tool call: parameter {match['name']!r} is given twice")
        arguments[match["name"]] = read_bare_value(match["value"])
        end = match.end()
    if rest := inside[end:].strip():
        raise ValueError(
            f"tool call: expected <parameter=name>, its value and </parameter>, got {rest[:100]!r}"
        )
    spelled = json.dumps(arguments, ensure_ascii=False)
    return [ToolCall(function=ToolCall.FunctionBody(name=function["name"], arguments=spelled))]


# The line breaks before a block belong to the format, not to the text.
XML_CALL = Block(_OPEN, _CLOSE, read=read_xml_call, before=("\n\n", "\n"))
"""A call as XML between tags."""


def read_bare_value(text: str) -> Any:
    """Returns the value that ``text`` spells, ``text`` itself where it spells none.

    A number counts only where it would be written as it stands: ``1.10`` may be a version.
    """
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    try:
        value = json.loads(text, parse_constant=_no_constant)
        spelled = json.dumps(value, ensure_ascii=False)
        spelled.encode()  # half a character in an escape could not be written again
    except (ValueError, RecursionError):
        return text
    if isinstance(value, str):
        return text
    return value if isinstance(value, (dict, list)) or spelled == text else text


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
