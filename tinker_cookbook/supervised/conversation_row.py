"""Reads a row of data: its messages and its tools, from any layout and any source.

Files, tables, mixtures and comparisons read their rows here, so what a row contains reaches the
tokens, or is refused in the same words everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tinker_cookbook.exceptions import DataFormatError, DataValidationError, RendererError
from tinker_cookbook.renderers import (
    Message,
    Renderer,
    ToolSpec,
    get_text_content,
    normalize_messages,
)
from tinker_cookbook.renderers.core.checks import check_roles
from tinker_cookbook.renderers.core.tool_calls import TOOL_SHAPE, read_tool
from tinker_cookbook.supervised.layouts import TOOLS, ColumnsTaken, find_layout

EXPECTED = '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'


def read_row(
    row: Any, where: str, columns: ColumnsTaken | str
) -> tuple[list[Message], list[ToolSpec]]:
    """Returns a row's messages and tools; raises DataFormatError that starts with ``where``.

    ``columns`` records the layout, or is the name of the column with the conversation.
    """
    if not isinstance(row, Mapping):
        raise DataFormatError(
            f"{where}: not a conversation: got a JSON {type(row).__name__}, expected an object "
            f"like {EXPECTED}"
        )
    with data_error(f"{where}: not a conversation"):
        by_name = isinstance(columns, str)
        layout = find_layout(row, columns) if by_name else columns.layout_of(row)
        messages = layout.messages(row)
    with data_error(where):
        system_tools = take_tools(messages)
        return checked_messages(messages), tools_of_row(row, system_tools)


def checked_messages(messages: Any) -> list[Message]:
    """Returns normalised messages; raises RendererError for a role that no chat format has, or a
    key that must not be ignored."""
    normal = normalize_messages(messages)
    check_roles(normal)
    return normal


def take_tools(messages: list[Any]) -> Any:
    """Removes the tools of a system message at the beginning and returns them, None without."""
    first = messages[0] if messages else None
    if not isinstance(first, Mapping) or first.get("role") not in ("system", "developer"):
        return None
    found = next((name for name in TOOLS if first.get(name)), None)
    if found is None:
        return None
    tools = first[found]
    messages[0] = {key: value for key, value in first.items() if key not in TOOLS}
    # The tools may be all that the message has.
    messages[0]["content"] = messages[0].get("content") or ""
    return tools


def tools_of_row(row: Mapping[str, Any], *in_system: Any) -> list[ToolSpec]:
    """Returns the tools of a row: in its column ``tools`` or ``tool_defs``, or those of its system
    messages. Each is a list or its JSON text; raises RendererError for others, or if two differ."""
    # The older OpenAI key would otherwise be ignored.
    if row.get("functions"):
        raise RendererError(f"got 'functions', expected 'tools': a list of {TOOL_SHAPE}")
    found = [_specs(tools) for tools in (*(row.get(name) for name in TOOLS), *in_system)]
    declared = [specs for specs in found if specs]
    if any(specs != declared[0] for specs in declared[1:]):
        raise RendererError(
            f"tools: got different tools in two places ({', '.join(TOOLS)}, the system message), "
            "expected one list"
        )
    return declared[0] if declared else []


def _specs(tools: Any) -> list[ToolSpec]:
    if isinstance(tools, str):  # a column of JSON text, because rows have tools of different shapes
        try:
            # An empty cell of a CSV file means the same as null.
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise RendererError(
                f"tools: got a text that is not JSON ({error}), expected a list of {TOOL_SHAPE}"
            ) from error
    # Null and an empty list both mean that the row has no tools.
    if tools and (isinstance(tools, str) or not isinstance(tools, Sequence)):
        raise RendererError(f"tools: got {type(tools).__name__}, expected a list of {TOOL_SHAPE}")
    return [read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools or [])]


def with_tools(
    messages: Sequence[Message], tools: Sequence[ToolSpec], renderer: Renderer
) -> list[Message]:
    """Returns the conversation with ``tools`` declared in the chat format.

    A system message at the beginning becomes part of the declaration. Raises RendererError where
    the chat format does not support tools.
    """
    if not tools:
        return list(messages)
    # The format writes the system prompt together with the tool declarations.
    system = messages[0] if messages and messages[0]["role"] in ("system", "developer") else None
    prompt = "" if system is None else get_text_content(system)
    prefix = renderer.create_conversation_prefix_with_tools(tools, prompt)
    if any("trainable" in message for message in messages):
        # train_on_what=customized needs the key on every message.
        trainable = system.get("trainable", False) if system is not None else False
        for message in prefix:
            message["trainable"] = trainable
    # The prefix contains the system prompt, so the system message is not repeated.
    return [*prefix, *messages[0 if system is None else 1 :]]


@contextmanager
def data_error(where: str) -> Iterator[None]:
    """Converts an error of a row's content to a DataFormatError that starts with ``where``."""
    try:
        yield
    except (RendererError, DataValidationError) as error:
        raise DataFormatError(f"{where}: {error}") from error
