"""``--help`` of a command line: every key with its meaning, its type and its default."""

from __future__ import annotations

import enum
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

import chz
from chz.util import MISSING

_PLAIN = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
_WIDTH = 100


@dataclass(frozen=True)
class Key:
    """One ``key=value`` that a config takes."""

    name: str
    type: Any
    meaning: str
    default: Any
    required: bool


def keys_of(config_class: type[Any], prefix: str = "") -> Iterator[Key]:
    """The keys of a chz class; those of nested ones as ``outer.inner``."""
    for name, field in chz.chz_fields(config_class).items():
        if isinstance(field.final_type, type) and chz.is_chz(field.final_type):
            yield from keys_of(field.final_type, f"{prefix}{name}.")
            continue
        default, factory = field._default, field._default_factory
        required = default is MISSING and not callable(factory)
        if default is MISSING and callable(factory):
            default = factory()
        yield Key(f"{prefix}{name}", field.final_type, field._doc, default, required)


def choices_of(kind: Any) -> tuple[str, ...]:
    """The values a type admits where it names them (Literal, enum), else nothing."""
    if get_origin(kind) is Literal:
        return tuple(str(value) for value in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return tuple(str(member.value) for member in kind)
    return ()


def describe_type(kind: Any) -> str:
    """A type in words: ``a number or None``, ``one of linear, cosine, constant``."""
    choices = choices_of(kind)
    if choices:
        return f"one of {', '.join(choices)}"
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(describe_type(part) for part in get_args(kind))
    if kind in (None, type(None)):
        return "None"
    return _PLAIN.get(kind) or getattr(kind, "__name__", str(kind))


def help_text(config_class: type[Any], command: str) -> str:
    """What ``--help`` prints.

    Args:
        config_class: The chz class that the arguments build.
        command: How the program is started, for the first line.
    """
    lines = [f"{command} [key=value ...]", ""]
    doc = (config_class.__doc__ or "").strip()
    lines += [*textwrap.wrap(" ".join(doc.split()), _WIDTH), ""] if doc else []
    own = config_class.__annotations__
    # What the recipe itself declares comes before what it shares with others.
    keys = sorted(keys_of(config_class), key=lambda key: key.name.split(".")[0] not in own)
    indent = 4 + max((len(key.name) for key in keys), default=0)
    for key in keys:
        shown = "required" if key.required else f"default {_shown(key.default)}"
        text = f"{key.meaning.rstrip('.')} [{describe_type(key.type)}; {shown}]"
        wrapped = textwrap.wrap(
            text, max(40, _WIDTH - indent), break_long_words=False, break_on_hyphens=False
        )
        lines.append(f"  {key.name:{indent - 4}}  {wrapped[0]}")
        lines += [" " * indent + line for line in wrapped[1:]]
    return "\n".join(lines)


def _shown(default: Any) -> str:
    value = default.value if isinstance(default, enum.Enum) else default
    return repr(value) if value == "" or isinstance(value, (list, dict)) else str(value)
