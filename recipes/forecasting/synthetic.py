"""Writes synthetic markets whose true probabilities are known, in the format of Prophet Arena.

    python -m recipes.forecasting.synthetic write_dir=/tmp/tinker-examples/markets

Each market has one source, in which a forecaster uses one of five words. The share of markets with
a word that resolve YES is fixed (``TRUE_PROBABILITIES``), so the best possible Brier reward is
known. The command also writes ``format.jsonl`` with forecasts that are biased on purpose: 0.3 above
the truth, plus or minus 0.2. They teach a small model to read the sources and to write a forecast,
but a wrong one, so that reinforcement learning has to add the calibration.
"""

from __future__ import annotations

import csv
import io
import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import chz

from tinker_cookbook.cli_utils import default_log_path
from tinker_cookbook.recipes.forecasting.data import (
    COLUMNS,
    ForecastExample,
    load_prophet_arena_examples,
)
from tinker_cookbook.recipes.forecasting.env import render_prompt
from tinker_cookbook.run.paths import write_atomically
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

WRITE_DIR = default_log_path("markets")
TRUE_PROBABILITIES = {"unlikely": 0.1, "doubtful": 0.3, "open": 0.5, "likely": 0.7, "certain": 0.9}
"""Frequency of YES among markets with this forecast."""
OPTIMISM = 0.3
CITIES = ("Rome", "Paris", "Oslo", "Lima", "Cairo", "Tokyo", "Quito", "Delhi")
EVENTS = {"weather": ("rain", "snow", "storm"), "sports": ("win", "draw", "goal")}
FIRST_DAY, LAST_DAY = datetime(2025, 6, 1, tzinfo=UTC), datetime(2025, 12, 31, tzinfo=UTC)


@chz.chz
class CLIConfig:
    """Settings of the program."""

    write_dir: str = chz.field(default=WRITE_DIR, doc="Folder of the files")


def best_reward() -> float:
    """Returns the expected Brier reward of the true probabilities."""
    values = TRUE_PROBABILITIES.values()
    return 1 - sum(p * (1 - p) for p in values) / len(values)


def true_probability(example: ForecastExample) -> float:
    """Returns how often a market with this source resolves YES."""
    return next(
        p
        for word, p in TRUE_PROBABILITIES.items()
        if f"It is {word}." in example.reference_material
    )


def synthetic_markets(write_dir: str = WRITE_DIR, num_markets: int = 2000) -> Path:
    """Writes ``markets.csv`` and returns its path; the same content for the same arguments."""
    rng = random.Random(0)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    span = (LAST_DAY - FIRST_DAY).days
    for i in range(num_markets):
        category = rng.choice(list(EVENTS))
        event, city = rng.choice(EVENTS[category]), rng.choice(CITIES)
        word = rng.choice(list(TRUE_PROBABILITIES))
        opened = FIRST_DAY + timedelta(days=rng.randrange(span), hours=rng.randrange(24))
        name = f"{event} in {city}"
        outcome = int(rng.random() < TRUE_PROBABILITIES[word])
        source = {"title": "Forecaster", "summary": f"It is {word}.", "ranking": 1}
        writer.writerow(
            {
                "submission_id": f"s{i:05}",
                "event_ticker": f"EVENT-{i:05}",
                "title": name.capitalize(),
                "snapshot_time": opened.isoformat(),
                "close_time": (opened + timedelta(days=rng.randint(1, 14))).isoformat(),
                "market_outcome": json.dumps({name: outcome}),
                "category": category,
                "markets": json.dumps([name]),
                "sources": json.dumps([source]),
            }
        )
    path = Path(write_dir).expanduser() / "markets.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.getvalue().encode())
    return path


def write_format_examples(markets: Path, count: int = 1600) -> Path:
    """Writes conversations in which the optimist forecasts, in steps of 0.1."""
    rng = random.Random(0)
    examples = load_prophet_arena_examples(markets)
    lines = []
    for _ in range(count):
        one = rng.choice(examples)
        said = true_probability(one) + OPTIMISM + rng.randint(-2, 2) / 10
        messages = [
            {"role": "user", "content": render_prompt(one)},
            {"role": "assistant", "content": f"{min(1.0, max(0.0, said)):.1f}"},
        ]
        lines.append(json.dumps({"messages": messages}) + "\n")
    path = markets.with_name("format.jsonl")
    write_atomically(path, "".join(lines).encode())
    return path


def main(config: CLIConfig) -> None:
    """Writes the markets and the conversations that teach the format."""
    markets = synthetic_markets(config.write_dir)
    print(f"markets: {markets}; best Brier reward {best_reward():.3f}")
    print(f"conversations: {write_format_examples(markets)}")


if __name__ == "__main__":
    run_entrypoint(main)
