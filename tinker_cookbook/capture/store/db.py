"""The recorded rows, in SQLite.

A transaction is on the disk before its caller gets an answer, so a killed process loses nothing
that it acknowledged. A batch is stored as a whole or not at all, and a repeated row is stored once.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from tinker_cookbook.capture.store.schema import (
    ANNOTATIONS_COLUMNS,
    WIRE_ROWS_COLUMNS,
    Column,
    ListOf,
    Scalar,
    json_encoded_column_names,
    render_sqlite_ddl,
)

JsonDict = dict[str, Any]
"""A JSON object."""

_COLUMNS = {"wire_rows": WIRE_ROWS_COLUMNS, "annotations": ANNOTATIONS_COLUMNS}
# By which a repeated row is known. SQLite holds NULLs for different, so a row without a part of its
# key is never a repetition.
_KEYS = {"wire_rows": "sampling_session_id, seq_id, sample_idx", "annotations": "event_id"}
_WIRE_ROWS = render_sqlite_ddl(WIRE_ROWS_COLUMNS, table="wire_rows", primary_key="cursor")
_ANNOTATIONS = render_sqlite_ddl(
    ANNOTATIONS_COLUMNS, table="annotations", primary_key="cursor", unique=("event_id",)
)
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS seq (value INTEGER NOT NULL);
INSERT INTO seq SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM seq);
{_WIRE_ROWS};
CREATE UNIQUE INDEX IF NOT EXISTS wire_rows_dedupe ON wire_rows ({_KEYS["wire_rows"]});
CREATE INDEX IF NOT EXISTS wire_rows_run ON wire_rows (run_id, cursor);
{_ANNOTATIONS};
CREATE INDEX IF NOT EXISTS annotations_run ON annotations (run_id, cursor);
"""
_RUNS = """
SELECT run_id, MAX(run_attempt), SUM(is_row), SUM(1 - is_row) FROM (
    SELECT run_id, run_attempt, 1 AS is_row FROM wire_rows
    UNION ALL SELECT run_id, NULL, 0 FROM annotations
) GROUP BY run_id ORDER BY run_id
"""
_FILTERS = ("split", "iteration", "group_idx", "traj_idx", "purpose")
_BUSY_SECONDS = 30.0  # another process may write to the file


@dataclass
class IngestResult:
    """How many rows of a batch are new, and how many were there."""

    inserted: int = 0
    deduped: int = 0


@dataclass
class RunSummary:
    """A run, which exists once there is a row of it."""

    run_id: str
    latest_attempt: int | None = None
    num_wire_rows: int = 0
    num_annotations: int = 0

    def to_dict(self) -> dict[str, str | int | None]:
        """Returns the fields."""
        return asdict(self)


@dataclass
class StreamEvent:
    """A row of either table; ``event_type`` is ``wire_row`` or ``annotation``."""

    cursor: int
    event_type: str
    data: JsonDict = field(default_factory=dict)


