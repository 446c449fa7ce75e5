"""Loads markets from a CSV file and splits them by time, so that no outcome leaks into training.

    python -m recipes.forecasting.data            # synthetic markets
    python -m recipes.forecasting.data data_path=markets.csv split_date=2025-10-20

The columns are those of Prophet Arena: ``submission_id``, ``event_ticker``, ``title``,
``snapshot_time``, ``close_time``, ``market_outcome`` (JSON: market -> 0 or 1), ``category``,
``markets`` (JSON list of names), ``sources`` (JSON list of objects with title and summary).
"""

from __future__ import annotations

import ast
import contextlib
import csv
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import chz

from tinker_cookbook.exceptions import DataFormatError, DataValidationError
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

DATASET_REPOSITORY = "prophetarena/Prophet-Arena-Subset-1200"
DEFAULT_DATASET_REVISION = "c94b6f450d7fe3b03688799cce1c8b29838b5d96"
DEFAULT_DATASET_SHA256 = "1e34a5970e515cd06a2e57a955074561308cb8734c8c5712adb1452b977b3984"
DEFAULT_CACHE_DIR = "~/.cache/tinker-cookbook/prophet-arena"
DEFAULT_SPLIT_DATE = "2025-10-20"
DEFAULT_MAX_TRAIN_QUESTIONS = 1024
DEFAULT_MAX_VALIDATION_QUESTIONS = 256
COLUMNS = (
    "submission_id",
    "event_ticker",
    "title",
    "snapshot_time",
    "close_time",
    "market_outcome",
    "category",
    "markets",
    "sources",
)


@dataclass(frozen=True)
class ForecastExample:
    """One market at its earliest snapshot; ``outcome`` is 1 if it resolved YES, else 0."""

    submission_id: str
    event_ticker: str
    event_title: str
    market: str
    reference_material: str
    resolution_criteria: str
    snapshot_time: datetime
    close_time: datetime
    category: str
    outcome: int


@dataclass(frozen=True)
class ForecastSplit:
    """Markets that were closed before ``split_time``, and those first seen from then on."""

    train: tuple[ForecastExample, ...]
    validation: tuple[ForecastExample, ...]
    split_time: datetime
    excluded_crossing_events: int
    """Events that were open at ``split_time`` and are in neither part."""

    def data_sources(self) -> dict[str, tuple[ForecastExample, ...]]:
        """Returns the markets that are trained on, for the record of the run's data."""
        return {"": self.train}


def fetch_prophet_arena(
    revision: str = DEFAULT_DATASET_REVISION, cache_dir: str = DEFAULT_CACHE_DIR
) -> Path:
    """Downloads the CSV file of Prophet Arena, unless it is in the cache, and returns its path.

    Raises:
        DataValidationError: The content differs from the default revision.
    """
    from huggingface_hub import hf_hub_download

    folder = Path(cache_dir).expanduser() / revision.replace("/", "--")
    path = folder / "subset_data_1200.csv"
    if not path.exists():
        hf_hub_download(
            DATASET_REPOSITORY, path.name, repo_type="dataset", revision=revision, local_dir=folder
        )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if revision == DEFAULT_DATASET_REVISION and digest != DEFAULT_DATASET_SHA256:
        raise DataValidationError(
            f"{path}: sha256 is {digest}, expected {DEFAULT_DATASET_SHA256}; remove the file and "
            "download it again"
        )
    return path


def parse_utc_datetime(value: str, context: str = "datetime") -> datetime:
    """Parses an ISO time; one without a time zone is UTC, others are converted to UTC."""
    try:
        parsed = datetime.fromisoformat(value.strip())
    except ValueError:
        raise DataFormatError(
            f"{context}: got {value!r}, expected a date such as 2025-10-20 or 2025-10-20T12:00:00Z"
        ) from None
    return parsed.replace(tzinfo=UTC) if parsed.tzinfo is None else parsed.astimezone(UTC)


