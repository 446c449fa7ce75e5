"""Tools declared as TypeScript types, for Kimi K2.5 and K2.6.

A JSON schema becomes a type: required properties first, then optional ones, each group by name;
descriptions, bounds and defaults are comments above. ``$defs`` become interfaces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tinker_cookbook.exceptions import RendererError

_INDENT = "  "
_SELF = "parameters"  # interface of the schema itself, for "$ref": "#"
_DEFS = "#/$defs/"
_BOUNDS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}


def encode_tools_to_typescript_style(tools: Sequence[Mapping[str, Any]]) -> str:
    """Returns the declaration of ``tools``, which are in OpenAI's form; ``""`` without tools.

    Tools of other types than ``function`` are left out. Raises RendererError for a schema that
    cannot be a type.
    """
    declared = ""
    for tool in tools:
        if tool.get("type") != "function" or not tool.get("function"):
            continue
        function = tool["function"]
        name, schema = function.get("name", "function"), function.get("parameters") or {}
        parts = list(_subschemas(schema))
        # Definitions may be in any part of the schema.
        definitions = {k: v for part in parts for k, v in (part.get("$defs") or {}).items()}
        references = [part["$ref"] for part in parts if "$ref" in part]
        for reference in references:
            if reference != "#" and reference.removeprefix(_DEFS) not in definitions:
                raise RendererError(
                    f"tools: {name}: got $ref {reference!r}, expected '#' or the name of one of "
                    f"the schema's $defs, such as '{_DEFS}Place'"
                )
        takes = _object(schema, "")
        if "#" in references:  # the schema refers to itself, so it needs a name
            fields = ",\n".join(_properties(schema, _INDENT))
            body = f"{{\n{fields}\n}}" if fields else "{}"
            declared += f"interface {_SELF} {body}\n"
            takes = _SELF
        for key, definition in definitions.items():
            about = _comment(definition.get("description", ""), "")
            declared += f"{about}interface {key} {_type(definition, '')}\n"
        about = _comment(function.get("description") or "", "")
        declared += f"{about}type {name} = (_: {takes}) => any;\n"
    return f"# Tools\n\n## functions\nnamespace functions {{\n{declared}}}\n" if declared else ""


def _subschemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yields a schema and its subschemas, without those of ``$defs``."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    inner = [*(schema.get("properties") or {}).values(), *schema.get("anyOf", [])]
    for part in (*inner, schema.get("items"), schema.get("additionalProperties")):
        yield from _subschemas(part)


def _type(schema: Any, indent: str) -> str:
    if isinstance(schema, bool):
        return "any" if schema else "null"
    if "$ref" in schema:
        return _SELF if schema["$ref"] == "#" else schema["$ref"].rsplit("/", 1)[-1]
    if "anyOf" in schema:
        return " | ".join(_type(one, indent) for one in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in schema["enum"])
    kind = schema.get("type")
    if isinstance(kind, list):
        names = {"integer": "number", "object": "{}", "array": "Array<any>"}
        return " | ".join(str(names.get(one, one)) for one in kind)
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        item, inner = schema.get("items") or {}, indent + _INDENT
        # A comment needs a separate line, and so does the type below it.
        if about := _about(item, inner):
            return f"Array<\n{about}{inner}{_type(item, inner)}\n{indent}>"
        return f"Array<{_type(item, indent)}>"
    if kind is None and schema:
        raise RendererError(
            f"tools: got the JSON schema {dict(schema)!r}, expected one with type, enum, anyOf "
            "or $ref"
        )
    return "any" if kind is None else "number" if kind == "integer" else kind


def _object(schema: Mapping[str, Any], indent: str) -> str:
    inner = indent + _INDENT
    required = schema.get("required") or []
    order = sorted(schema.get("properties") or {}, key=lambda name: (name not in required, name))
    fields = list(_properties(schema, inner, order))
    more = schema.get("additionalProperties")
    if more is not None:
        # Quirk of the format: false is "never" here, and "null" elsewhere.
        others = "never" if more is False else _type(more, inner)
        fields.append(f"{inner}[k: string]: {others}")
    return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"


def _properties(
    schema: Mapping[str, Any], indent: str, order: Sequence[str] | None = None
) -> Iterator[str]:
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    for name in properties if order is None else order:
        inner = properties[name]
        about = _about(inner, indent)
        default = inner.get("default") if isinstance(inner, Mapping) else None
        if default is not None:
            numeric = isinstance(default, (int, float))  # booleans too
            shown = repr(default) if numeric else json.dumps(default, ensure_ascii=False)
            about += f"{indent}// Default: {shown}\n"
        mark = "" if name in required else "?"
        yield f"{about}{indent}{name}{mark}: {_type(inner, indent)}"


def _about(schema: Any, indent: str) -> str:
    """Returns the comments above a type: its description, then its bounds."""
    if not isinstance(schema, Mapping):
        return ""
    about = _comment(schema.get("description", ""), indent)
    kind = schema.get("type")
    # An enumeration, a union or a reference replaces the type, and its bounds with it.
    plain = isinstance(kind, str) and not schema.keys() & {"enum", "anyOf", "$ref"}
    names = _BOUNDS.get(kind, ()) if plain and kind else ()
    bounds = ", ".join(f"{name}: {schema[name]}" for name in sorted(names) if name in schema)
    return about + (f"{indent}// {bounds}\n" if bounds else "")


def _comment(text: str, indent: str) -> str:
    lines = text.split("\n") if text else []
    return "".join(f"{indent}// {line}\n" if line else "\n" for line in lines)
