"""Record of the data that a run trains on, ``data_record.json`` in its folder.

It has the number of rows and a digest of each file or table, under the name that errors use::

    {"training data": {"rows": 9500, "sha256": "…"}}

A mixture has an entry for each of its parts. A dataset of a user's own, which does not define
``data_sources``, has only its number of batches: ``{"training data": {"batches": 40}}``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from tinker_cookbook.run.digests import rows_digest
from tinker_cookbook.run.paths import DATA_FILE, local_path, write_atomically

DataRecord: TypeAlias = dict[str, dict[str, Any]]

UNKNOWN = (
    f"this run has no {DATA_FILE}, as runs of earlier versions: whether its data are still those "
    "that it began with cannot be checked"
)


def data_record(data: Any) -> DataRecord:
    """Returns the record of an object with ``data_sources``, of another dataset, or of rows."""
    record: DataRecord = {}
    for name, part in _parts("training data", data):
        if hasattr(part, "__getitem__"):
            digest = rows_digest(part)
            record[name] = {"rows": len(part), **({"sha256": digest} if digest else {})}
        else:
            record[name] = {"batches": len(part)}
    return record


def _parts(name: str, data: Any) -> Iterator[tuple[str, Any]]:
    """Yields the rows behind a dataset, under names such as ``training data: sources[0]``."""
    sources = data.data_sources() if hasattr(data, "data_sources") else {}
    for part, rows in sources.items():
        yield from _parts(f"{name}: {part}" if part else name, rows)
    if not sources:
        yield name, data


def read_data_record(log_path: str) -> DataRecord | None:
    """Returns the record in a run's folder; None if there is none."""
    try:
        return json.loads((local_path(log_path) / DATA_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_data_record(log_path: str, record: DataRecord) -> None:
    """Writes the record into the run's folder, which exists."""
    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    write_atomically(Path(local_path(log_path)) / DATA_FILE, text.encode())


def data_changes(before: DataRecord, now: DataRecord, longer: bool, rebuilt: bool) -> list[str]:
    """Returns a line such as ``training data: 30 rows → 12 rows`` for each part that differs.

    ``longer``: a setting of the run's length changed, on which the number of batches may depend.
    ``rebuilt``: a setting that determines how many rows are generated changed.
    """
    lines: list[str] = []
    # A part on only one side comes from another version of the code, or from another setting,
    # which is compared as a setting.
    for name in [name for name in before if name in now]:
        old, new = before[name], now[name]
        for unit in [unit for unit in ("rows", "batches") if unit in old and unit in new]:
            if rebuilt or (longer and unit == "batches"):
                continue
            if old[unit] != new[unit]:
                lines.append(f"{name}: {old[unit]} {unit} → {new[unit]} {unit}")
            elif "sha256" in old and "sha256" in new and old["sha256"] != new["sha256"]:
                lines.append(f"{name}: {old[unit]} {unit} → {new[unit]} other {unit}")
    return lines
