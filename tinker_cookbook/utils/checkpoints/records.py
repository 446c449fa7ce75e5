"""``checkpoints.jsonl``: the list of a run's checkpoints, a line each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tinker_cookbook.exceptions import CheckpointError
from tinker_cookbook.utils.jsonl import read_rows
from tinker_cookbook.utils.paths import local_path

CHECKPOINTS_FILE = "checkpoints.jsonl"


@dataclass(frozen=True)
class CheckpointRecord:
    """One line of ``checkpoints.jsonl``.

    Attributes:
        name: ``"000020"`` or ``"final"``.
        batch: Optimizer updates in it.
        epoch: Epoch that the next batch belongs to.
        final: Whether the run was complete.
        state_path: ``tinker://RUN/weights/NAME``, or ``None`` if only the sampler was saved.
        sampler_path: ``tinker://RUN/sampler_weights/NAME``, or ``None``.
        extra: All other keys of the line (token counts, ``rolling``, what a recipe adds).
    """

    name: str
    batch: int | None = None
    epoch: int | None = None
    final: bool = False
    state_path: str | None = None
    sampler_path: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> CheckpointRecord:
        """Reads a line; keys that are not fields go into ``extra``."""
        if not isinstance(row.get("name"), str):
            raise CheckpointError(f"a line of {CHECKPOINTS_FILE} has no name: {dict(row)}")
        known = {f.name for f in fields(cls)} - {"extra"}
        named = {key: value for key, value in row.items() if key in known}
        return cls(**named, extra={key: row[key] for key in row if key not in known})

    def to_row(self) -> dict[str, Any]:
        """The line's content; fields that are not set are left out."""
        row: dict[str, Any] = {"name": self.name}
        for key in ("batch", "epoch", "state_path", "sampler_path"):
            if getattr(self, key) is not None:
                row[key] = getattr(self, key)
        row.update(self.extra)
        return {**row, "final": True} if self.final else row

    def get(self, key: str, default: Any = None) -> Any:
        """A field or an extra key by name."""
        value = self.extra.get(key) if key not in _FIELDS else getattr(self, key)
        return default if value is None else value

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise KeyError(key)
        return value


_FIELDS = {f.name for f in fields(CheckpointRecord)} - {"extra"}


def load_checkpoints_file(log_dir: str | os.PathLike[str]) -> list[CheckpointRecord]:
    """All checkpoints of a log folder, oldest first; none where there is no file.

    Raises:
        DataFormatError: A line other than a torn last one is broken.
    """
    rows = read_rows(local_path(log_dir, "log_dir") / CHECKPOINTS_FILE)
    return [CheckpointRecord.from_row(row) for row in rows]


def get_last_checkpoint(
    log_dir: str | os.PathLike[str], required_key: str = "state_path"
) -> CheckpointRecord | None:
    """The newest checkpoint that has ``required_key``, or ``None``.

    Args:
        log_dir: The run's folder.
        required_key: ``state_path`` to resume, ``sampler_path`` to sample.
    """
    for record in reversed(load_checkpoints_file(log_dir)):
        if record.get(required_key) is not None:
            return record
    return None
