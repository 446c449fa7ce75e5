"""Writer of the record: one Parquet file for each step and split, made in a thread of its own."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tinker_cookbook.exceptions import TinkerCookbookError, TrainingError
from tinker_cookbook.record.origin import ORIGIN_KEY
from tinker_cookbook.record.schema import (
    FILE_NAME,
    FOLDER,
    SCHEMA_VERSION,
    VERSION_KEY,
    RecordLevel,
)
from tinker_cookbook.record.vocabulary import write_vocabulary
from tinker_cookbook.run.paths import local_path

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# At most this many steps wait, so that their data do not fill the memory.
_MAX_PENDING = 2


def record_file(log_path: str | os.PathLike[str], step: int, split: str) -> Path:
    """Returns the file of a step (as in ``metrics.jsonl``) and a split."""
    # A split is named by its evaluator, which may contain any character.
    name = re.sub(r"[^\w-]", "_", split)
    return local_path(log_path) / FOLDER / f"step_{step:06d}.{name}.parquet"


class RecordWriter:
    """Writes the tables of a run, in the order of the calls.

    A file is complete or absent. ``resume_step`` is the last step of the checkpoint that the run
    continues from; files of later steps are removed, because the run writes these steps again.
    """

    def __init__(
        self, log_path: str | os.PathLike[str], level: RecordLevel = "full", resume_step: int = -1
    ) -> None:
        self.log_path, self.level = local_path(log_path), level
        self.origin: dict[str, str] = {}
        """Written to each file; see ``origin_of``."""
        self._pending: deque[Future[None]] = deque()
        # A single thread, so that steps are written in order.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="record")
        folder = self.log_path / FOLDER
        for path in folder.glob("*.parquet") if folder.is_dir() else ():
            name = FILE_NAME.fullmatch(path.name)
            if name is not None and int(name[1]) > resume_step:
                path.unlink()

    def start(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Queues the texts of the tokens, which are written once for a run."""
        if self.level == "full":
            self._submit(partial(write_vocabulary, self.log_path, tokenizer))

    def write(self, step: int, split: str, make_table: Callable[[], pa.Table]) -> None:
        """Queues the table of a step; ``make_table`` is called in the writer's thread.

        Blocks only while two earlier tables are queued. Raises ``TrainingError`` if an earlier
        table could not be written.
        """
        if self.level == "off":
            return
        path = record_file(self.log_path, step, split)
        self._submit(partial(_write, path, make_table, self.level, self.origin))

    def _submit(self, work: Callable[[], None]) -> None:
        # An error of an earlier step ends the run here.
        while self._pending and (self._pending[0].done() or len(self._pending) >= _MAX_PENDING):
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(work))

    def flush(self) -> None:
        """Waits until all tables are written; raises ``TrainingError`` if one could not be."""
        while self._pending:
            self._pending.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.flush()
        except TinkerCookbookError as second:
            if error is None:
                raise
            # The caller must see the error of the block.
            logger.warning("while handling %r: %s", error, second)
        finally:
            self._thread.shutdown()


def _write(
    path: Path, make_table: Callable[[], pa.Table], level: str, origin: dict[str, str]
) -> None:
    import pyarrow as pa  # 0.2 s of CPU, and only runs that are recorded need it
    import pyarrow.parquet as pq

    table = make_table()
    if level == "summary":
        table = table.select([one.name for one in table.schema if not pa.types.is_list(one.type)])
    metadata = {
        **(table.schema.metadata or {}),
        VERSION_KEY: str(SCHEMA_VERSION).encode(),
        ORIGIN_KEY: json.dumps(origin).encode(),
    }
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        # Statistics of columns would be half of a small file.
        pq.write_table(
            table.replace_schema_metadata(metadata),
            temporary,
            compression="zstd",
            write_statistics=False,
        )
        # After a kill the file is whole or absent. After a power cut it may be empty, which readers
        # skip; waiting for the disk at each step would cost more than a step's record is worth.
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise TrainingError(
            f"{path}: the record of this step cannot be written: {error.strerror or error}; "
            "those of earlier steps are intact. Free some space there, or set record=off"
        ) from error
