"""Parses ``key=value`` arguments into a config; errors name the nearest valid key."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import chz
from chz.blueprint import (
    ConstructionException,
    ExtraneousBlueprintArg,
    InvalidBlueprintArg,
    MissingBlueprintArg,
)

from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.utils.command_line.config_file import CONFIG, read_settings, values_of
from tinker_cookbook.utils.command_line.foreign_names import hint_for
from tinker_cookbook.utils.command_line.help import print_help
from tinker_cookbook.utils.command_line.keys import (
    Key,
    aliases_of,
    choices_of,
    describe_type,
    keys_of,
    nested_class,
)
from tinker_cookbook.utils.command_line.programs import version_line

SEE_HELP = " (--help=all lists the keys)"
HELP_ALL = "--help=all"
HELP = ("--help", "-h", HELP_ALL)
VERSION = "--version"
# Parts of chz's messages.
_WRONG_VALUE = re.compile(r"argument '(?P<got>.*)' provided for param '(?P<key>[^']*)'")
_UNKNOWN_KEY = re.compile(r"Extraneous argument '(?P<key>[^']*)'")
_MISSING_KEYS = re.compile(r"Missing required arguments for parameter\(s\): (?P<keys>[\w., ]+)")
_NO_CLASS = "polymorphic construction:\n"


def parse_arguments(config_class: type[Any], arguments: Sequence[str]) -> Any:
    """Returns the config that ``key=value`` arguments (also ``--key=value``) describe.

    A nested object is chosen with ``name=module:Class`` and set with ``name.KEY=value``.
    ``config=FILE`` reads settings from a file, see ``read_settings``.

    Raises:
        ConfigurationError: An unknown or repeated key, a value of another type, or a required key
            that is missing.
        SystemExit: After ``--help`` or ``--version``.
    """
    # Before any check, so that help is printed for an incomplete or wrong command line as well.
    if any(argument in HELP for argument in arguments):
        pairs = (argument.removeprefix("--").partition("=") for argument in arguments)
        chosen = {name: value for name, equals, value in pairs if equals}
        print_help(config_class, chosen, HELP_ALL in arguments)
        sys.exit(0)
    if VERSION in arguments:
        print(version_line())
        sys.exit(0)
    given = _given(arguments, config_class)
    blueprint, recorded = chz.Blueprint(config_class), None
    if CONFIG in given and CONFIG not in chz.chz_fields(config_class):
        recorded = read_settings(given.pop(CONFIG), config_class)
        # Keys of the command line come first.
        if isinstance(recorded, config_class):
            blueprint.apply(dict(values_of(recorded, given)))
        else:
            given, recorded = _given(recorded, config_class) | given, None
    words = [f"{key}={value}" for key, value in given.items()]
    keys = {key.name: key for key in keys_of(config_class, given)}
    try:
        config = blueprint.make_from_argv(words, allow_hyphens=True)
    except (
        ConstructionException,
        ExtraneousBlueprintArg,
        InvalidBlueprintArg,
        MissingBlueprintArg,
    ) as error:
        raise ConfigurationError(_translate(str(error), keys, given)) from error
    # A base class without fields can be built from no keys at all, so chz misses nothing.
    if recorded is None and (missing := _missing(keys, given)):
        raise ConfigurationError(_missing_message(missing, keys))
    return config


def _given(arguments: Sequence[str], config_class: type[Any]) -> dict[str, str]:
    """Returns the value of each key; raises for words that are not ``key=value`` and repeats."""
    aliases = aliases_of(config_class)
    given: dict[str, str] = {}
    written: dict[str, str] = {}
    for argument in arguments:
        if "=" not in argument:
            name = argument.lstrip("-")
            known = [key.name for key in keys_of(config_class)]
            if name in known:
                raise ConfigurationError(f"{name}: got no value, expected {name}=VALUE{SEE_HELP}")
            hint = hint_for(name, known) or nearest(name, known)
            raise ConfigurationError(
                f"command line: got {argument!r}, expected key=value{hint}{SEE_HELP}"
            )
        name, _, value = argument.partition("=")
        name = name.removeprefix("--")
        # By the field's name, so that a key and its alias count as one key given twice.
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


def _translate(message: str, keys: Mapping[str, Key], given: Mapping[str, str]) -> str:
    """Converts chz's error to an error of this package if its kind is known."""
    # chz's errors have the key and the value only in their text.
    if unknown := _UNKNOWN_KEY.search(message):
        return _unknown_message(unknown["key"], keys)
    if missing := _MISSING_KEYS.search(message):
        names = {*missing["keys"].strip().split(", "), *_missing(keys, given)}
        order = {name: position for position, name in enumerate(keys)}
        return _missing_message(sorted(names, key=lambda name: order.get(name, 0)), keys)
    wrong = _WRONG_VALUE.search(message)
    if wrong:
        return _wrong_value_message(wrong["got"], wrong["key"], keys, message)
    return f"command line: {message.strip()}{SEE_HELP}"


