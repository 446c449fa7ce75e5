"""The runs of a sweep: the product of all values, and a name for each."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinker_cookbook.exceptions import ConfigurationError

_UNSAFE = re.compile(r"[^A-Za-z0-9_.=+,-]+")
_LONGEST_NAME = 120  # file systems take 255 bytes; ".metrics" and the like are to fit as well
_ONLY_RUN = "run"

Value = float | int | bool | str | None


@dataclass(frozen=True)
class Run:
    """One point of the grid.

    Attributes:
        name: Name of its folder below the sweep's.
        settings: All its ``key=value``, as they were written.
        swept: Those of them that differ between runs.
    """

    name: str
    settings: Mapping[str, str]
    swept: Mapping[str, str]


def make_runs(settings: Mapping[str, Sequence[str]]) -> tuple[Run, ...]:
    """Returns the product of all values; the last key changes fastest.

    Raises:
        ConfigurationError: Two points would share a folder, on a file system that does not tell
            upper from lower case.
    """
    swept = [key for key, values in settings.items() if len(values) > 1]
    runs: dict[str, Run] = {}
    for point in itertools.product(*settings.values()):
        chosen = dict(zip(settings, point, strict=True))
        own = {key: chosen[key] for key in swept}
        run = Run(run_name(own), chosen, own)
        if run.name.lower() in runs:
            raise ConfigurationError(
                f"{', '.join(swept)}: got two runs of the name {run.name}, expected values that "
                "differ in more than upper and lower case"
            )
        runs[run.name.lower()] = run
    return tuple(runs.values())


def run_name(swept: Mapping[str, str]) -> str:
    """Returns ``learning_rate=1e-4,lora_rank=8``, in characters that every file system takes.

    What had to be replaced or cut is told apart by a few digits of a hash of the whole. A name
    depends on its own point alone, so a grid that grows finds its finished runs again.
    """
    wanted = ",".join(f"{key}={value}" for key, value in swept.items()) or _ONLY_RUN
    name = ",".join(f"{key}={_last_part(value)}" for key, value in swept.items()) or _ONLY_RUN
    name = _UNSAFE.sub("-", name.strip("."))
    if name == wanted and len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(wanted.encode()).hexdigest()[:6]
    return f"{name[:_LONGEST_NAME]}-{digest}"


def _last_part(value: str) -> str:
    """Returns the name of a file or folder, since the way there is long and mostly the same."""
    return value.rstrip("/").rpartition("/")[2] or value


def typed(text: str) -> Value:
    """Returns a setting as the value that it stands for: a number, True, False, None, or text."""
    if text in ("True", "False"):
        return text == "True"
    if text == "None":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def is_number(value: Value) -> bool:
    """Returns whether ``typed`` found a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
