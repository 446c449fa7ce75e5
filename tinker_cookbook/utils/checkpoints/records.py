"""``checkpoints.jsonl``: the list of a run's checkpoints, a line each."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tinker_cookbook.exceptions import CheckpointError
from tinker_cookbook.utils.run_folder.jsonl import read_rows
from tinker_cookbook.utils.run_folder.paths import local_path

logger = logging.getLogger(__name__)

CHECKPOINTS_FILE = "checkpoints.jsonl"


@dataclass
class CheckpointRecord:
    """One line of ``checkpoints.jsonl``.

    Attributes:
        name: ``"000020"`` or ``"final"``.
        batch: Optimizer updates in it.
        epoch: Epoch that the next batch belongs to.
        final: Whether the run was complete; ``None`` where the line does not say.
        state_path: ``tinker://RUN/weights/NAME``, or ``None`` if only the sampler was saved.
        sampler_path: ``tinker://RUN/sampler_weights/NAME``, or ``None``.
        extra: All other keys of the line (token counts, ``rolling``, what a recipe adds).
    """

    name: str
    batch: int | None = None
    epoch: int | None = None
    final: bool | None = None
    state_path: str | None = None
    sampler_path: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A field's name among the extra keys would be written twice.
        twice = sorted(_FIELDS & set(self.extra))
        if twice:
            logger.warning("checkpoint %s: extra keys %s are left out", self.name, twice)
            self.extra = {key: value for key, value in self.extra.items() if key not in twice}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> CheckpointRecord:
        """Reads a line; keys that are not fields go into ``extra``.

        Raises:
            CheckpointError: There is no name.
        """
        if not isinstance(d.get("name"), str):
            raise CheckpointError(f"a line of {CHECKPOINTS_FILE} has no name: {dict(d)}")
        named = {key: value for key, value in d.items() if key in _FIELDS}
        return cls(**named, extra={key: d[key] for key in d if key not in _FIELDS})

    def to_dict(self) -> dict[str, Any]:
        """Returns the line's content; fields that are not set are left out."""
        row = {key: getattr(self, key) for key in _FIELD_ORDER if getattr(self, key) is not None}
        return row | self.extra

    def has(self, key: str) -> bool:
        """Returns whether a field is set, or an extra key is there."""
        return getattr(self, key) is not None if key in _FIELDS else key in self.extra

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a field by name, ``None`` where it is not set; or an extra key, else
        ``default``."""
        return getattr(self, key) if key in _FIELDS else self.extra.get(key, default)

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise KeyError(key)
        return value


_FIELD_ORDER = tuple(f.name for f in fields(CheckpointRecord) if f.name != "extra")
_FIELDS = frozenset(_FIELD_ORDER)


def load_checkpoints_file(log_dir: str | os.PathLike[str]) -> list[CheckpointRecord]:
    """Returns all checkpoints of a log folder, oldest first; none where there is no file.

    Raises:
        DataFormatError: A line other than a torn last one is broken.
    """
    rows = read_rows(local_path(log_dir, "log_dir") / CHECKPOINTS_FILE)
    return [CheckpointRecord.from_dict(row) for row in rows]


def get_last_checkpoint(
    log_dir: str | os.PathLike[str], required_key: str = "state_path"
) -> CheckpointRecord | None:
    """Returns the newest checkpoint that has ``required_key``, or ``None``.

    Args:
        log_dir: The run's folder.
        required_key: ``state_path`` to resume, ``sampler_path`` to sample.
    """
    for record in reversed(load_checkpoints_file(log_dir)):
        if record.get(required_key) is not None:
            return record
    return None
