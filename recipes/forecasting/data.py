"""Loads markets from a CSV file and splits them by time, so that no outcome leaks into training.

    python -m recipes.forecasting.data            # synthetic markets
    python -m recipes.forecasting.data data_path=markets.csv split_date=2025-10-20

The columns are those of Prophet Arena: ``submission_id``, ``event_ticker``, ``title``,
``snapshot_time``, ``close_time``, ``market_outcome`` (JSON: market -> 0 or 1), ``category``,
``markets`` (JSON list of names), ``sources`` (JSON list of objects with title and summary).
"""

from __future__ import annotations

import ast
import csv
import hashlib
import json
import random
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import chz

from tinker_cookbook.exceptions import (
    BackendError,
    ConfigurationError,
    DataFormatError,
    DataValidationError,
)
from tinker_cookbook.run.paths import write_atomically
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
        ConfigurationError: The revision is not a valid name.
        BackendError: The Hub cannot be reached.
        DataValidationError: The content differs from the default revision.
    """
    import httpx

    if not revision or not all(c.isalnum() or c in "._-/" for c in revision) or ".." in revision:
        raise ConfigurationError(f"dataset_revision: got {revision!r}, expected a git revision")
    path = Path(cache_dir).expanduser() / revision.replace("/", "--") / "subset_data_1200.csv"
    if not path.exists():
        quoted = urllib.parse.quote(revision, safe="")
        url = f"https://huggingface.co/datasets/{DATASET_REPOSITORY}/resolve/{quoted}/{path.name}"
        try:
            response = httpx.get(url, follow_redirects=True, timeout=120)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise BackendError(
                f"{url} cannot be downloaded ({error}); give data_path=FILE, or data=synthetic"
            ) from error
        _check_digest(response.content, revision, url)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, response.content)
    else:
        _check_digest(path.read_bytes(), revision, str(path))
    return path


def _check_digest(content: bytes, revision: str, where: str) -> None:
    digest = hashlib.sha256(content).hexdigest()
    if revision == DEFAULT_DATASET_REVISION and digest != DEFAULT_DATASET_SHA256:
        raise DataValidationError(
            f"{where}: sha256 is {digest}, expected {DEFAULT_DATASET_SHA256}; remove the file and "
            "download it again"
        )


def parse_utc_datetime(value: str, context: str = "datetime") -> datetime:
    """Parses an ISO time; one without a time zone is UTC, others are converted to UTC."""
    try:
        parsed = datetime.fromisoformat(value.strip().replace("Z", "+00:00"))
    except ValueError:
        raise DataFormatError(
            f"{context}: got {value!r}, expected a date such as 2025-10-20 or 2025-10-20T12:00:00Z"
        ) from None
    return parsed.replace(tzinfo=UTC) if parsed.tzinfo is None else parsed.astimezone(UTC)


def load_prophet_arena_examples(csv_path: str | Path) -> list[ForecastExample]:
    """Loads each market once, at its earliest snapshot, ordered by time.

    Raises:
        DataFormatError: The file is missing or a row is invalid; names the row.
    """
    path = Path(csv_path).expanduser()
    if not path.exists():
        raise DataFormatError(f"data_path: {path} does not exist, expected a CSV file of markets")
    found: dict[tuple[str, str], ForecastExample] = {}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise DataFormatError(
                f"{path}: lacks the columns {', '.join(missing)}, expected {', '.join(COLUMNS)}"
            )
        for number, row in enumerate(reader, start=2):
            for one in _examples_of_row(row, f"{path}, row {number}"):
                key = one.event_ticker, one.market
                other = found.setdefault(key, one)
                if _stable(other) != _stable(one):
                    raise DataFormatError(
                        f"{path}, row {number}: title, close time, category or outcome of market "
                        f"{one.market!r} differ from an earlier row"
                    )
                found[key] = min(other, one, key=lambda e: (e.snapshot_time, e.submission_id))
    if not found:
        raise DataFormatError(f"{path}: has no market, expected one row at least")
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
        ConfigurationError: ``split_time`` has no time zone, or a cap is below 1.
    """
    if split_time.tzinfo is None:
        raise ConfigurationError(f"split_time: got {split_time}, expected a time zone")
    caps = {
        "max_train_questions": max_train_questions,
        "max_validation_questions": max_validation_questions,
    }
    for name, cap in caps.items():
        if cap is not None and cap < 1:
            raise ConfigurationError(f"{name}: got {cap}, expected at least 1, or None for all")
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
    if not markets or set(map(str, markets)) != set(outcomes):
        raise DataFormatError(
            f"{where}: markets are {markets} and market_outcome has {list(outcomes)}, expected "
            "the same names"
        )
    opened = parse_utc_datetime(row["snapshot_time"], f"{where}, snapshot_time")
    closed = parse_utc_datetime(row["close_time"], f"{where}, close_time")
    if opened >= closed:
        raise DataFormatError(
            f"{where}: snapshot_time {opened} is not before close_time {closed}, so the forecast "
            "would be made after the outcome"
        )
    material = _sources(_parsed(row["sources"], list, f"{where}, sources"), where)
    examples = []
    for market in map(str, markets):
        outcome = outcomes[market]
        if isinstance(outcome, bool) or outcome not in (0, 1):
            raise DataFormatError(
                f"{where}: the outcome of {market!r} is {outcome!r}, expected 0 or 1"
            )
        examples.append(
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
                outcome=int(outcome),
            )
        )
    return examples


def _parsed(text: str, kind: type[Any], where: str) -> Any:
    # The published file has JSON in some rows and Python literals in others.
    value: Any = None
    try:
        value = json.loads(text)
    except ValueError:
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = None
    if not isinstance(value, kind):
        raise DataFormatError(f"{where}: got {text[:80]!r}, expected a JSON {kind.__name__}")
    return value


def _sources(sources: Sequence[Any], where: str) -> str:
    found: list[tuple[int, str, str]] = []
    for i, source in enumerate(sources):
        if not isinstance(source, dict):
            raise DataFormatError(f"{where}: source {i} is not an object with title and summary")
        title, summary = str(source.get("title") or ""), str(source.get("summary") or "")
        rank = source.get("ranking")
        if title.strip() or summary.strip():
            found.append((rank if isinstance(rank, int) else i + 1, title.strip(), summary.strip()))
    if not found:
        raise DataFormatError(f"{where}: sources have no text, expected one source at least")
    parts = enumerate(sorted(found), start=1)
    return "\n\n".join(f"{i}. {title}\n{summary}" for i, (_, title, summary) in parts)


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

            return synthetic_markets(seed=0)
        return super().csv_file()


def describe(split: ForecastSplit) -> str:
    """Returns the size of both parts and how often a market resolved YES."""
    parts = []
    for name, part in (("train", split.train), ("validation", split.validation)):
        rate = sum(one.outcome for one in part) / len(part)
        parts.append(f"{name}: {len(part)} markets, {rate:.1%} resolved YES")
    return (
        f"split at {split.split_time.date()}; {'; '.join(parts)}; "
        f"{split.excluded_crossing_events} events open at the split are left out"
    )


def main(config: MarketSettings | None = None) -> None:
    """Prints how the markets are split."""
    print(describe((config or MarketSettings()).split()))


def _program(config: MarketSettings) -> None:
    main(config)


if __name__ == "__main__":
    run_entrypoint(_program)
