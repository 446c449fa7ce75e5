"""Writer of the record: one Parquet file for each step and split, made in a thread of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tinker_cookbook.record.files import record_file, write_file
from tinker_cookbook.record.images import ImageFiles
from tinker_cookbook.record.origin import ORIGIN_KEY, origin_of
from tinker_cookbook.record.schema import (
    FILE_NAME,
    FOLDER,
    SCHEMA_VERSION,
    VERSION_KEY,
    RecordLevel,
)
from tinker_cookbook.record.vocabulary import write_vocabulary
from tinker_cookbook.run.background import BackgroundWriter
from tinker_cookbook.run.paths import local_path

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

    from tinker_cookbook.backends import Connection


_COUNTED = 4096
"""Values of a column of which the different ones are counted."""


class RecordWriter(BackgroundWriter):
    """Writes the tables of a run, in the order of the calls.

    A file is complete or absent. ``resume_step`` is the last step of the checkpoint that the run
    continues from; files of later steps are removed, because the run writes these steps again.
    """

    def __init__(
        self, log_path: str | os.PathLike[str], level: RecordLevel = "full", resume_step: int = -1
    ) -> None:
        super().__init__("record")
        self.log_path, self.level = local_path(log_path), level
        self.origin: dict[str, str] = {}
        """Written to each file; see ``origin_of``."""
        self.images = ImageFiles(self.log_path if level == "full" else None)
        """Stores the images of the tables."""
        folder = self.log_path / FOLDER
        for path in folder.glob("*.parquet") if folder.is_dir() else ():
            name = FILE_NAME.fullmatch(path.name)
            if name is not None and int(name[1]) > resume_step:
                path.unlink()
        for torn in folder.rglob(".*.tmp") if folder.is_dir() else ():
            torn.unlink()  # left by a killed process

    def connect(self, connection: Connection) -> None:
        """Notes what computes the steps; samples of the bundled engine get their entropies."""
        self.origin = origin_of(connection)
        engine: Any = getattr(connection.service, "engine", None)
        if engine is not None:
            engine.sample_entropies = self.level == "full"

    def start(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Queues the texts of the tokens, which are written once for a run."""
        if self.level == "full":
            self.submit(partial(write_vocabulary, self.log_path, tokenizer))

    def write(self, step: int, split: str, make_table: Callable[[], pa.Table]) -> None:
        """Queues the table of a step; ``make_table`` is called in the writer's thread.

        Raises ``TrainingError`` if an earlier file could not be written.
        """
        if self.level == "off":
            return

        def work() -> None:
            write_table(self.log_path, step, split, make_table(), self.level, self.origin)

        self.submit(work)


def write_table(
    log_path: Path, step: int, split: str, table: pa.Table, level: str, origin: dict[str, str]
) -> None:
    """Writes the table of a step and split, without lists at the level ``summary``.

    Raises:
        TrainingError: It cannot be written.
    """
    import pyarrow as pa  # 0.2 s of CPU, and only runs that are recorded need it
    import pyarrow.parquet as pq

    if level == "summary":
        table = table.select([one.name for one in table.schema if not pa.types.is_list(one.type)])
    metadata = {
        **(table.schema.metadata or {}),
        VERSION_KEY: str(SCHEMA_VERSION).encode(),
        ORIGIN_KEY: json.dumps(origin).encode(),
    }
    sink = pa.BufferOutputStream()
    options: Any = {"compression": "zstd", "use_dictionary": _repeating(table)}
    # Statistics of columns would be half of a small file.
    options["write_statistics"] = False
    pq.write_table(table.replace_schema_metadata(metadata), sink, **options)
    write_file(record_file(log_path, step, split), memoryview(sink.getvalue()))


def _repeating(table: pa.Table) -> list[str]:
    """Returns the columns that are smaller as indices into a dictionary of their values."""
    import pyarrow as pa
    from pyarrow.compute import call_function  # pc.list_flatten has no type

    found = []
    for field in table.schema:
        name, kind, values = field.name, field.type, table[field.name]
        if pa.types.is_list(kind):
            name, kind, values = (
                f"{name}.list.element",
                kind.value_type,
                call_function("list_flatten", [values]),
            )
        if pa.types.is_string(kind):
            found.append(name)
        elif not pa.types.is_nested(kind):
            # Token ids, weights and advantages often repeat, log-probabilities hardly ever.
            few = values[:_COUNTED].drop_null().to_numpy(zero_copy_only=False)
            distinct = len(np.unique(few))
            index_bits = (distinct - 1).bit_length()
            if distinct * kind.bit_width < len(few) * (kind.bit_width - index_bits):
                found.append(name)
    return found
