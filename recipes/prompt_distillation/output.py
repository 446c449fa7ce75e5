"""Writes the file of distilled conversations; a stopped run continues it.

``NAME.jsonl`` holds the kept answers, as conversations without the prompt. The folder
``NAME.jsonl.run/`` has ``config.json`` (the settings the answers depend on) and ``dropped.jsonl``
(the other answers, each with its reason). A killed run leaves whole rows only. At the end the rows
are sorted by query, so that the file does not depend on the order of the answers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.prompt_distillation.queries import Query, Reason
from tinker_cookbook.run.jsonl import Row, append_row, encode_row, read_rows
from tinker_cookbook.run.lock import RunLock
from tinker_cookbook.run.paths import ensure_writable_dir, local_path, write_atomically


def run_folder(output_file: str | Path) -> Path:
    """Returns the run folder of a file of distilled conversations."""
    path = Path(output_file).expanduser()
    return path.with_name(f"{path.name}.run")


def read_dropped(output_file: str | Path) -> list[Row]:
    """Returns the dropped answers: ``id``, ``sample``, ``query``, ``answer``,
    ``reason``, and ``label`` and ``group`` where known."""
    return read_rows(run_folder(output_file) / "dropped.jsonl")


def read_settings(output_file: str | Path) -> dict[str, Any]:
    """Returns the settings that the answers were sampled with; empty if they are unknown."""
    rows = read_rows(run_folder(output_file) / "config.json")
    return rows[0] if rows else {}


class DistillationFile:
    """Writes a file of distilled conversations, or continues it; one process at a time.

    Entering raises ``ConfigurationError`` if another process writes this file, or if it was made
    with other ``settings`` (what the answers depend on, as JSON data) or for other queries.
    """

    def __init__(
        self,
        output_file: str,
        settings: Mapping[str, Any],
        queries: Sequence[Query],
        samples_per_query: int,
    ) -> None:
        self.path = local_path(output_file, "output_file")
        self.folder = run_folder(self.path)
        self._settings = dict(settings)
        self._order = {query.id: i for i, query in enumerate(queries)}
        self._queries, self._samples = list(queries), samples_per_query
        self.kept: list[Row] = []
        self.dropped: list[Row] = []

    def __enter__(self) -> Self:
        ensure_writable_dir(self.path.parent, "output_file")
        # Without its settings a file cannot be continued, and a file of the user's must not change.
        if self.path.exists() and not (self.folder / "config.json").exists():
            raise ConfigurationError(
                f"output_file: {self.path} exists and was not made by this recipe (there is no "
                f"{self.folder.name}/config.json); give another output_file=…, or move "
                "it away"
            )
        self._lock = RunLock(self.folder)
        self._lock.__enter__()
        # __exit__ does not run if __enter__ raises, so the lock is released here.
        try:
            self._continue()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.release()

    def _continue(self) -> None:
        before = read_settings(self.path)
        if not before:
            write_atomically(self.folder / "config.json", encode_row(self._settings))
        # The earlier settings were read from JSON, so compare in that form: tuples become lists.
        now = json.loads(encode_row(self._settings))
        changed = [
            f"{key} was {_shown(before.get(key))} and is {_shown(now.get(key))}"
            for key in dict.fromkeys([*before, *now])
            if before and before.get(key) != now.get(key)
        ]
        # The rows that exist were sampled with the earlier settings.
        if changed:
            raise ConfigurationError(
                f"output_file: {self.path} was created with other settings: {'; '.join(changed)}. "
                f"Give another output_file=…, repeat the settings, or delete {self.path.name} and "
                f"{self.folder.name} to start over"
            )
        self.kept, self.dropped = read_rows(self.path), read_dropped(self.path)
        unknown = [row for row in self.kept + self.dropped if row.get("id") not in self._order]
        if unknown:
            raise ConfigurationError(
                f"input_file: {self.path} has {len(unknown)} answers to queries that are not "
                "among these; expected the same queries, to which others may be added. Give "
                "another output_file=…, or the input_file that it was created with"
            )

    def missing(self) -> list[Query]:
        """Returns the queries that have fewer answers than ``samples_per_query``."""
        have = Counter(row["id"] for row in self.kept + self.dropped)
        return [query for query in self._queries if have[query.id] < self._samples]

    def add(self, query: Query, answers: Sequence[tuple[str, str | Reason]]) -> None:
        """Writes a query's answers: for each the teacher's text, and the student's target or the
        reason why it is dropped. Answers that a stopped run wrote already are skipped."""
        # A killed run may have written only some samples of a query.
        have = {row["sample"] for row in self.kept + self.dropped if row["id"] == query.id}
        for sample, (text, target) in enumerate(answers):
            if sample in have:
                continue
            about: Row = {"id": query.id, "sample": sample}
            known = {"label": query.label, "group": query.group}
            about |= {key: value for key, value in known.items() if value is not None}
            if isinstance(target, Reason):
                row = {**about, "query": query.text, "answer": text, "reason": target.value}
                append_row(self.folder / "dropped.jsonl", row)
                self.dropped.append(row)
            else:
                turns = [("user", query.text), ("assistant", target)]
                messages = [{"role": role, "content": content} for role, content in turns]
                row = {"messages": messages, **about, "answer": text}
                append_row(self.path, row)
                self.kept.append(row)

    def finish(self) -> None:
        """Puts the rows into the order of the queries."""
        for path, rows in ((self.path, self.kept), (self.folder / "dropped.jsonl", self.dropped)):
            # With concurrency answers arrive in any order; the finished file must not depend on it.
            rows.sort(key=lambda row: (self._order[row["id"]], row["sample"]))
            content = b"".join(map(encode_row, rows))
            # Rows were appended in the order in which answers arrived.
            if rows and path.read_bytes() != content:
                write_atomically(path, content)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"