def load_prophet_arena_examples(csv_path: str | Path) -> list[ForecastExample]:
    """Loads each market once, at its earliest snapshot, ordered by time.

    Raises:
        DataFormatError: A row is invalid; names the row.
    """
    path = Path(csv_path).expanduser()
    found: dict[tuple[str, str], ForecastExample] = {}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise DataFormatError(
                f"{path}: lacks the columns {', '.join(missing)}, expected {', '.join(COLUMNS)}"
            )
        for row_number, row in enumerate(reader, start=2):
            where = f"{path}, row {row_number}"
            for one in _examples_of_row(row, where):
                other = found.setdefault((one.event_ticker, one.market), one)
                if _stable(other) != _stable(one):
                    raise DataFormatError(
                        f"{where}: title, close time, category or outcome of market "
                        f"{one.market!r} differ from an earlier row"
                    )
                found[one.event_ticker, one.market] = min(
                    other, one, key=lambda e: (e.snapshot_time, e.submission_id)
                )
    return sorted(found.values(), key=_by_time)


def load_prophet_arena_split(
    csv_path: str | Path,
    *,
    split_time: datetime,
    max_train_questions: int | None = DEFAULT_MAX_TRAIN_QUESTIONS,
    max_validation_questions: int | None = DEFAULT_MAX_VALIDATION_QUESTIONS,
    seed: int = 0,
) -> ForecastSplit:
    """Splits markets by time; all markets of an event are on one side.

    Training has the events that were closed before ``split_time``, validation those whose first
    snapshot is not before it. Events that were open at that time are skipped: their outcomes were
    not yet known, but their snapshots were.

    Raises:
        DataValidationError: One of the parts is empty.
    """
    events: dict[str, list[ForecastExample]] = {}
    for one in load_prophet_arena_examples(csv_path):
        events.setdefault(one.event_ticker, []).append(one)
    train, validation, crossing = [], [], 0
    for markets in events.values():
        if max(one.close_time for one in markets) < split_time:
            train += markets
        elif min(one.snapshot_time for one in markets) >= split_time:
            validation += markets
        else:
            crossing += 1
    if not train or not validation:
        raise DataValidationError(
            f"split_date: {split_time.date()} leaves {len(train)} markets to train on and "
            f"{len(validation)} to evaluate on, expected some of both"
        )
    train = _sample(sorted(train, key=_by_time), max_train_questions, seed)
    random.Random(seed).shuffle(train)
    validation = _sample(sorted(validation, key=_by_time), max_validation_questions, seed + 1)
    validation.sort(key=_by_time)
    return ForecastSplit(tuple(train), tuple(validation), split_time.astimezone(UTC), crossing)


def _examples_of_row(row: Mapping[str, str], where: str) -> list[ForecastExample]:
    for name in COLUMNS:
        if not (row.get(name) or "").strip():
            raise DataFormatError(f"{where}: {name} is empty, expected a value")
    markets = _parsed(row["markets"], list, f"{where}, markets")
    outcomes = _parsed(row["market_outcome"], dict, f"{where}, market_outcome")
    if set(map(str, markets)) != set(outcomes) or not set(outcomes.values()) <= {0, 1}:
        raise DataFormatError(
            f"{where}: markets are {markets} and market_outcome is {outcomes}, expected the same "
            "names, each with 0 or 1"
        )
    opened = parse_utc_datetime(row["snapshot_time"], f"{where}, snapshot_time")
    closed = parse_utc_datetime(row["close_time"], f"{where}, close_time")
    if opened >= closed:
        raise DataFormatError(
            f"{where}: snapshot_time {opened} is not before close_time {closed}, so the forecast "
            "would be made after the outcome"
        )
    material = _material(_parsed(row["sources"], list, f"{where}, sources"))
    return [
        ForecastExample(
            submission_id=row["submission_id"].strip(),
            event_ticker=row["event_ticker"].strip(),
            event_title=row["title"].strip(),
            market=market,
            reference_material=material,
            resolution_criteria=f"It resolves YES if this happens: {market}.",
            snapshot_time=opened,
            close_time=closed,
            category=row["category"].strip(),
            outcome=int(outcomes[market]),
        )
        for market in map(str, markets)
    ]


