"""Grammar rules of arguments that a chat format writes one by one, strings without quotes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tinker_cookbook.renderers.core.answer_form import ArgumentForm
from tinker_cookbook.structured_output.masks import json_rule, regex_rule
from tinker_cookbook.structured_output.patterns import GrammarError, whole_pattern
from tinker_cookbook.structured_output.rules import ANY_TEXT, RuleWriter
from tinker_cookbook.structured_output.schemas import Schema

_PYTHON_WORDS = {"true": "True", "false": "False", "null": "None"}
# Type implied by a keyword, for a schema without a type.
_OF_KEYWORD = {"properties": "object", "items": "array"}
_SHAPES: Mapping[str, type] = {
    "properties": Mapping, "required": list, "enum": list, "anyOf": list, "oneOf": list,
    "pattern": str, "minLength": int, "maxLength": int, "$ref": str,
}  # fmt: skip
_COMBINING = frozenset(("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if"))
_OF_STRINGS = frozenset(("pattern", "minLength", "maxLength", "format"))
_CONDITIONS = _COMBINING | _OF_STRINGS | frozenset((
    "type", "enum", "const", "multipleOf", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains",
    "properties", "patternProperties", "additionalProperties", "required", "minProperties",
    "maxProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies",
    "unevaluatedProperties", "unevaluatedItems",
))  # fmt: skip
"""Keywords that values can violate."""
_OF_ALL_ARGUMENTS = frozenset(("type", "properties", "required", "additionalProperties"))
_NESTED_REFERENCE = re.compile(r'"\$ref": "(?!#/\$defs/|#/definitions/)([^"]*)"')
# Unquoted texts that a format without types reads as values of these types.
_READ_AS = {
    "integer": r"/-?[0-9.]+([eE][+-]?[0-9]+)?/",
    "number": r"/-?[0-9.]+([eE][+-]?[0-9]+)?/",
    "array": r"/[ \t\r\n]*\[(.|\n)*/",
    "object": r"/[ \t\r\n]*[{](.|\n)*/",
}


def arguments_rule(
    rules: RuleWriter, form: ArgumentForm, prefix: str, tool: str, schema: Schema
) -> str:
    """Adds the rules of a tool's arguments in the order of the schema; returns the rule of all.

    Other arguments are allowed only if the schema names none. ``prefix`` is the prefix of the
    rules' names. Raises GrammarError for a schema that cannot be expressed.
    """
    return _Arguments(rules, form, prefix, tool, schema).sequence()


class _Arguments:
    def __init__(
        self, rules: RuleWriter, form: ArgumentForm, prefix: str, tool: str, schema: Schema
    ) -> None:
        self._rules, self._form, self._prefix, self._tool = rules, form, prefix, tool
        self._root: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
        self._count = 0

    def sequence(self) -> str:
        schema = self._resolved("parameters", self._root)
        properties: Mapping[str, Schema] = schema.get("properties") or {}
        required = schema.get("required") or []
        if unknown := [name for name in required if name not in properties]:
            raise self._error("required", f"{unknown[0]!r}, which is not in properties")
        if schema.get("type", "object") != "object":
            raise self._error("parameters", "a schema that is not a single object with properties")
        self._refuse("parameters", schema, _CONDITIONS - _OF_ALL_ARGUMENTS)
        if not properties:
            others = schema.get("additionalProperties", True)
            if not isinstance(others, bool):
                raise self._error("additionalProperties", "a schema for arguments without names")
            closed = not others or "properties" in schema
            return "" if closed else f"{self._any_argument()}*"
        return " ".join(
            self._argument(name, one) + ("" if name in required else "?")
            for name, one in properties.items()
        )

    def _any_argument(self) -> str:
        name = regex_rule(r"[A-Za-z_][\w.-]{0,63}")
        values = " | ".join(self._values("name", True))
        return self._new(f"{self._rules.constant(self._form.before)} {name} ({values})")

    def _argument(self, name: str, schema: Schema) -> str:
        if not name or any(character in name for character in '<>"\n'):
            raise self._error("properties", f"the name {name!r}")
        values = " | ".join(self._values(name, schema))
        return self._new(f"{self._rules.constant(self._form.before + name)} ({values})")

    def _values(self, name: str, schema: Schema) -> Iterator[str]:
        """Yields the alternatives for a value, including the text after its name."""
        options = list(self._options(name, schema))
        kinds = [kind for kind, _ in options]
        for kind, option in options:
            if kind == "any":
                yield self._string(name, {}, ())
                if self._form.typed:
                    yield self._json({})
            elif kind == "string":
                yield self._string(name, option, () if self._form.typed else kinds)
            elif kind in ("constant", "boolean", "null"):
                for value in option["enum"]:
                    yield from self._constants(name, value)
            else:
                yield self._json(option)

    def _options(
        self, name: str, schema: Schema, depth: int = 0
    ) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yields the schemas without alternatives, each with the type of its values.

        Constants, true, false and null are listed as ``enum``.
        """
        if schema is False or depth > 16:
            got = "the schema false" if schema is False else "alternatives without end"
            raise self._error(name, got)
        if schema is True or not _CONDITIONS & schema.keys():
            yield "any", {}
            return
        schema = self._resolved(name, schema)
        kinds = schema.get("type") or next(
            (kind for keyword, kind in _OF_KEYWORD.items() if keyword in schema), None
        )
        if "enum" in schema or "const" in schema:
            self._refuse(name, schema, _CONDITIONS - {"type", "enum", "const"})
            yield "constant", {"enum": self._allowed(name, schema, kinds)}
        elif "anyOf" in schema and kinds is None:
            self._refuse(name, schema, _CONDITIONS - {"anyOf"})
            for option in schema["anyOf"]:
                yield from self._options(name, option, depth + 1)
        elif isinstance(kinds, list):
            for kind in kinds:
                yield from self._options(name, {**schema, "type": kind}, depth + 1)
        elif kinds == "string":
            self._refuse(name, schema, _COMBINING)
            yield kinds, schema
        elif kinds in ("boolean", "null"):
            self._refuse(name, schema, _COMBINING)
            yield kinds, {"enum": [None] if kinds == "null" else [True, False]}
        elif kinds is not None:
            yield kinds, schema
        else:
            raise self._error(name, f"{json.dumps(schema)[:80]} without a type")

    def _allowed(self, name: str, schema: Mapping[str, Any], kinds: Any) -> list[Any]:
        """Returns the constants of a schema that have one of its types."""
        values = schema.get("enum", [schema.get("const")])
        if "const" in schema:
            values = [one for one in values if _same(one, schema["const"])]
        wanted = [kinds] if isinstance(kinds, str) else kinds
        if wanted:
            values = [one for one in values if set(_kinds_of(one)) & set(wanted)]
        if not values:
            raise self._error(name, f"{json.dumps(schema)[:80]} without a possible value")
        return values

    def _constants(self, name: str, value: Any) -> Iterator[str]:
        if isinstance(value, str):
            if any(mark in value for mark in self._form.marks):
                raise self._error(name, f"the value {value!r}, which ends an argument there")
            yield self._rules.constant(self._form.string_between + value + self._form.after)
            return
        spelled = json.dumps(value, ensure_ascii=False)
        words = _PYTHON_WORDS if self._form.python_words else {}
        for text in dict.fromkeys([spelled, words.get(spelled, spelled)]):
            yield self._rules.constant(self._form.between + text + self._form.after)

    def _string(self, name: str, schema: Mapping[str, Any], others: Sequence[str]) -> str:
        """Returns the rule of an unquoted string: any text without the markers that would end it,
        and none that would be read as a value of the types ``others``."""
        if "format" in schema:
            raise self._error(name, f"a string of format {schema['format']!r}; use pattern or enum")
        conditions = sorted({f"~{_READ_AS[kind]}" for kind in others if kind in _READ_AS})
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if least or most != "":
            conditions.insert(0, rf"/(.|\n){{{least},{most}}}/")
        if "pattern" in schema:
            conditions.insert(0, f"/{whole_pattern(schema['pattern'])}/")
        self._count += 1
        text = self._rules.closed(
            f"{self._prefix}_{self._count}".upper(),
            conditions if conditions and conditions[0][0] == "/" else [ANY_TEXT, *conditions],
            self._form.marks,
            self._form.after,
        )
        return f"{self._rules.constant(self._form.string_between)} {text}"

    def _json(self, schema: Mapping[str, Any]) -> str:
        # References are resolved in the root of the schema, of which only the definitions are here.
        definitions = {
            key: self._root[key] for key in ("$defs", "definitions") if key in self._root
        }
        whole = {**schema, **definitions}
        if outside := _NESTED_REFERENCE.search(json.dumps(whole)):
            raise self._error("$ref", f"{outside[1]!r} within a value, expected #/$defs/NAME")
        value = self._new(json_rule(whole))
        before = self._rules.constant(self._form.between)
        return f"{before} {value} {self._rules.constant(self._form.after)}"

    def _resolved(self, name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        for _ in range(8):
            for keyword, kind in _SHAPES.items():
                if keyword in schema and not isinstance(schema[keyword], kind):
                    got = f"{keyword} {json.dumps(schema[keyword])[:80]}, which JSON Schema forbids"
                    raise self._error(name, got)
            reference = schema.get("$ref")
            if reference is None:
                return schema
            self._refuse(name, schema, _CONDITIONS - {"$ref"})
            found: Any = self._root
            for key in str(reference).removeprefix("#/").split("/"):
                found = found.get(key) if isinstance(found, Mapping) else None
            if not isinstance(found, Mapping):
                raise self._error("$ref", f"{reference!r}, which is not in the schema")
            schema = found
        raise self._error("$ref", "a reference to itself")

    def _refuse(self, name: str, schema: Mapping[str, Any], keywords: frozenset[str]) -> None:
        """Raises GrammarError if ``schema`` has one of the ``keywords``."""
        if found := sorted(keywords & schema.keys()):
            raise self._error(name, f"the keyword {found[0]} next to {', '.join(schema)}"[:120])

    def _new(self, right: str) -> str:
        self._count += 1
        return self._rules.add(f"{self._prefix}_{self._count}", right)

    def _error(self, name: str, got: str) -> GrammarError:
        return GrammarError(
            f"tools: {self._tool}: {name}: got {got}; this chat format writes arguments one by one "
            "and cannot express it"
        )


def _kinds_of(value: Any) -> tuple[str, ...]:
    """Returns the types of JSON Schema that a value has."""
    if isinstance(value, bool) or value is None:
        return ("null" if value is None else "boolean",)
    if isinstance(value, (int, float)):
        return ("integer", "number") if float(value).is_integer() else ("number",)
    return (
        "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object",
    )


def _same(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and one == other
