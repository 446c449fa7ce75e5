"""Files of a record."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from tinker_cookbook.exceptions import DataError, TrainingError
from tinker_cookbook.record.schema import FOLDER, SCHEMA_VERSION, VERSION_KEY
from tinker_cookbook.run.paths import local_path, write_atomically

if TYPE_CHECKING:
    import pyarrow as pa


def record_file(log_path: str | os.PathLike[str], step: int, split: str) -> Path:
    """Returns the file of a step (as in ``metrics.jsonl``) and a split."""
    # A split is named by its evaluator, which may contain any character. ``Record.steps`` has the
    # name again; different names must not share a file.
    name = re.sub(r"[^\w.-]", lambda match: quote(match[0], safe="", errors="replace"), split)
    return local_path(log_path) / FOLDER / f"step_{step:06d}.{name}.parquet"


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Returns a Parquet file's ``columns`` (default: all), without those that it lacks.

    Raises:
        DataError: The file is damaged, or a later version of the package wrote it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            version = int((file.schema_arrow.metadata or {}).get(VERSION_KEY, b"1"))
            if version > SCHEMA_VERSION:
                raise DataError(
                    f"{path}: has version {version} of the record, expected at most "
                    f"{SCHEMA_VERSION}; update tinker_cookbook"
                )
            table = file.read(columns, use_threads=False)  # the files are small
        table.validate(full=True)  # texts are UTF-8
    except (DataError, FileNotFoundError):
        raise
    # pyarrow raises OSError for a part that it cannot decode, and ValueError for odd metadata.
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{path}: the file is damaged, or its writing was cut off ({error}); the other steps "
            "do not need it"
        ) from error
    return table


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
