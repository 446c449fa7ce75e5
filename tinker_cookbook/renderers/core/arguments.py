"""Arguments of tool calls: JSON text of an object, and values that a chat format writes bare."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

MAX_JSON_DEPTH = 100
"""Levels of nesting in sampled JSON. Deeper JSON is refused, because Python's own limit depends on
the caller's stack: text that one function reads would fail in the next one."""
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_BRACKET_OR_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)


class BareArguments(str):
    """JSON text of arguments that the model wrote bare, that is without types.

    The JSON has the likely types: ``12`` is a number. ``texts`` has each value as it was written,
    for :func:`typed_arguments`.
    """

    texts: Mapping[str, str]

    def __new__(cls, texts: Mapping[str, str]) -> BareArguments:
        """Makes the JSON text of values, given as they were written."""
        values = {name: _read_bare_value(text) for name, text in texts.items()}
        made = super().__new__(cls, to_json(values))
        made.texts = dict(texts)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return BareArguments, (self.texts,)


def to_json(value: Any) -> str:
    """Returns ``value`` as JSON, as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


def read_json(text: str) -> Any:
    """Returns the value of JSON text.

    Raises ValueError for other text, for NaN and numbers beyond a float, for nesting beyond
    ``MAX_JSON_DEPTH``, and for text with a lone surrogate, which no tokenizer can encode.
    """
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH:
        depth = deepest = 0
        for found in _BRACKET_OR_STRING.finditer(text):
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
            deepest = max(deepest, depth)
        if deepest > MAX_JSON_DEPTH:
            raise ValueError("the JSON is nested too deeply")
    value = json.loads(text)
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("the JSON contains half of a character (a lone surrogate)") from error
    except ValueError as error:
        raise ValueError("the JSON contains NaN, or a number beyond a float") from error
    return value


def arguments_text(arguments: Any) -> str:
    """Returns the arguments of a call as the JSON text of an object; text is kept as it is.

    An empty text and null mean no arguments. Raises ValueError for anything but an object.
    """
    if isinstance(arguments, str):
        text = arguments
    else:
        text = "" if arguments is None else to_json(arguments)
    if text.strip() in ("", "null"):
        return "{}"
    if not isinstance(read_json(text), dict):
        raise ValueError(f"arguments: got {text[:80]!r}, expected a JSON object")
    return text


def typed_arguments(arguments: str, schema: Mapping[str, Any]) -> str:
    """Returns the arguments of a call with the types of the tool's schema.

    For chat formats that write strings without quotes, where the parser can only guess: ``12`` is a
    number, but the text "12" if the schema says string. A value that fits no type is unchanged, and
    so are arguments that are not ``BareArguments``: their types are the model's own.
    """
    if not isinstance(arguments, BareArguments):
        return arguments
    values, properties = json.loads(arguments), schema.get("properties") or {}
    return to_json(
        {
            name: _typed(value, arguments.texts[name], properties.get(name, True), schema)
            for name, value in values.items()
        }
    )


def _typed(value: Any, text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    candidates = [value, text]
    if isinstance(value, str):
        # The likely type is a string, for example of 1e2, which may be a number all the same.
        try:
            candidates.append(read_json(text))
        except ValueError:
            return value
    return next((one for one in candidates if _fits(one, schema, root)), value)


def _fits(value: Any, schema: Any, root: Mapping[str, Any], depth: int = 0) -> bool:
    """Returns whether a value has a type, or is one of the values, of a schema."""
    if not isinstance(schema, Mapping) or depth > 8:
        return True
    if "$ref" in schema:
        found: Any = root
        for key in str(schema["$ref"]).removeprefix("#/").split("/"):
            found = found.get(key, {}) if isinstance(found, Mapping) else {}
        return _fits(value, found, root, depth + 1)
    if "enum" in schema or "const" in schema:
        allowed = schema.get("enum", [schema.get("const")])
        return any(type(one) is type(value) and one == value for one in allowed)
    if not all(_fits(value, part, root, depth + 1) for part in schema.get("allOf", [])):
        return False
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return any(_fits(value, option, root, depth + 1) for option in options)
    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return not kinds or any(_has_type(value, kind) for kind in kinds)


def _has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    kinds = {"string": str, "number": (int, float), "array": list, "object": dict}
    return isinstance(value, kinds.get(kind, ()))


def _read_bare_value(text: str) -> Any:
    """Returns the value of ``text`` as JSON, or ``text`` itself.

    The XML form has no types: ``12`` may be a number or a string, and is read as the number. A
    number counts only in its canonical spelling, because ``1.10`` may be a version.
    """
    if text in _WORDS:
        return _WORDS[text]
    try:
        value = read_json(text)
    except ValueError:
        return text
    if isinstance(value, str):
        return text
    return value if isinstance(value, (dict, list)) or to_json(value) == text else text
