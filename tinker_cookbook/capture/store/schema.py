"""Columns of the store's tables, and the same columns for SQLite, Arrow and ClickHouse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

# A type by its names in SQLite, ClickHouse and Arrow. ``json`` is any JSON value, kept as text.
_SCALARS = {
    "string": ("TEXT", "String", "string"),
    "int32": ("INTEGER", "Int32", "int32"),
    "int64": ("INTEGER", "Int64", "int64"),
    "float32": ("REAL", "Float32", "float32"),
    "float64": ("REAL", "Float64", "float64"),
    "bool": ("INTEGER", "Bool", "bool_"),
    "timestamp_us_utc": ("TEXT", "DateTime64(6, 'UTC')", "timestamp"),
    "json": ("TEXT", "String", "string"),
}


@dataclass(frozen=True)
class Scalar:
    """A single value; ``kind`` is a key of ``_SCALARS``."""

    kind: str


@dataclass(frozen=True)
class ListOf:
    """A list of values of one type."""

    item: LogicalType


@dataclass(frozen=True)
class MapOf:
    """A mapping."""

    key: LogicalType
    value: LogicalType


@dataclass(frozen=True)
class StructOf:
    """Named values."""

    fields: tuple[Column, ...]


LogicalType = Scalar | ListOf | MapOf | StructOf


@dataclass(frozen=True)
class Column:
    """A column; ``nullable``: a row may be without a value."""

    name: str
    type: LogicalType
    nullable: bool = False


def _columns(text: str) -> tuple[Column, ...]:
    """Columns from ``NAME:KIND``; ``[]`` marks a list, ``?`` a column that may be empty."""

    def column(name: str, kind: str) -> Column:
        item = Scalar(kind.strip("?[]"))
        return Column(name, ListOf(item) if "[]" in kind else item, "?" in kind)

    return tuple(column(*word.split(":")) for word in text.split())


WIRE_ROWS_COLUMNS: tuple[Column, ...] = _columns(
    "cursor:int64 run_id:string run_attempt:int32? split:string? iteration:int32? group_idx:int32? "
    "traj_idx:int32? purpose:string? sampling_session_id:string? seq_id:int64? sample_idx:int32? "
    "policy_version:string? created_at:float64? prompt_tokens:int32[]? sampled_tokens:int32[]? "
    "logprobs:float32[]? metadata:json?"
)
"""A row for each sampled sequence. ``cursor`` counts the rows of both tables."""

ANNOTATIONS_COLUMNS: tuple[Column, ...] = _columns(
    "cursor:int64 event_id:string run_id:string kind:string? payload:json? created_at:float64?"
)
"""All other records: training operations, failed samples, and what a user adds."""

WIRE_ROWS_ORDER_BY: tuple[str, ...] = ("run_id", "cursor")
ANNOTATIONS_ORDER_BY: tuple[str, ...] = ("run_id", "cursor")


def json_encoded_column_names(columns: tuple[Column, ...]) -> tuple[str, ...]:
    """Returns the columns that SQLite keeps as JSON text."""
    return tuple(c.name for c in columns if not isinstance(c.type, Scalar) or c.type.kind == "json")


def sqlite_type(logical: LogicalType) -> str:
    """Returns the type in SQLite, which keeps lists, maps and structs as JSON text."""
    return _SCALARS[logical.kind][0] if isinstance(logical, Scalar) else "TEXT"


def render_sqlite_ddl(
    columns: tuple[Column, ...],
    *,
    table: str,
    primary_key: str | None = None,
    unique: tuple[str, ...] = (),
) -> str:
    """Returns the statement that creates the table in SQLite if it is missing."""
    lines = []
    for column in columns:
        required = "" if column.nullable else " NOT NULL"
        key = " PRIMARY KEY" if column.name == primary_key else required
        is_unique = " UNIQUE" if column.name in unique else ""
        lines.append(f"{column.name} {sqlite_type(column.type)}{key}{is_unique}")
    return f"CREATE TABLE IF NOT EXISTS {table} (\n    " + ",\n    ".join(lines) + "\n)"


def clickhouse_type(logical: LogicalType, *, nullable: bool = False) -> str:
    """Returns the type in ClickHouse, where only single values can be ``Nullable``."""
    match logical:
        case Scalar(kind):
            name = _SCALARS[kind][1]
            return f"Nullable({name})" if nullable else name
        case ListOf(item):
            return f"Array({clickhouse_type(item)})"
        case MapOf(key, value):
            return f"Map({clickhouse_type(key)}, {clickhouse_type(value)})"
        case StructOf(fields):
            return f"Tuple({', '.join(map(_clickhouse_column, fields))})"


def _clickhouse_column(column: Column) -> str:
    return f"{column.name} {clickhouse_type(column.type, nullable=column.nullable)}"


def render_clickhouse_ddl(
    columns: tuple[Column, ...], *, table: str, order_by: tuple[str, ...], engine: str = "MergeTree"
) -> str:
    """Returns the statement that creates the table in ClickHouse."""
    body = ",\n    ".join(map(_clickhouse_column, columns))
    order = f"({', '.join(order_by)})" if order_by else "tuple()"
    return f"CREATE TABLE {table} (\n    {body}\n) ENGINE = {engine}\nORDER BY {order}"


def _arrow_type(logical: LogicalType) -> pa.DataType:
    import pyarrow as pa

    match logical:
        case Scalar("timestamp_us_utc"):
            return pa.timestamp("us", tz="UTC")
        case Scalar(kind):
            return getattr(pa, _SCALARS[kind][2])()
        case ListOf(item):
            return pa.list_(_arrow_type(item))
        case MapOf(key, value):
            return pa.map_(_arrow_type(key), _arrow_type(value))
        case StructOf(fields):
            return pa.struct(list(render_arrow_schema(fields)))


def render_arrow_schema(columns: tuple[Column, ...]) -> pa.Schema:
    """Returns the columns as a schema of pyarrow."""
    import pyarrow as pa

    return pa.schema([pa.field(c.name, _arrow_type(c.type), nullable=c.nullable) for c in columns])
