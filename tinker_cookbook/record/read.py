"""Reader of the record of a run: which steps it has, their tables, and the tokens of an episode."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from tinker_cookbook.exceptions import DataError
from tinker_cookbook.record.episodes import Tokens
from tinker_cookbook.record.files import read_table, record_file
from tinker_cookbook.record.origin import ORIGIN_KEY
from tinker_cookbook.record.schema import FILE_NAME, FOLDER
from tinker_cookbook.run.paths import local_path

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Record:
    """The record of the run in ``log_path``; reads files only, also while the run writes."""

    log_path: Path

    def steps(self) -> dict[int, list[str]]:
        """Returns the splits that each step has, in the order of steps; reads only names."""
        found: dict[int, list[str]] = {}
        folder = self.log_path / FOLDER
        for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
            match = FILE_NAME.fullmatch(name)
            if match is not None:
                found.setdefault(int(match[1]), []).append(unquote(match[2]))
        return found

    def table(
        self, step: int, split: str = "train", columns: list[str] | None = None
    ) -> pa.Table | None:
        """Returns the rows of a step; ``None`` if its file is absent.

        Raises:
            DataError: The file is damaged, or a later version of the package wrote it.
        """
        try:
            return read_table(record_file(self.log_path, step, split), columns)
        except FileNotFoundError:
            return None

    def origin(self, step: int, split: str = "train") -> dict[str, str]:
        """Returns what computed a recorded step (see ``origin_of``); empty in older records."""
        import pyarrow.parquet as pq

        metadata = pq.read_schema(record_file(self.log_path, step, split)).metadata or {}
        return json.loads(metadata.get(ORIGIN_KEY, b"{}"))


def open_record(log_path: str | os.PathLike[str]) -> Record:
    """Returns the record of a run; raises ``DataError`` if it has none."""
    path = local_path(log_path)
    if not (path / FOLDER).is_dir():
        raise DataError(
            f"{path}: has no folder {FOLDER}, expected a run with record=full; runs of "
            "earlier versions have no record"
        )
    return Record(path)


def whole_prompts(turns: list[dict[str, Any]]) -> list[Tokens]:
    """Returns the whole prompt of each turn of one episode, from its rows in order."""
    prompts: list[Tokens] = []
    before = np.empty(0, np.int32)
    for turn in turns:
        new = np.asarray(turn["prompt"], np.int32)
        prompts.append(np.concatenate([before[: turn["prompt_kept"]], new]))
        before = np.concatenate([prompts[-1], np.asarray(turn["answer"], np.int32)])
    return prompts