def _unknown_message(name: str, keys: Mapping[str, Key]) -> str:
    outer, dot, _ = name.rpartition(".")
    if dot and outer in keys and nested_class(keys[outer].type) is not None:
        inner = [key for key in keys if key.startswith(f"{outer}.")]
        # The keys of a nested object are known once its class is chosen.
        if not inner:
            return (
                f"{name}: there is no such key, since {outer}=module:Class is not given, which "
                f"chooses the class that has the keys{SEE_HELP}"
            )
        return f"{name}: there is no such key{nearest(name, inner) or nearest(name, keys)}"
    hint = hint_for(name, keys) or nearest(name, [*keys, CONFIG])
    return f"{name}: there is no such key{hint}{SEE_HELP}"


def _wrong_value_message(got: str, name: str, keys: Mapping[str, Key], message: str) -> str:
    key = keys.get(name)
    if key is None:  # an entry of a dict or a list: only chz knows its type
        kind = re.search(r"Could not cast '.*' to (\S+)", message)
        return f"{name}: got {got!r}, expected a value of type {kind[1] if kind else 'its list'}"
    expected = f"{name}: got {got!r}, expected {describe_type(key.type)}"
    declared = nested_class(key.type)
    if declared is None:
        return f"{expected}{nearest(got, choices_of(key.type))}"
    # Only the text after this marker names the cause.
    reason = message.rpartition(_NO_CLASS)[2].strip() if _NO_CLASS in message else ""
    module, _, class_name = got.partition(":")
    try:
        # Only classes of that module that the field accepts are suggested.
        found = vars(importlib.import_module(module))
    except (ImportError, ValueError):
        found = {}
    classes = [n for n, c in found.items() if isinstance(c, type) and issubclass(c, declared)]
    if "to be a subtype" in reason:  # chz names both classes once more
        reason = f"{class_name} is none"
    meant = nearest(class_name, [name for name in classes if name != class_name])
    return f"{expected}; {reason}{meant}".removesuffix("; ")


def _missing(keys: Mapping[str, Key], given: Mapping[str, str]) -> list[str]:
    # `...name=` sets a key at any depth, so which keys it covers is unknown here.
    if any(name.startswith("...") for name in given):
        return []
    return [key.name for key in keys.values() if key.required and key.name not in given]


def _missing_message(names: Sequence[str], keys: Mapping[str, Key]) -> str:
    examples = []
    for name in names:
        if any(key.startswith(f"{name}.0.") for key in keys):  # a list of objects
            examples.append(f"{name}.0.KEY=…")
        else:
            nested = name in keys and keys[name].nested
            examples.append(f"{name}=module:Class" if nested else f"{name}=…")
    got = "got no value" if len(names) == 1 else "got no values"
    expected = "it is required" if len(names) == 1 else "they are required"
    return f"{', '.join(names)}: {got}, and {expected}; add {' '.join(examples)}{SEE_HELP}"
