"""Record of a benchmark's answers and their tokens, in the format of runs (``docs/record.md``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tinker_cookbook.eval.run.types import StoredTrajectory
from tinker_cookbook.exceptions import DataError
from tinker_cookbook.record.episodes import RecordedGroup, group_rows, json_text, table_of
from tinker_cookbook.record.images import ImageFiles
from tinker_cookbook.record.read import Record
from tinker_cookbook.record.schema import RecordLevel, turn_schema
from tinker_cookbook.record.vocabulary import write_vocabulary
from tinker_cookbook.record.write import write_table
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup


class AnswerRecord:
    """Answers sampled by this process, and the file of the benchmark in ``folder``.

    ``group`` is the position of a problem, ``member`` the number of the answer, and ``tags`` has
    the id of the problem. Without a folder nothing is recorded.
    """

    def __init__(self, folder: Path | None, level: RecordLevel) -> None:
        self._folder, self._level = folder, "off" if folder is None else level
        self._images = ImageFiles(folder if level == "full" else None)
        self._rows: dict[tuple[int, int], list[dict[str, Any]]] = {}

    def add(self, row: StoredTrajectory, trajectory: Trajectory) -> None:
        """Keeps the tokens of an answer."""
        if self._level == "off":
            return
        group = TrajectoryGroup([trajectory], [0.0], [{}])
        rows = group_rows(RecordedGroup(row.idx, group, [row.example_id]), self._images)
        for one in rows:
            one |= {"member": row.sample, "weights_step": None}
        self._rows[row.idx, row.sample] = rows

    def write(self, benchmark: str, key: str, stored: Iterable[StoredTrajectory]) -> None:
        """Writes the answers with their grades; those of an earlier process stay.

        ``key`` identifies weights and settings; earlier answers of another key are dropped.
        """
        if self._folder is None or not self._rows:
            return
        grades = {(row.idx, row.sample): row for row in stored}
        record, split = Record(self._folder), f"eval_{benchmark}"
        rows = []
        with contextlib.suppress(DataError):  # a damaged file is replaced
            earlier = record.table(0, split)
            if earlier is not None and record.origin(0, split).get("key") == key:
                found = earlier.to_pylist()
                rows = [r for r in found if (r["group"], r["member"]) not in self._rows]
        rows += [row for rows in self._rows.values() for row in rows]
        for row in rows:
            grade = grades.get((row["group"], row["member"]))
            if grade is not None:
                # An answer that could not be graded has no reward.
                row["episode_reward"] = None if grade.error is not None else grade.reward
                row["episode_metrics"] = json_text(grade.metrics)
                row["episode_logs"] = json_text(grade.logs)
        rows.sort(key=lambda row: (row["group"], row["member"], row.get("turn") or 0))
        table = table_of(rows, turn_schema())
        write_table(self._folder, 0, split, table, self._level, {"key": key})

    def write_vocabulary(self, tokenizer: Any) -> None:
        """Writes the texts of the tokens."""
        if self._folder is not None and self._rows and self._level == "full":
            write_vocabulary(self._folder, tokenizer)
