"""The keys that a configuration class accepts on the command line.

A field whose type is another chz class is *nested*: ``dataset_builder=module:Class`` selects the
class, and ``dataset_builder.KEY=…`` sets a field of it.
"""

from __future__ import annotations

import enum
import importlib
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

import chz
from chz.util import MISSING

from tinker_cookbook.utils.imports import OFFICIAL

_PLAIN = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
_NO_CHOICE: Mapping[str, str] = {}


@dataclass(frozen=True)
class Key:
    """One ``key=value`` that a config accepts.

    Attributes:
        name: With dots for a field of a nested object.
        type: The annotation of the field.
        meaning: The ``doc`` of the field, or of the same field of a base class.
        default: Default of the field; not used if ``required`` is true.
        required: Whether it must be on the command line.
        needed_with: Name of the optional object that needs this key once it is built, or ``""``.
        nested: Whether the value is a class to build, written as ``module:Class``.
    """

    name: str
    type: Any
    meaning: str
    default: Any
    required: bool
    needed_with: str = ""
    nested: bool = False


def keys_of(
    config_class: type[Any], chosen: Mapping[str, str] = _NO_CHOICE, prefix: str = ""
) -> Iterator[Key]:
    """Yields the keys of a chz class; keys of nested classes as ``outer.inner``.

    ``chosen`` has the classes that the command line selects for nested keys, their keys replace
    those of the declared class. ``prefix`` comes before each name.
    """
    for name, field in chz.chz_fields(config_class).items():
        full, meaning = f"{prefix}{name}", _meaning(config_class, name)
        required = _is_required(config_class, field)
        if (element := _element_class(field.final_type)) is not None:
            yield from _keys_of_list(full, field, meaning, element, chosen, required)
            continue
        # chz has no public access to the defaults of a field.
        default, factory = field._default, field._default_factory
        inner = nested_class(field.final_type)
        if inner is None:
            if default is MISSING and callable(factory):
                default = factory()
            yield Key(full, field.final_type, meaning, default, required)
            continue
        # The class on the command line has the keys that can follow it, not the declared one.
        built = find_class(chosen[full]) if full in chosen else None
        keys = list(keys_of(built or inner, chosen, f"{full}."))
        # A class without fields is a base class, so a class must be selected.
        if not keys or built is not None:
            shown = None if default is MISSING else default
            yield Key(full, field.final_type, meaning, shown, required, nested=True)
        optional = not required and built is None
        for key in keys:
            # The object is optional: its keys are needed only if one of them is given.
            if optional and key.required:
                key = Key(key.name, key.type, key.meaning, None, False, full, key.nested)
            yield key


def _meaning(config_class: type[Any], name: str) -> str:
    """Returns the ``doc`` of a field; a class that only changes a default has that of its base."""
    bases = (chz.chz_fields(base) for base in config_class.__mro__ if chz.is_chz(base))
    return next((base[name]._doc for base in bases if name in base and base[name]._doc), "")


def _is_required(config_class: type[Any], field: Any) -> bool:
    if (field.metadata or {}).get("required"):
        return not config_class.is_recipe()
    return field._default is MISSING and not callable(field._default_factory)


def _keys_of_list(
    full: str,
    field: Any,
    meaning: str,
    element: type[Any],
    chosen: Mapping[str, str],
    required: bool,
) -> Iterator[Key]:
    """Yields the list, and the keys of its elements on the command line, at least of one."""
    starts = f"{full}."
    # The elements on the command line: NAME.0.KEY=… and NAME.1=… name the elements 0 and 1.
    indices = {
        key.removeprefix(starts).partition(".")[0] for key in chosen if key.startswith(starts)
    }
    # The list exists as soon as it has an element.
    yield Key(full, field.final_type, meaning, [], required and not indices)
    for index in sorted(indices) or ["0"]:
        item = f"{full}.{index}"
        built = find_class(chosen.get(item, "")) or element
        for key in keys_of(built, chosen, f"{item}."):
            optional = not indices and key.required
            needed = full if optional else key.needed_with
            required = key.required and not optional
            yield Key(key.name, key.type, key.meaning, key.default, required, needed, key.nested)


def _element_class(kind: Any) -> type[Any] | None:
    if get_origin(kind) is not list or not get_args(kind):
        return None
    element = get_args(kind)[0]
    return element if isinstance(element, type) and chz.is_chz(element) else None


def nested_class(kind: Any) -> type[Any] | None:
    """Returns the chz class of a field of type ``X`` or ``X | None``, if ``X`` is one."""
    for part in get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,):
        if isinstance(part, type) and chz.is_chz(part):
            return part
    return None


def find_class(name: str) -> type[Any] | None:
    """Returns the chz class that ``module:Class`` names, or ``None``."""
    module, _, attribute = name.partition(":")
    if not attribute:
        return None
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        return None
    return found if isinstance(found, type) and chz.is_chz(found) else None


def choices_of(kind: Any) -> tuple[str, ...]:
    """Returns the values of a Literal or an enum, or of a union with one; else nothing."""
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(choice for part in get_args(kind) for choice in choices_of(part))
    if get_origin(kind) is Literal:
        return tuple(str(value) for value in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return tuple(str(member.value) for member in kind)
    return ()


def describe_type(kind: Any) -> str:
    """Returns a type in words: ``a number or None``, ``one of linear, cosine, constant``."""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(describe_type(part) for part in get_args(kind))
    choices = choices_of(kind)
    if choices:
        return f"one of {', '.join(choices)}"
    if kind in (None, type(None)):
        return "None"
    if isinstance(kind, type) and chz.is_chz(kind):
        return f"module:Class, a {kind.__name__}"
    if (element := _element_class(kind)) is not None:
        return f"a list of {element.__name__}, as NAME.0=module:Class or NAME.0.KEY=…"
    if get_origin(kind) is list and get_args(kind):
        choices = choices_of(get_args(kind)[0])
        return f"a list of {', '.join(choices)}" if choices else "a list"
    return _PLAIN.get(kind) or getattr(kind, "__name__", str(kind))


def aliases_of(config_class: type[Any]) -> dict[str, str]:
    """Returns the second names of keys: alias -> field name, of a class and its bases."""
    table: dict[str, dict[str, str]] = importlib.import_module(f"{OFFICIAL}.keys").KEYS
    aliases: dict[str, str] = {}
    for base in reversed(config_class.__mro__):
        module = base.__module__
        # ``python -m`` gives the module of a program this name.
        if module == "__main__" and (spec := sys.modules[module].__spec__) is not None:
            module = spec.name
        name = f"{module}.{base.__qualname__}".removeprefix("tinker_cookbook.")
        aliases |= table.get(name, {})
    # A subclass may have a field of the same name, or a class lack the field that is meant.
    fields = chz.chz_fields(config_class)
    return {
        alias: key
        for alias, key in aliases.items()
        if alias not in fields and key.partition(".")[0] in fields
    }
