"""The settings of a run as lines for the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chz
from chz.util import MISSING

from tinker_cookbook.run.paths import CONFIG_FILE
from tinker_cookbook.utils.command_line.entrypoint import program_takes

_WIDTH = 100
_PLAIN = (str, int, float, bool, type(None))


def setting_lines(config: Any, log_path: str) -> list[str]:
    """Returns the settings of ``config`` that differ from their defaults, as keys of the program.

    ``config.json`` has all of them.
    """
    lines = ["settings that are not the default:"]
    shown: dict[str, Any] = {}
    for name, value in changed(config):
        # A recipe has the settings of its data at the top, and some that it does not let change.
        key = name if program_takes(name.partition(".")[0]) else name.rpartition(".")[2]
        if program_takes(key):
            shown.setdefault(key, value)
    line = ""
    for key, value in shown.items():
        text = str(value)
        # Long texts, such as a system prompt, would hide the others.
        word = f"{key}={shlex.quote(text if len(text) <= _WIDTH else text[:_WIDTH] + '…')}"
        if line and len(line) + len(word) + 1 > _WIDTH:
            lines.append(line)
            line = ""
        line = f"{line} {word}" if line else f"  {word}"
    return [*lines, *filter(None, [line]), f"  (all settings: {Path(log_path) / CONFIG_FILE})"]


def changed(config: Any, prefix: str = "", run: Any = None) -> Iterator[tuple[str, Any]]:
    """Yields dotted name and value of each plain setting that is not the default.

    A dataset repeats settings of its ``run``, such as the renderer's name: they come once.
    """
    for field in chz.chz_fields(config).values():
        name, value = f"{prefix}{field.logical_name}", getattr(config, field.logical_name)
        if chz.is_chz(value):
            if field._default is MISSING:
                kind = type(value)
                yield name, f"{kind.__module__}:{kind.__qualname__}"
            yield from changed(value, f"{name}.", run or config)
            continue
        plain = isinstance(value, _PLAIN) or (
            isinstance(value, (list, tuple)) and all(isinstance(one, _PLAIN) for one in value)
        )
        again = getattr(run, field.logical_name.removesuffix("_for_tokenizer"), MISSING)
        if plain and value not in (_default(field), again):
            yield name, value


def _default(field: Any) -> Any:
    factory = field._default_factory
    return factory() if callable(factory) else field._default
