"""Checks that the settings of several benchmarks have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError, nearest


def check_least(config: Any, bounds: Mapping[str, int]) -> None:
    """Raises ``ConfigurationError`` for the first setting below its bound."""
    for name, least in bounds.items():
        if getattr(config, name) < least:
            raise ConfigurationError(
                f"{name}: got {getattr(config, name)}, expected a whole number >= {least}"
            )


def check_choices(field: str, chosen: Sequence[str], known: Sequence[str]) -> None:
    """Raises ``ConfigurationError`` unless ``chosen`` are some of ``known``, each once."""
    expected = f"expected some of {', '.join(known)}"
    if not chosen:
        raise ConfigurationError(f"{field}: got none, {expected}")
    for name in chosen:
        if name not in known:
            raise ConfigurationError(f"{field}: got {name!r}, {expected}{nearest(name, known)}")
    if len(set(chosen)) < len(chosen):
        raise ConfigurationError(
            f"{field}: got {','.join(chosen)}, expected each at most once; set repeats to run "
            "them several times"
        )


def check_output(output: str | None) -> None:
    """Raises ``ConfigurationError`` if the file could not be written in the end."""
    if output is not None and not Path(output).expanduser().parent.is_dir():
        raise ConfigurationError(
            f"output: the folder of {output} does not exist; create it or write elsewhere"
        )