def _parsed(text: str, kind: type[Any], where: str) -> Any:
    # The published file has JSON in some rows and Python literals in others.
    for parse in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError):
            value = parse(text)
            if isinstance(value, kind) and value:
                return value
    raise DataFormatError(f"{where}: got {text[:80]!r}, expected a JSON {kind.__name__}")


def _material(sources: Sequence[Mapping[str, Any]]) -> str:
    """Returns the sources by their ranking, by default their place."""
    ranked = sorted(
        (source.get("ranking") or i, source.get("title") or "", source.get("summary") or "")
        for i, source in enumerate(sources, start=1)
    )
    return "\n\n".join(
        f"{i}. {title.strip()}\n{summary.strip()}"
        for i, (_, title, summary) in enumerate(ranked, start=1)
    )


def _stable(one: ForecastExample) -> tuple[Any, ...]:
    return one.event_title, one.close_time, one.category, one.outcome


def _by_time(one: ForecastExample) -> tuple[datetime, str, str]:
    return one.snapshot_time, one.event_ticker, one.market


def _sample(examples: list[ForecastExample], cap: int | None, seed: int) -> list[ForecastExample]:
    if cap is None or len(examples) <= cap:
        return examples
    return random.Random(seed).sample(examples, cap)


@chz.chz
class MarketFile:
    """A CSV file of markets, and how they are split by time."""

    data_path: str | None = chz.field(default=None, doc="CSV file; default: the download")
    data_cache_dir: str = chz.field(default=DEFAULT_CACHE_DIR, doc="Folder of the download")
    dataset_revision: str = chz.field(
        default=DEFAULT_DATASET_REVISION, doc="git revision of the download"
    )
    split_date: str = chz.field(default=DEFAULT_SPLIT_DATE, doc="First day of validation")
    max_train_questions: int | None = number(
        DEFAULT_MAX_TRAIN_QUESTIONS, "Maximum number of markets to train on; None: all", low=1
    )
    max_validation_questions: int | None = number(
        DEFAULT_MAX_VALIDATION_QUESTIONS,
        "Maximum number of markets to evaluate on; None: all",
        low=1,
    )
    seed: int = chz.field(default=0, doc="Seed of the selection and order of markets")

    def csv_file(self) -> str | Path:
        """Returns the file, which is downloaded by default."""
        if self.data_path is not None:
            return self.data_path
        return fetch_prophet_arena(self.dataset_revision, self.data_cache_dir)

    def split(self) -> ForecastSplit:
        """Loads and splits the markets."""
        return load_prophet_arena_split(
            self.csv_file(),
            split_time=parse_utc_datetime(self.split_date, "split_date"),
            max_train_questions=self.max_train_questions,
            max_validation_questions=self.max_validation_questions,
            seed=self.seed,
        )


@chz.chz
class MarketSettings(MarketFile):
    """Which markets a recipe uses."""

    data: Literal["synthetic", "prophet_arena"] = chz.field(
        default="synthetic", doc="synthetic or prophet_arena (a download)"
    )
    data_path: str | None = chz.field(default=None, doc="CSV file of markets, instead of data")

    def csv_file(self) -> str | Path:
        """Returns the file of the markets; writes the synthetic ones."""
        if self.data_path is None and self.data == "synthetic":
            from tinker_cookbook.recipes.forecasting.synthetic import synthetic_markets

            return synthetic_markets()
        return super().csv_file()


def main(config: MarketSettings = MarketSettings()) -> None:  # noqa: B008 - it cannot change
    """Prints how the markets are split."""
    split = config.split()
    print(f"split at {split.split_time.date()}")
    for name, part in (("train", split.train), ("validation", split.validation)):
        rate = sum(one.outcome for one in part) / len(part)
        print(f"{name}: {len(part)} markets, {rate:.1%} resolved YES")
    print(f"{split.excluded_crossing_events} events open at the split are left out")


if __name__ == "__main__":
    run_entrypoint(main)
