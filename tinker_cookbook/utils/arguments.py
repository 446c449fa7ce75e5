"""``key=value`` arguments into a configuration, and what is wrong with them in a sentence."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import chz
from chz.blueprint import (
    ConstructionException,
    ExtraneousBlueprintArg,
    InvalidBlueprintArg,
    MissingBlueprintArg,
)

from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.utils.config_keys import (
    Key,
    aliases_of,
    choices_of,
    describe_type,
    keys_of,
    nested_class,
)
from tinker_cookbook.utils.help_text import print_help
from tinker_cookbook.utils.key_hints import hint_for
from tinker_cookbook.utils.programs import version_line

SEE_HELP = " (--help lists the keys)"
HELP = ("--help", "-h")
VERSION = "--version"
_WRONG_VALUE = re.compile(r"argument '(?P<got>.*)' provided for param '(?P<key>[^']*)'")
_UNKNOWN_KEY = re.compile(r"Extraneous argument '(?P<key>[^']*)'")
_MISSING_KEYS = re.compile(r"Missing required arguments for parameter\(s\): (?P<keys>[\w., ]+)")
_NO_CLASS = "polymorphic construction:\n"
_CHZ_ERRORS = (
    ConstructionException,
    ExtraneousBlueprintArg,
    InvalidBlueprintArg,
    MissingBlueprintArg,
)


def parse_arguments(config_class: type[Any], arguments: Sequence[str]) -> Any:
    """The config that ``key=value`` arguments (also ``--key=value``) describe.

    A nested object is chosen with ``name=module:Class`` and set with ``name.KEY=value``.

    Raises:
        ConfigurationError: An unknown key, one that is given twice, a value of another type, a
            required key left out.
        SystemExit: ``--help`` or ``--version`` was asked for, and printed.
    """
    if any(argument in HELP for argument in arguments):
        print_help(config_class, _values(arguments))
        sys.exit(0)
    if VERSION in arguments:
        print(version_line())
        sys.exit(0)
    given = _given(arguments, config_class)
    words = [f"{key}={value}" for key, value in given.items()]
    keys = _keys(config_class, given)
    try:
        config = chz.Blueprint(config_class).make_from_argv(words, allow_hyphens=True)
    except _CHZ_ERRORS as error:
        raise ConfigurationError(_in_words(str(error), keys, given)) from error
    # A base class without fields can be built from no keys at all, so chz misses nothing.
    if missing := _missing_classes(keys, given):
        raise ConfigurationError(_say_missing(missing, keys))
    return config


def _given(arguments: Sequence[str], config_class: type[Any]) -> dict[str, str]:
    """Key to value, with second names replaced; refuses what is no ``key=value``, or is twice."""
    aliases = aliases_of(config_class)
    given: dict[str, str] = {}
    written: dict[str, str] = {}
    for argument in arguments:
        if "=" not in argument:
            raise ConfigurationError(_say_no_value(argument, config_class))
        name, _, value = argument.partition("=")
        name = name.removeprefix("--")
        key = aliases.get(name, name)
        if key in given:
            names = name if name == written[key] else f"{written[key]} and {name}"
            means = "" if name == written[key] else ", which mean the same key"
            raise ConfigurationError(
                f"{names}: got it twice{means}, with {given[key]!r} and {value!r}; "
                "expected it once: leave one out"
            )
        given[key], written[key] = value, name
    return given


def _values(arguments: Iterable[str]) -> dict[str, str]:
    pairs = (argument.removeprefix("--").partition("=") for argument in arguments)
    return {name: value for name, equals, value in pairs if equals}


def _keys(config_class: type[Any], given: Mapping[str, str]) -> dict[str, Key]:
    return {key.name: key for key in keys_of(config_class, given)}


def _say_no_value(argument: str, config_class: type[Any]) -> str:
    name = argument.lstrip("-")
    known = [key.name for key in keys_of(config_class)]
    if name in known:
        return f"{name}: got no value, expected {name}=VALUE{SEE_HELP}"
    hint = hint_for(name, known) or nearest(name, known)
    return f"command line: got {argument!r}, expected key=value{hint}{SEE_HELP}"


def _in_words(message: str, keys: Mapping[str, Key], given: Mapping[str, str]) -> str:
    """chz's message as a sentence of ours where its kind is known, else as it is."""
    if unknown := _UNKNOWN_KEY.search(message):
        return _say_unknown(unknown["key"], keys)
    if missing := _MISSING_KEYS.search(message):
        names = [*missing["keys"].strip().split(", "), *_missing_classes(keys, given)]
        places = {name: place for place, name in enumerate(keys)}
        return _say_missing(sorted(names, key=lambda name: places.get(name, 0)), keys)
    wrong = _WRONG_VALUE.search(message)
    if wrong:
        return _say_wrong_value(wrong["got"], wrong["key"], keys, message)
    return f"command line: {message.strip()}{SEE_HELP}"


