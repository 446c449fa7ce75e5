"""Tools as gpt-oss is told of them: types of functions, spelled nearly as in TypeScript.

The spelling, odd spaces and line breaks included, is that of the model's chat template, so that a
model reads at inference what it read in training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tinker_cookbook.renderers.core.messages import ToolSpec
from tinker_cookbook.renderers.core.tool_calls import as_openai_tool

NAMESPACE_OPEN = "# Tools\n\n## functions\n\nnamespace functions {\n\n"
NAMESPACE_CLOSE = "} // namespace functions"
_PLAIN_TYPES = {"number": "number", "integer": "number", "boolean": "boolean"}
_LONGEST_ITEM_TYPE = 50
_AFTER_UNION_BAR = " | \n"
_BEFORE_VARIANT_DEFAULT = " " * 20
_BEFORE_PROPERTY_TYPE = "\n" + " " * 16


def declare_functions(tools: Sequence[ToolSpec]) -> str:
    """Returns the section of the developer message that declares ``tools``.

    Takes tools as ``ToolSpec`` or in OpenAI's shape, ``{"type": "function", "function": …}``.
    """
    declared = "".join(_declare(as_openai_tool(tool)["function"]) for tool in tools)
    return f"{NAMESPACE_OPEN}{declared}{NAMESPACE_CLOSE}"


def to_json(value: Any) -> str:
    """Returns ``value`` as JSON, as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


def _declare(tool: Mapping[str, Any]) -> str:
    parameters = tool.get("parameters") or {}
    head = f"// {tool.get('description') or ''}\ntype {tool['name']} = "
    properties = parameters.get("properties")
    if not properties:
        return f"{head}() => any;\n\n"
    required = parameters.get("required") or []
    lines = "".join(_parameter(name, spec, required) for name, spec in properties.items())
    return f"{head}(_: {{\n{lines}}}) => any;\n\n"


def _parameter(name: str, spec: Any, required: Sequence[str]) -> str:
    spec = _schema(spec)
    comment = f"// {spec['description']}\n" if spec.get("description") else ""
    default = ""
    if "default" in spec:
        # A default beside an enumeration or a union stands there as it is, not as JSON.
        value = spec["default"]
        if spec.get("enum"):
            default = f", // default: {value}"
        elif spec.get("oneOf"):
            default = f"// default: {value}"
        else:
            default = f", // default: {to_json(value)}"
    return f"{comment}{_key(name, required)}: {_type(spec)}{default},\n"


def _key(name: str, required: Sequence[str]) -> str:
    return name if name in required else f"{name}?"


def _type(schema: Any) -> str:
    spec = _schema(schema)
    kind = spec.get("type")
    nullable = " | null" if spec.get("nullable") else ""
    if kind == "array":
        return f"{_item_type(spec.get('items'))}[]{nullable}"
    if isinstance(kind, Sequence) and not isinstance(kind, str) and kind:
        return " | ".join(map(str, kind))
    if spec.get("oneOf"):
        return _AFTER_UNION_BAR.join(map(_variant, spec["oneOf"]))
    if kind == "string":
        if spec.get("enum"):
            return '"' + '" | "'.join(map(str, spec["enum"])) + '"'
        return f"string{nullable}"
    if kind == "object":
        return _object_type(spec)
    return _PLAIN_TYPES.get(kind, "any") if isinstance(kind, str) else "any"


def _item_type(items: Any) -> str:
    if not items:
        return "any"
    kind = _schema(items).get("type")
    if kind == "string":
        return "string"  # of an enumeration too
    if isinstance(kind, str) and kind in _PLAIN_TYPES:
        return _PLAIN_TYPES[kind]
    inner = _type(items)
    return "any" if inner == "object | object" or len(inner) > _LONGEST_ITEM_TYPE else inner


def _object_type(spec: Mapping[str, Any]) -> str:
    if not spec.get("properties"):
        return "object"
    required = spec.get("required") or []
    fields = ", ".join(
        f"{_key(name, required)}: {_BEFORE_PROPERTY_TYPE}{_type(field)}"
        for name, field in spec["properties"].items()
    )
    return f"{{\n{fields}}}"


def _variant(variant: Any) -> str:
    spec = _schema(variant)
    comment = f"// {spec['description']}" if spec.get("description") else ""
    default = ""
    if "default" in spec:
        default = f"{_BEFORE_VARIANT_DEFAULT}// default: {to_json(spec['default'])}"
    return f"{_type(spec)}{comment}{default}"


def _schema(schema: Any) -> Mapping[str, Any]:
    """A schema may also be true or false, which says nothing of the type."""
    return schema if isinstance(schema, Mapping) else {}
