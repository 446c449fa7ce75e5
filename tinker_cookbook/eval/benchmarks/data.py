"""Rows of benchmarks, from the Hub or from a local copy in the layout of its authors.

``RowBenchmark`` is the base of benchmarks with one question in each row.
"""

from __future__ import annotations

import csv
import hashlib
import io
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinker_cookbook.eval.run.answers import read_json
from tinker_cookbook.eval.run.examples import Example, ExampleBenchmark
from tinker_cookbook.eval.run.types import BenchmarkConfig, BenchmarkResult, Metrics
from tinker_cookbook.exceptions import DataError, DataFormatError, DataValidationError
from tinker_cookbook.renderers import Message
from tinker_cookbook.supervised.hf_datasets import load_hf_dataset
from tinker_cookbook.supervised.json_files import load_local_rows

Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Location of a benchmark's data: on the Hub, or in a folder or file."""

    hub: str
    """Name of the Hub dataset."""
    split: str
    folders: tuple[str, ...]
    """Subfolders to search if ``data_path`` is the parent folder of several benchmarks."""
    files: tuple[str, ...]
    """Patterns of files in the folder; the first one that matches is used."""
    config: str | None = None
    """Named configuration of the Hub dataset."""
    subjects: tuple[str, ...] = ()
    """Named configurations, each of them a subject; its rows get a column ``subject``."""
    has_subjects: bool = False
    """Whether each local csv file is a subject, and the Hub's rows have that column."""
    columns: tuple[str, ...] = ()
    """Columns of csv files without a header."""

    def load(self, data_path: str | None) -> list[Row]:
        """Returns the rows of the Hub dataset, or of the local files if ``data_path`` is set.

        Raises:
            DataError: the Hub cannot be reached, or the folder has none of the files.
        """
        if data_path is None:
            return [
                {**row, "subject": config} if self.subjects else row
                for config in self.subjects or (self.config,)
                for row in load_hub_rows(self.hub, self.split, config)
            ]
        return [row for file in self.find(data_path) for row in self._read(file)]

    def _read(self, file: Path) -> list[Row]:
        rows = read_csv(file, self.columns) if file.suffix == ".csv" else read_rows(file)
        if not self.subjects and not (self.has_subjects and file.suffix == ".csv"):
            return rows
        subject = file.stem.removeprefix("mmlu_").removesuffix(f"_{self.split}")
        subject = file.parent.name if subject == file.stem else subject
        return [{**row, "subject": subject} for row in rows]

    def find(self, data_path: str) -> list[Path]:
        """Returns the files of the first pattern that matches, sorted by name."""
        path = Path(data_path).expanduser()
        if path.is_file():
            return [path]
        # A clone of the Hub repository has files such as main/test-00000-of-00001.parquet.
        config = f"{self.config}/" if self.config else "**/"
        patterns = (*self.files, f"{config}{self.split}*.parquet", f"{config}{self.split}*.jsonl")
        for folder in (*(path / name for name in self.folders), path):
            for pattern in patterns:
                found = sorted(file for file in folder.glob(pattern) if file.is_file())
                if found:
                    return found
        places = ", ".join(f"{name}/" for name in self.folders)
        raise DataValidationError(
            f"data_path: got {path}, which has no data of {self.hub}; expected "
            f"{' or '.join(self.files)} in it or in its subfolder {places}"
        )


def load_hub_rows(hub: str, split: str, config: str | None = None) -> list[Row]:
    """Returns the rows of a split of a Hub dataset; a DataError explains how to use a local
    copy."""
    try:
        rows = load_hf_dataset(
            hub, split, config, instead="Give a local copy with data_path=FOLDER or FILE"
        )
    except DataError as error:
        # For a gated dataset, the Hub reports missing access.
        if any(word in str(error).lower() for word in ("gated", "401", "403", "authenticat")):
            raise DataError(
                f"{error}; {hub} is gated: accept its terms at https://huggingface.co/datasets/"
                f"{hub} and set HF_TOKEN, or give a local copy with data_path="
            ) from error
        raise
    return [dict(row) for row in rows]


