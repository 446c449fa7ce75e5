"""Files of a record."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tinker_cookbook.exceptions import TrainingError
from tinker_cookbook.record.schema import FOLDER
from tinker_cookbook.run.paths import local_path, write_atomically


def record_file(log_path: str | os.PathLike[str], step: int, split: str) -> Path:
    """Returns the file of a step (as in ``metrics.jsonl``) and a split."""
    # A split is named by its evaluator, which may contain any character.
    name = re.sub(r"[^\w-]", "_", split)
    return local_path(log_path) / FOLDER / f"step_{step:06d}.{name}.parquet"


def write_file(path: Path, content: bytes | memoryview) -> None:
    """Writes a file of bytes; a killed run leaves a whole file or none.

    Raises:
        TrainingError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # After a power cut it may be empty, which readers skip; waiting for the disk at each step
        # would cost more than a step's record is worth.
        write_atomically(path, content, durable=False)
    except OSError as error:
        raise TrainingError(
            f"{path}: the record of this step cannot be written: {error.strerror or error}; "
            "those of earlier steps are intact. Free some space there, or set record=off"
        ) from error
