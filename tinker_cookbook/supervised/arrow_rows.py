"""Rows of Arrow tables: parquet files, and the tables and streams of the ``datasets`` library.

Arrow gives all objects of a column the members of each of them, with null where an object has none:
the arguments of a call and the parameters of a tool would get those of all other rows. These nulls
are left out. Null cells, null entries of lists, and nulls inside JSON are values of the row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.run.digests import may_have_files
from tinker_cookbook.supervised.row_images import resolve_paths

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

_T = TypeVar("_T")
_JSON = "json"


def parquet_stream(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows, with one batch at a time in memory; raises DataFormatError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as opened:
            # pyarrow returns JSON as text.
            clean = _WithoutNulls.of(opened.schema_arrow, decode=True)
            for batch in opened.iter_batches(batch_size=1024):
                yield from map(clean.row, batch.to_pylist())
    except (pa.ArrowException, OSError) as error:
        raise DataFormatError(f"{file}: not readable as parquet: {error}") from error


def parquet_table(files: Sequence[Path]) -> Sequence[Any]:
    """Returns the rows of files with the same columns, read on demand; raises DataFormatError."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = []
    for file in files:
        try:
            tables.append(pq.read_table(file))
        except (pa.ArrowException, OSError) as error:
            raise DataFormatError(f"{file}: not readable as parquet: {error}") from error
        tables[-1] = _with_resolved_paths(tables[-1], file.parent)
    # Read rows from the columns, without a second copy in the user's cache.
    table = datasets.Dataset(pa.concat_tables(tables))
    return cast("Sequence[Any]", without_arrow_nulls(table))


def _with_resolved_paths(table: pa.Table, folder: Path) -> pa.Table:
    """Returns the table with relative image paths that begin with ``folder``."""
    import pyarrow as pa

    def resolved(name: str, value: Any) -> Any:
        row = {name: value}
        resolve_paths(row, folder)
        # A list in a text is decoded, but the column keeps its type.
        decoded = isinstance(value, str) and not isinstance(row[name], str)
        return json.dumps(row[name]) if decoded else row[name]

    for at, field in enumerate(table.schema):
        if may_have_files(field.name, table.column(at)):
            chunks = [
                pa.array([resolved(field.name, value) for value in chunk.to_pylist()], field.type)
                for chunk in table.column(at).chunks
            ]
            table = table.set_column(at, field, pa.chunked_array(chunks, field.type))
    return table


def without_arrow_nulls(rows: _T) -> _T:
    """Returns a ``datasets.Dataset`` whose rows are without invented nulls; others unchanged."""
    # A table can exist only if its library was imported.
    library, table = sys.modules.get("datasets"), cast(Any, rows)
    # Rows in another format (of a framework, or of the user's) have no such objects.
    if library and isinstance(rows, library.Dataset) and table.format["type"] is None:
        return table.with_transform(_WithoutNulls.of(table.features.arrow_schema))
    return rows


def stream_without_nulls(stream: datasets.IterableDataset) -> datasets.IterableDataset:
    """Returns a stream whose rows are without invented nulls, if it is a stream of tables."""
    # Streams of generators have no schema: their rows are Python objects.
    features = getattr(stream, "features", None)
    if features is None:
        return stream
    return stream.map(_WithoutNulls.of(features.arrow_schema).row)


@dataclass(frozen=True)
class _WithoutNulls:
    """Removes the nulls of rows and of batches of a schema."""

    plans: Mapping[str, Any]
    """Columns that have objects: a plan is a dictionary of plans for an object, a list of one plan
    for a list, or ``_JSON`` for text to decode."""

    @classmethod
    def of(cls, schema: pa.Schema, decode: bool = False) -> _WithoutNulls:
        plans = {field.name: _plan(field.type, decode) for field in schema}
        return cls({name: plan for name, plan in plans.items() if plan is not None})

    def row(self, row: dict[str, Any]) -> dict[str, Any]:
        return {name: _clean(value, self.plans.get(name)) for name, value in row.items()}

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {
            name: values
            if (plan := self.plans.get(name)) is None
            else [_clean(value, plan) for value in values]
            for name, values in batch.items()
        }


def _plan(kind: pa.DataType, decode: bool) -> Any:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return {field.name: _plan(field.type, decode) for field in cast("pa.StructType", kind)}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = _plan(cast("pa.ListType[Any]", kind).value_type, decode)
        return None if inner is None else [inner]
    return _JSON if decode and "arrow.json" in str(kind) else None


def _clean(value: Any, plan: Any) -> Any:
    if plan is None or value is None:
        return value
    if plan == _JSON:
        return json.loads(value)
    if isinstance(plan, list):
        return [_clean(item, plan[0]) for item in value]
    # An image is decoded to another type than its object.
    if not isinstance(value, dict):
        return value
    return {name: _clean(v, plan[name]) for name, v in value.items() if v is not None}
