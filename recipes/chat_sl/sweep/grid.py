"""The points of a grid of settings, and the names of their folders."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tinker_cookbook.sweep.arguments import run_name


def grid(
    axes: Mapping[str, Sequence[Any]] | None = None, /, **kwargs: Sequence[Any]
) -> list[dict[str, Any]]:
    """Returns the product of all values; the last setting changes fastest.

    Args:
        axes: Setting -> its values, for names that are no Python identifiers.
        kwargs: Further settings in the same form.

    Raises:
        TypeError: The values of a setting are no list.
    """
    values = {**(axes or {}), **kwargs}
    for name, choices in values.items():
        # A text is a sequence too, of its characters.
        if isinstance(choices, str) or not isinstance(choices, Sequence):
            raise TypeError(f"{name}: got {choices!r}, must be a list, as {name}=[{choices!r}]")
    return [dict(zip(values, point, strict=True)) for point in itertools.product(*values.values())]


def default_run_name(overrides: Mapping[str, Any]) -> str:
    """Returns the folder of a run, such as ``learning_rate=0.0003_lora_rank=32``."""
    return "_".join(run_name({name: str(value)}) for name, value in overrides.items())
