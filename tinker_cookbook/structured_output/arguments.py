"""Grammar rules of arguments that a chat format writes one by one, strings without quotes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tinker_cookbook.renderers.core.answer_form import ArgumentForm
from tinker_cookbook.structured_output.masks import GrammarError, Schema, json_rule, regex_rule
from tinker_cookbook.structured_output.rules import ANY_TEXT, RuleWriter

_PYTHON_WORDS = {"true": "True", "false": "False", "null": "None"}
# Type implied by a keyword, for a schema without a type.
_OF_KEYWORD = {"properties": "object", "items": "array"}


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
        schema = self._resolved(self._root)
        properties: Mapping[str, Schema] = schema.get("properties") or {}
        required = schema.get("required") or []
        if unknown := [name for name in required if name not in properties]:
            raise self._error("required", f"{unknown[0]!r}, which is not in properties")
        if schema.get("type", "object") != "object" or {"anyOf", "oneOf", "allOf"} & schema.keys():
            raise self._error("parameters", "a schema that is not a single object with properties")
        if not properties:
            closed = schema.get("additionalProperties") is False or "properties" in schema
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
        if not isinstance(schema, Mapping) or not schema:
            if schema is False:
                raise self._error(name, "the schema false")
            yield self._string(name, {})
            if self._form.typed:
                yield self._json({})
            return
        schema = self._resolved(schema)
        options = schema.get("anyOf") or schema.get("oneOf")
        kinds = schema.get("type") or next(
            (kind for keyword, kind in _OF_KEYWORD.items() if keyword in schema), None
        )
        if "enum" in schema or "const" in schema:
            for value in schema.get("enum", [schema.get("const")]):
                yield from self._constants(name, value)
        elif options:
            for option in options:
                yield from self._values(name, option)
        elif isinstance(kinds, list):
            for kind in kinds:
                yield from self._values(name, {**schema, "type": kind})
        elif kinds == "string":
            yield self._string(name, schema)
        elif kinds == "boolean":
            yield from (one for value in (True, False) for one in self._constants(name, value))
        elif kinds == "null":
            yield from self._constants(name, None)
        elif kinds is not None:
            yield self._json(schema)
        else:
            raise self._error(name, f"{json.dumps(schema)[:80]} without a type")

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

    def _string(self, name: str, schema: Mapping[str, Any]) -> str:
        """Returns the rule of an unquoted string: any text without the markers that would end
        it."""
        if "format" in schema:
            raise self._error(name, f"a string of format {schema['format']!r}; use pattern or enum")
        conditions = []
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if least or most != "":
            conditions.append(regex_rule(rf"(.|\n){{{least},{most}}}"))
        if "pattern" in schema:
            # A pattern of a JSON schema is not anchored.
            pattern: str = schema["pattern"]
            start = "" if pattern.startswith("^") else r"(.|\n)*"
            end = "" if pattern.endswith("$") and not pattern.endswith(r"\$") else r"(.|\n)*"
            inner = pattern.removeprefix("^").removesuffix("" if end else "$")
            conditions.append(regex_rule(f"{start}({inner}){end}"))
        self._count += 1
        text = self._rules.closed(
            f"{self._prefix}_{self._count}".upper(),
            conditions or [ANY_TEXT],
            self._form.marks,
            self._form.after,
        )
        return f"{self._rules.constant(self._form.string_between)} {text}"

    def _json(self, schema: Mapping[str, Any]) -> str:
        # References are resolved in the root of the schema.
        definitions = {
            key: self._root[key] for key in ("$defs", "definitions") if key in self._root
        }
        value = self._new(json_rule({**schema, **definitions}))
        before = self._rules.constant(self._form.between)
        return f"{before} {value} {self._rules.constant(self._form.after)}"

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        for _ in range(8):
            reference = schema.get("$ref")
            if reference is None:
                return schema
            found: Any = self._root
            for key in str(reference).removeprefix("#/").split("/"):
                found = found.get(key) if isinstance(found, Mapping) else None
            if not isinstance(found, Mapping):
                raise self._error("$ref", f"{reference!r}, which is not in the schema")
            schema = found
        raise self._error("$ref", "a reference to itself")

    def _new(self, right: str) -> str:
        self._count += 1
        return self._rules.add(f"{self._prefix}_{self._count}", right)

    def _error(self, name: str, got: str) -> GrammarError:
        return GrammarError(
            f"tools: {self._tool}: {name}: got {got}; this chat format writes arguments one by one "
            "and cannot express it"
        )