class CaptureDB:
    """The database file of a store; may be used by several threads."""

    def __init__(self, path: str | Path) -> None:
        self._lock = threading.Lock()
        # No transactions but the ones begun below.
        self._connection = sqlite3.connect(
            path, timeout=_BUSY_SECONDS, check_same_thread=False, isolation_level=None
        )
        self._connection.row_factory = sqlite3.Row
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=FULL")
        self._connection.executescript(_SCHEMA)

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._connection.close()

    def ingest_wire(self, rows: list[JsonDict]) -> IngestResult:
        """Stores sampled sequences; see ``WIRE_ROWS_COLUMNS``.

        Raises:
            ValueError: A value is not of its column's type. Nothing is stored.
        """
        return self._ingest("wire_rows", "wire row", rows)

    def ingest_annotations(self, annotations: list[JsonDict]) -> IngestResult:
        """Stores other records; see ``ANNOTATIONS_COLUMNS``. Each needs an ``event_id``.

        Raises:
            ValueError: A value is not of its column's type. Nothing is stored.
        """
        return self._ingest("annotations", "annotation", annotations)

    def list_runs(self) -> list[RunSummary]:
        """Returns the runs, sorted by ``run_id``."""
        with self._lock:
            return [RunSummary(*found) for found in self._connection.execute(_RUNS)]

    def query_rows(
        self,
        run_id: str,
        *,
        filters: dict[str, str | int] | None = None,
        cursor: int = 0,
        limit: int = 1000,
    ) -> list[JsonDict]:
        """Returns sampled sequences of a run with a larger cursor.

        ``filters``: values of split, iteration, group_idx, traj_idx or purpose.
        """
        filters = filters or {}
        if unknown := set(filters).difference(_FILTERS):
            raise ValueError(f"Unsupported filter: {min(unknown)}; expected one of {_FILTERS}")
        return self._select("wire_rows", {"run_id": run_id, **filters}, cursor, limit)

    def query_annotations(
        self, run_id: str, *, kind: str | None = None, cursor: int = 0, limit: int = 1000
    ) -> list[JsonDict]:
        """Returns other records of a run with a larger cursor; ``kind``: only of this one."""
        filters = {"run_id": run_id} if kind is None else {"run_id": run_id, "kind": kind}
        return self._select("annotations", filters, cursor, limit)

    def stream_events(
        self, run_id: str | None, cursor: int = 0, limit: int = 1000
    ) -> list[StreamEvent]:
        """Returns rows of both tables with a larger cursor, in the order of their arrival."""
        filters = {} if run_id is None else {"run_id": run_id}
        events = [
            StreamEvent(row["cursor"], event_type, row)
            for table, event_type in (("wire_rows", "wire_row"), ("annotations", "annotation"))
            for row in self._select(table, filters, cursor, limit)
        ]
        return sorted(events, key=lambda event: event.cursor)[:limit]

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            # Locks out other processes before the first read.
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def _ingest(self, table: str, label: str, rows: list[JsonDict]) -> IngestResult:
        columns = _COLUMNS[table]
        # Encoded before the transaction: the database is free meanwhile.
        values = [_checked_values(table, label, row) for row in rows]
        places = ", ".join("?" * len(columns))
        insert = f"INSERT INTO {table} VALUES ({places}) ON CONFLICT ({_KEYS[table]}) DO NOTHING"
        inserted = 0
        with self._transaction():
            (last,) = self._connection.execute("SELECT value FROM seq").fetchone()
            for row in values:
                row[0] = last + inserted + 1
                inserted += self._connection.execute(insert, row).rowcount
            self._connection.execute("UPDATE seq SET value = ?", (last + inserted,))
        return IngestResult(inserted, len(rows) - inserted)

    def _select(
        self, table: str, filters: Mapping[str, str | int], cursor: int, limit: int
    ) -> list[JsonDict]:
        where = " AND ".join(["cursor > ?", *(f"{name} = ?" for name in filters)])
        query = f"SELECT * FROM {table} WHERE {where} ORDER BY cursor LIMIT ?"
        with self._lock:
            found = self._connection.execute(query, (cursor, *filters.values(), limit)).fetchall()
        rows = [dict(row) for row in found]
        for name in json_encoded_column_names(_COLUMNS[table]):
            for row in rows:
                row[name] = json.loads(row[name] or "null")
        return rows


_TYPES: dict[str, Any] = {
    "string": str,
    "int32": Annotated[int, Field(ge=-(2**31), lt=2**31)],
    "int64": Annotated[int, Field(ge=-(2**63), lt=2**63)],
    "float32": float,
    "float64": float,
    "json": Any,
}


def _row_model(columns: tuple[Column, ...]) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for column in columns:
        item = column.type.item if isinstance(column.type, ListOf) else column.type
        assert isinstance(item, Scalar)
        kind = _TYPES[item.kind]
        kind = list[kind] if isinstance(column.type, ListOf) else kind
        # The store itself gives a row its cursor, and a run without a name one.
        if column.nullable or column.name in ("cursor", "run_id"):
            fields[column.name] = kind | None, None
        else:
            fields[column.name] = Annotated[kind, Field(min_length=1)], ...
    return create_model("Row", __config__=ConfigDict(strict=True), **fields)


_MODELS = {table: _row_model(columns) for table, columns in _COLUMNS.items()}


def _checked_values(table: str, label: str, row: JsonDict) -> list[Any]:
    """Returns the values in the order of the columns, the cursor empty.

    SQLite itself would keep a text in a column of numbers, where no filter finds it. Raises
    ``ValueError``.
    """
    try:
        found = dict(_MODELS[table].model_validate(row))
    except ValidationError as error:
        problem = error.errors()[0]
        name, message = ".".join(map(str, problem["loc"])), problem["msg"]
        raise ValueError(f"{label} field {name!r}: {message}") from None
    found |= {"cursor": None, "run_id": found["run_id"] or "unattributed"}
    for name in json_encoded_column_names(_COLUMNS[table]):
        if found[name] is not None:
            found[name] = json.dumps(found[name])
    return list(found.values())
