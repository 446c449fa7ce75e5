"""Digests of data and settings, by which a resumed run recognises that they have changed.

A digest depends on the content only: on the rows and their order, but not on the file's name or
format, nor on how a table is divided into chunks. Files of images and audio count by their bytes,
because a copy of a dataset has other paths and times. What has no content (a client, a renderer)
counts by the name of its class.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from types import CodeType, FunctionType
from typing import Any

import chz

from tinker_cookbook.exceptions import DataFormatError

_BLOCK = 1000  # rows, so that the text of a large dataset is never in memory as a whole
_SAMPLED = 64
_SHOWN = 50  # rows of a table whose images are in memory at once
_FILE_KEYS = ("image", "images", "image_path", "image_paths", "image_url", "audio", "audios")
_FILES = re.compile("|".join(f'"{key}"' for key in _FILE_KEYS))
_PLAIN = (bool, int, float, str, bytes, list, tuple, dict, type(None))


def rows_digest(rows: Any) -> str | None:
    """Returns the SHA-256 of a list of rows or of a table; None if a row cannot be read.

    Other sequences may compute a row each time, so they count by 64 rows at equal distances.
    """
    digest = hashlib.sha256()
    try:
        for block in _table_blocks(rows) if _is_table(rows) else _blocks(rows):
            digest.update(block)
    # Rows may be of any type and read by a user's code; training reports errors in them.
    except Exception:
        return None
    return digest.hexdigest()


def value_digest(value: Any) -> str | None:
    """Returns a digest of a setting that has no JSON form; None for one without content.

    A prefix ``pythonX.Y:`` limits the digest of a function's code to a version of Python.
    """
    if isinstance(value, FunctionType):
        content = rows_digest([_code(value.__code__), *_bound_values(value)])
        return content and f"python{sys.version_info.major}.{sys.version_info.minor}:{content}"
    if hasattr(value, "data_sources"):  # a sequence around others
        return rows_digest(list(value.data_sources().values()))
    if isinstance(value, Sequence) or _is_table(value):
        return rows_digest(value)
    known = isinstance(value, Mapping) or dataclasses.is_dataclass(value) or chz.is_chz(value)
    return rows_digest([value]) if known and not isinstance(value, type) else None


def _is_table(rows: Any) -> bool:
    # The library is not imported for this: without it, there is no such table.
    library = sys.modules.get("datasets")
    return library is not None and isinstance(rows, library.Dataset)


def _table_blocks(rows: Any) -> Iterator[bytes]:
    """Yields the content of a ``datasets.Dataset`` without converting it to Python objects."""
    for table in rows.with_format("arrow").iter(batch_size=_BLOCK):
        schema = table.schema
        yield repr([(name, str(schema.field(name).type)) for name in schema.names]).encode()
        files = [name for name in schema.names if may_have_files(name, table[name])]
        for start in range(0, len(table) if files else 0, _SHOWN):
            yield _encoded(table.select(files).slice(start, _SHOWN).to_pylist())
        # A copy, because bits between the values of a slice are those of its neighbours.
        copy = table.drop_columns(files).take(list(range(len(table)))).combine_chunks()
        for batch in copy.to_batches():
            yield batch.serialize()


def may_have_files(name: str, column: Any) -> bool:
    """Returns whether cells may have paths; not for an Arrow column with the images themselves."""
    kind = column.type
    names = [kind.field(i).name for i in range(kind.num_fields)]
    if "bytes" in names and not any(c.field("bytes").null_count for c in column.chunks):
        return False
    return name in _FILE_KEYS or re.search(r"\b(image|audio|path|url)", str(kind)) is not None


def _blocks(rows: Any) -> Iterator[bytes]:
    if not isinstance(rows, (list, tuple, range)):
        count = min(len(rows), _SAMPLED)
        rows = [rows[index * len(rows) // count] for index in range(count)]
    for start in range(0, len(rows), _BLOCK):
        yield _encoded(list(rows[start : start + _BLOCK]))


def _encoded(rows: list[Any]) -> bytes:
    text = _encoder.encode(rows)
    # Text rows are most rows, and are not converted to Python objects for this.
    if _FILES.search(text):
        text = _encoder.encode(json.loads(text, object_hook=_with_files))
    return text.encode()


def _with_files(found: dict[str, Any]) -> dict[str, Any]:
    """Replaces the paths of images and audio in an object by the digests of their files."""
    keys = (*_FILE_KEYS, "path", "url") if found.get("type") in _FILE_KEYS else _FILE_KEYS
    return {key: _read(value, key) if key in keys else value for key, value in found.items()}


def _read(value: Any, key: str) -> Any:
    from tinker_cookbook.image_processing_utils import read_media  # few rows have images

    if isinstance(value, list):
        return [_read(item, key) for item in value]
    if isinstance(value, dict) and not value.get("bytes"):
        return {name: _read(item, key) for name, item in value.items()}
    if not isinstance(value, str):
        return value
    try:
        data = read_media(value, "audio" if key.startswith("audio") else "image")
    except DataFormatError:  # another text, or a missing file, of which training tells
        return value
    return hashlib.sha256(data).hexdigest()


def _content(value: Any) -> Any:
    """Returns the content of a value that JSON cannot represent, as nearly plain data."""
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if _is_table(value):
        return rows_digest(value)
    if isinstance(value, (enum.Enum, PurePath)):
        return str(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, (type, FunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    if chz.is_chz(value):
        return {name: {f.logical_name: getattr(value, f.x_name) for f in _chz_fields(value)}}
    if dataclasses.is_dataclass(value):
        return {name: {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}}
    if hasattr(value, "model_dump"):  # pydantic, such as tinker.Datum
        return value.model_dump()
    if hasattr(value, "__array__"):  # numpy, torch and images
        import numpy as np  # loaded here, since most runs have no arrays in their rows

        array = np.asarray(value)
        return [str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest()]
    # Only plain attributes: others may hold locks, caches or connections.
    own = vars(value) if hasattr(value, "__dict__") else {}
    return {name: {key: item for key, item in own.items() if isinstance(item, _PLAIN)}}


_encoder = json.JSONEncoder(default=_content, separators=(",", ":"))


def _chz_fields(value: Any) -> Iterator[Any]:
    return iter(chz.chz_fields(value).values())


def _code(code: CodeType) -> list[Any]:
    """Returns what a function does, without its position in the file."""
    return [code.co_code, code.co_names, code.co_varnames, list(map(_constant, code.co_consts))]


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _code(value)
    # The order of a set differs between processes.
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def _bound_values(function: FunctionType) -> list[Any]:
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [function.__defaults__, function.__kwdefaults__, cells]