def read_rows(file: Path) -> list[Row]:
    """Returns the rows of a jsonl (also gzipped), json or parquet file."""
    if file.suffix == ".json":
        values = read_json(file)
        # BIG-Bench Hard stores its rows under this key.
        return values["examples"] if isinstance(values, dict) else values
    return [dict(row) for row in load_local_rows(file, "train")]


def read_csv(file: Path, columns: Sequence[str] = ()) -> list[Row]:
    """Returns the rows of a file with columns separated by commas or semicolons.

    Without a header, the columns are named ``columns``. A header begins with the first of these.
    """
    data = file.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        # One file of MMLU-Redux was saved in this encoding by a spreadsheet program.
        text = data.decode("mac_roman")
    first = text.partition("\n")[0]
    # Names in a header contain no separators, so the more frequent one is the separator.
    separator = ";" if not columns and first.count(";") > first.count(",") else ","
    rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator) if row]
    names = list(columns or rows[0])
    for i, row in enumerate(rows, 1):
        if columns and len(row) != len(columns):
            raise DataFormatError(
                f"{file}: row {i} has {len(row)} columns, expected {len(columns)}: "
                f"{', '.join(columns)}"
            )
    has_header = rows[:1] and rows[0][0] == names[0]
    return [dict(zip(names, row, strict=False)) for row in rows[1 if has_header else 0 :]]


def column(row: Mapping[str, Any], *names: str, where: str) -> Any:
    """Returns the value of the first of ``names`` that the row has.

    Raises:
        DataFormatError: the row has none of them.
    """
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise DataFormatError(
        f"{where}: got a row with the columns {', '.join(map(str, row))}, expected "
        f"{' or '.join(names)}"
    )


def with_unique_ids(examples: Iterable[Example]) -> list[Example]:
    """Adds ``_2``, ``_3``, … to repeated ids: some data sets repeat questions."""
    seen: Counter[str] = Counter()
    unique: list[Example] = []
    for example in examples:
        seen[example.example_id] += 1
        count = seen[example.example_id]
        suffix = f"_{count}" if count > 1 else ""
        unique.append(replace(example, example_id=f"{example.example_id}{suffix}"))
    return unique


def build_messages(user_content: str, system_prompt: str | None = None) -> list[Message]:
    """Returns a user message, after a system message if there is a prompt."""
    system = [Message(role="system", content=system_prompt)] if system_prompt else []
    return [*system, Message(role="user", content=user_content)]


def make_example_id(prefix: str, seed_text: str) -> str:
    """Returns ``PREFIX_`` and 12 hexadecimal digits of the MD5 hash of ``seed_text``."""
    return f"{prefix}_{hashlib.md5(seed_text.encode(), usedforsecurity=False).hexdigest()[:12]}"


class RowBenchmark(ExampleBenchmark):
    """Benchmark with a question in each row of ``source``."""

    source: Source

    def rows(self, config: BenchmarkConfig) -> Iterable[Row]:
        """Returns the rows that are questions."""
        return self.source.load(config.data_path)

    @abstractmethod
    def example(self, row: Row) -> Example:
        """Returns the example of a row."""

    def load_examples(self, config: BenchmarkConfig) -> list[Example]:
        """Returns the examples of all rows, with unique ids."""
        return with_unique_ids(map(self.example, self.rows(config)))

    def aggregate(self, rewards: list[float], metrics_list: list[Metrics]) -> BenchmarkResult:
        """Adds the score of each subject, task or level."""
        result = super().aggregate(rewards, metrics_list)
        result.metrics |= mean_by_key(metrics_list, lambda name: name.endswith("/accuracy"))
        return result


def mean_by_key(metrics_list: Sequence[Mapping[str, Any]], key: Callable[[str], bool]) -> Row:
    """Returns the mean of each metric selected by ``key``, over the answers that have it."""
    values: dict[str, list[float]] = {}
    for metrics in metrics_list:
        for name, value in metrics.items():
            if key(name):
                values.setdefault(name, []).append(float(value))
    return {name: sum(found) / len(found) for name, found in sorted(values.items())}
