"""Paths of saved weights, ``tinker://RUN/KIND/NAME``."""

from __future__ import annotations

from typing import Literal

from tinker_cookbook.exceptions import ConfigurationError

_FIELD_OF = {"weights": "state_path", "sampler_weights": "sampler_path"}


def check_tinker_path(
    field: str, path: str | None, kind: Literal["weights", "sampler_weights"], run: str
) -> None:
    """Raises ``ConfigurationError`` for a path that names no saved weights; None is no path.

    ``kind`` and ``run`` ("the teacher's run") are for the message: either kind is let through,
    as a server may call its kinds otherwise.
    """
    parts = (path or "").removeprefix("tinker://").split("/")
    if path is None or (path.startswith("tinker://") and len(parts) == 3 and all(parts)):
        return
    raise ConfigurationError(
        f"{field}: got {path!r}, expected tinker://RUN/{kind}/NAME; the {_FIELD_OF[kind]} in "
        f"checkpoints.jsonl of {run} is one"
    )
