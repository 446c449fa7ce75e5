"""Progress, table, results and picture from generated ``metrics.jsonl``."""

from __future__ import annotations

import json

import pytest
from made_up import make_runs, write_rows
from rich.console import Console

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.jsonl import encode_row
from tinker_cookbook.sweep.results import (
    best_of,
    collect,
    plot,
    runs_table,
)

GRID = {"learning_rate": ["1e-4", "1e-3", "1e-2"], "schedule": ["linear", "cosine"]}
SWEPT = list(GRID)


@pytest.fixture
def runs(tmp_path):
    made = make_runs(tmp_path, GRID)
    for number, run in enumerate(made):
        rows = [
            {"step": 1, "progress": 0.5, "train_mean_nll": 3.0, "test/nll": 2.0 + number / 10},
            {"step": 2, "progress": 1.0, "train_mean_nll": 2.0 - number / 10},
        ]
        write_rows(run.log_path, rows)
        run.state, run.seconds = "done", 61.0
    return made


def text_of(table, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_results_hold_the_last_value_of_the_first_usual_metric(runs, tmp_path):
    results = collect(runs, None)
    rows = [json.loads(encode_row(row)) for row in results]
    assert len(rows) == 6
    assert rows[1] == {
        "run": "learning_rate=1e-4,schedule=cosine",
        "metric": "test/nll",
        "value": 2.1,
        "step": 2,
        "seconds": 61.0,
        "state": "done",
        "log_path": str(runs[1].log_path),
        "learning_rate": 0.0001,
        "schedule": "cosine",
    }
    assert best_of(results) is results[0]
    shown = text_of(runs_table(runs, ["test/nll"], best=results[0]["run"]))
    assert "test/nll 2.1 " in shown
    assert "1:01" in shown


def test_a_metric_of_choice_and_one_that_no_run_logs(runs):
    best = best_of(collect(runs, "train_mean_nll"))
    assert best is not None
    assert (best["run"], best["value"]) == ("learning_rate=1e-2,schedule=cosine", 1.5)
    with pytest.raises(ConfigurationError, match="did you mean 'train_mean_nll'"):
        collect(runs, "train_mean_nl")


def test_failed_runs_are_listed_but_never_best(runs, tmp_path):
    runs[0].state = "failed"
    results = collect(runs, None)
    assert best_of(results) is results[1]
    plot(results, SWEPT, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").stat().st_size > 5000
    for run in runs:
        run.state = "failed"
    assert best_of(collect(runs, None)) is None
    assert plot(collect(runs, None), SWEPT, tmp_path / "none.png").startswith("no picture")
    assert len(collect(runs, "nothing")) == 6
