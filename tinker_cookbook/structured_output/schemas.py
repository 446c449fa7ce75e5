"""JSON schemas as the grammar library has to read them, so that its answers are valid.

The library's dialect differs from JSON Schema: other patterns, numbers as doubles, and objects
whose open properties may repeat. A schema is rewritten, or refused with the keyword and the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from tinker_cookbook.structured_output.patterns import GrammarError, is_unwritable, whole_pattern

Schema: TypeAlias = Mapping[str, Any] | bool

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values map names to schemas."""
_ANNOTATIONS = ("title", "description", "default", "examples", "example", "$comment")
_UPPER = ("maximum", "exclusiveMaximum")
_BOUNDS = ("minimum", "exclusiveMinimum", *_UPPER)
_EXACT = 2**53
"""Whole numbers up to this one are exact as doubles."""


def readable_schema(schema: Schema) -> Schema:
    """Returns an equivalent schema in the library's dialect, without annotations.

    Raises GrammarError for a keyword that the library would read in another way.
    """
    if not isinstance(schema, Mapping):
        return schema
    _check_properties(schema)
    return {
        key: _value(key, value)
        for key, value in schema.items()
        if key not in _ANNOTATIONS
        and not key.startswith("x-")
        # It demands nothing, but the library knows no ``uniqueItems``.
        and (key, value) != ("uniqueItems", False)
    }


def _value(key: str, value: Any) -> Any:
    if key in ("enum", "const"):
        _check_constant(key, value)
        return value
    if key == "pattern" and isinstance(value, str):
        return f"^{whole_pattern(value)}$"
    if key in _BOUNDS and isinstance(value, int) and abs(value) > _EXACT:
        return _inner_double(value, math.inf if key not in _UPPER else -math.inf)
    if isinstance(value, list):
        return [readable_schema(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    if key == "patternProperties":
        return {f"^{whole_pattern(name)}$": readable_schema(one) for name, one in value.items()}
    if key in _NAMED:
        for name in value:
            _check_constant(key, name)
        return {name: readable_schema(one) for name, one in value.items()}
    # Also unknown keywords, because a reference may point into their values.
    return readable_schema(value)


def _inner_double(value: int, toward: float) -> int | float:
    """Returns the nearest double that allows no number beyond the bound ``value``."""
    rounded = float(value)
    beyond = rounded < value if toward > 0 else rounded > value
    return int(math.nextafter(rounded, toward) if beyond else rounded)


def _check_constant(key: str, value: Any) -> None:
    if isinstance(value, str):
        # Strings have no escapes by number: ``"\\u0061"`` would be another spelling of the name a.
        if wrong := [one for one in value if is_unwritable(one)]:
            raise GrammarError(
                f"{key}: got {value!r} with the control character {wrong[0]!r}, which constrained "
                "sampling does not write"
            )
    elif isinstance(value, int) and abs(value) > _EXACT:
        raise GrammarError(
            f"{key}: got {value}, expected whole numbers up to 2**53, which doubles hold exactly"
        )
    elif isinstance(value, float) and not math.isfinite(value):
        raise GrammarError(f"{key}: got {value}, expected a finite number")
    elif isinstance(value, Mapping):
        for pair in value.items():
            _check_constant(key, list(pair))
    elif isinstance(value, list):
        for one in value:
            _check_constant(key, one)


def _check_properties(schema: Mapping[str, Any]) -> None:
    """Refuses a number of properties that repeated names would only seem to reach."""
    least, required = schema.get("minProperties", 0), schema.get("required")
    named = len(set(required)) if isinstance(required, list) else 0
    is_open = schema.get("additionalProperties") is not False or schema.get("patternProperties")
    # The first property that is not required is new; the next ones may repeat its name.
    if isinstance(least, int) and is_open and least > named + 1:
        raise GrammarError(
            f"minProperties: got {least} with {named} required properties and open names, which "
            f"may repeat in an answer; expected at most {named + 1}, or additionalProperties false "
            "and no patternProperties"
        )
