"""Plain values as JSON, with exact types, and references to objects that are not plain.

Decoding returns built-in types only: no method of a program's class ever runs on that side.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import math
from collections.abc import Callable, Iterator
from typing import Any

Encoder = Callable[[Any], Any]
_Kind = tuple[str, Callable[[Any, Encoder], Any], Callable[[Any, Encoder], Any]]
_TOLERANCE = 1e-6
_LARGE = 1 << 53  # JSON readers keep integers below it exactly


def same_value(got: Any, expected: Any) -> bool:
    """Whether a returned value is the expected one; both are made of built-in types.

    Lists and tuples compare as equal, since data sets store expected results as JSON. Numbers
    compare by ``same_number``.
    """
    if isinstance(expected, (list, tuple)):
        return (
            isinstance(got, (list, tuple))
            and len(got) == len(expected)
            and all(map(same_value, got, expected))
        )
    if isinstance(expected, dict):
        return (
            isinstance(got, dict)
            and got.keys() == expected.keys()
            and all(same_value(got[key], item) for key, item in expected.items())
        )
    if isinstance(got, (int, float)) and isinstance(expected, (int, float)):
        return same_number(got, expected)
    return got == expected


def same_number(got: float, expected: float) -> bool:
    """Whether two numbers agree, up to an absolute or relative difference of 1e-6.

    The difference to an expected ``int`` is absolute: 1000000.7 is not 1000000. Integers must be
    equal.
    """
    if got == expected or (isinstance(got, int) and isinstance(expected, int)):
        return got == expected
    if isinstance(expected, int) or not math.isfinite(expected):
        most = _TOLERANCE
    else:
        most = _TOLERANCE * max(1.0, abs(expected))
    try:
        return abs(got - expected) <= most  # False for nan
    except OverflowError:  # an integer that is larger than any float
        return False


def encode(value: Any, reference: Callable[[Any], Any]) -> Any:
    """Returns ``value`` as a JSON value.

    Args:
        value: Plain values keep their type; instances of derived classes become the base class.
        reference: Encodes an object that is not plain.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_LARGE < value < _LARGE else ["int", hex(value)]
    if kind is float:
        return ["float", value.hex()]
    if kind is type and getattr(builtins, value.__name__, None) is value:
        return ["type", value.__name__]
    if kind in _KINDS:
        tag, encoder, _ = _KINDS[kind]
        return [tag, encoder(value, lambda item: encode(item, reference))]
    for base in _KINDS:
        # Derived classes too, such as Counter, named tuples and enumerations of integers.
        if isinstance(value, base):
            return encode(base(value), reference)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        exact = int.__int__(value) if isinstance(value, int) else float.__float__(value)
        return encode(exact, reference)
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
        return encode(value.tolist(), reference)
    return reference(value)


def encode_iterator(value: Iterator[Any], reference: Callable[[Any], Any]) -> Any:
    """Reads an iterator to its end and returns it as a JSON value."""
    return ["iterator", _items(value, lambda item: encode(item, reference))]


def decode(data: Any, dereference: Callable[[Any], Any]) -> Any:
    """Returns the value that ``encode`` was given.

    Raises:
        ValueError: ``encode`` did not produce the data.
    """
    if data is None or type(data) in (bool, str, int):
        return data
    if type(data) is not list or len(data) != 2 or type(data[0]) is not str:
        raise ValueError("not an encoded value")
    tag, content = data
    if tag == "int":
        return int(content, 16)
    if tag == "float":
        return float.fromhex(content)
    if tag == "type":
        found = getattr(builtins, content, None)
        if not isinstance(found, type):
            raise ValueError(f"not a built-in type: {content!r}")
        return found
    if tag == "ref":
        return dereference(content)
    try:
        return _DECODERS[tag](content, lambda item: decode(item, dereference))
    except (KeyError, TypeError, IndexError, ArithmeticError) as error:
        raise ValueError(f"not an encoded value: {type(error).__name__}") from None


def _items(value: Any, go: Encoder) -> list[Any]:
    return [go(item) for item in value]


def _time(kind: Any, tag: str) -> _Kind:
    return tag, lambda v, go: v.isoformat(), lambda c, go: kind.fromisoformat(c)


# Type -> tag, function that encodes, function that decodes.
_KINDS: dict[type, _Kind] = {
    list: ("list", _items, _items),
    tuple: ("tuple", _items, lambda c, go: tuple(_items(c, go))),
    dict: (
        "dict",
        lambda v, go: [[go(key), go(item)] for key, item in v.items()],
        lambda c, go: {go(key): go(item) for key, item in c},
    ),
    set: ("set", _items, lambda c, go: set(_items(c, go))),
    frozenset: ("frozenset", _items, lambda c, go: frozenset(_items(c, go))),
    bytes: ("bytes", lambda v, go: v.hex(), lambda c, go: bytes.fromhex(c)),
    bytearray: ("bytearray", lambda v, go: v.hex(), lambda c, go: bytearray.fromhex(c)),
    complex: (
        "complex",
        lambda v, go: [v.real.hex(), v.imag.hex()],
        lambda c, go: complex(float.fromhex(c[0]), float.fromhex(c[1])),
    ),
    range: (
        "range",
        lambda v, go: [go(v.start), go(v.stop), go(v.step)],
        lambda c, go: range(*_items(c, go)),
    ),
    collections.deque: ("deque", _items, lambda c, go: collections.deque(_items(c, go))),
    decimal.Decimal: ("decimal", lambda v, go: str(v), lambda c, go: decimal.Decimal(c)),
    fractions.Fraction: ("fraction", lambda v, go: str(v), lambda c, go: fractions.Fraction(c)),
    datetime.datetime: _time(datetime.datetime, "datetime"),
    datetime.date: _time(datetime.date, "date"),
    datetime.time: _time(datetime.time, "time"),
    datetime.timedelta: (
        "timedelta",
        lambda v, go: [v.days, v.seconds, v.microseconds],
        lambda c, go: datetime.timedelta(*c),
    ),
    type({}.keys()): ("keys", _items, lambda c, go: dict.fromkeys(_items(c, go)).keys()),
    type({}.values()): ("values", _items, lambda c, go: dict(enumerate(_items(c, go))).values()),
    type({}.items()): ("items", _items, lambda c, go: dict(_items(c, go)).items()),
}
_DECODERS = {tag: decoder for tag, _, decoder in _KINDS.values()}
_DECODERS["iterator"] = lambda c, go: iter(_items(c, go))