def _say_unknown(name: str, keys: Mapping[str, Key]) -> str:
    outer, dot, _ = name.rpartition(".")
    # A key of an object whose class was not chosen: what is missing is the choice.
    if dot and outer in keys and nested_class(keys[outer].type) is not None:
        inner = [key for key in keys if key.startswith(f"{outer}.")]
        if not inner:
            return f"{name}: there is no such key, since {_choose(keys[outer])}{SEE_HELP}"
        return f"{name}: there is no such key{nearest(name, inner) or nearest(name, keys)}"
    hint = hint_for(name, keys) or nearest(name, keys)
    return f"{name}: there is no such key{hint}{SEE_HELP}"


def _say_wrong_value(got: str, name: str, keys: Mapping[str, Key], message: str) -> str:
    key = keys.get(name)
    if key is None:  # an entry of a dict or a list: chz knows its type
        kind = re.search(r"Could not cast '.*' to (\S+)", message)
        return f"{name}: got {got!r}, expected a value of type {kind[1] if kind else 'its list'}"
    expected = f"{name}: got {got!r}, expected {describe_type(key.type)}"
    declared = nested_class(key.type)
    if declared is None:
        return f"{expected}{nearest(got, choices_of(key.type))}"
    reason = message.rpartition(_NO_CLASS)[2].strip() if _NO_CLASS in message else ""
    module, _, class_name = got.partition(":")
    meant = nearest(class_name, [c for c in _classes_in(module, declared) if c != class_name])
    return f"{expected}; {reason}{meant}".removesuffix("; ")


def _classes_in(module: str, base: type[Any]) -> list[str]:
    try:
        found = vars(importlib.import_module(module))
    except (ImportError, ValueError):
        return []
    return [n for n, value in found.items() if isinstance(value, type) and issubclass(value, base)]


def _missing_classes(keys: Mapping[str, Key], given: Mapping[str, str]) -> list[str]:
    # `...name=` sets a key at any depth, so what it gives cannot be told from here.
    if any(name.startswith("...") for name in given):
        return []
    return [key.name for key in keys.values() if key.nested and key.required and _left(key, given)]


def _left(key: Key, given: Mapping[str, str]) -> bool:
    return key.name not in given


def _say_missing(names: Sequence[str], keys: Mapping[str, Key]) -> str:
    pieces = [_piece(name, keys) for name in names]
    got = "got no value" if len(names) == 1 else "got no values"
    expected = "it is required" if len(names) == 1 else "they are required"
    return f"{', '.join(names)}: {got}, and {expected}; add {' '.join(pieces)}{SEE_HELP}"


def _piece(name: str, keys: Mapping[str, Key]) -> str:
    if any(key.startswith(f"{name}.0.") for key in keys):  # a list of objects
        return f"{name}.0.KEY=…"
    return f"{name}=module:Class" if name in keys and keys[name].nested else f"{name}=…"


def _choose(key: Key) -> str:
    return f"{key.name}=module:Class does not say which class it belongs to"
