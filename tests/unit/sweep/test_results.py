"""Progress, table, results and picture from generated ``metrics.jsonl``."""

from __future__ import annotations

import json

import pytest
from made_up import make_runs, write_rows
from rich.console import Console

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.best import lower_is_better
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


@pytest.fixture
def plotted(monkeypatch):
    """What the picture shows: the labels, the points and the axis."""
    seen = {}

    def record(axes):
        seen["lines"] = {
            line.get_label(): [tuple(map(float, point)) for point in line.get_xydata()]
            for line in axes.get_lines()
        }
        seen["title"] = axes.get_legend().get_title().get_text() if axes.get_legend() else ""
        seen["scale"], seen["x"] = axes.get_xscale(), axes.get_xlabel()

    import matplotlib.figure

    real = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure,
        "savefig",
        lambda self, *a, **k: (record(self.axes[0]), real(self, *a, **k)),
    )
    return seen


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


def test_failed_runs_are_listed_but_never_best_or_plotted(runs, tmp_path, plotted):
    runs[0].state = "failed"
    results = collect(runs, None)
    assert best_of(results) is results[1]
    plot(results, SWEPT, tmp_path / "sweep.png")
    assert [x for x, y in plotted["lines"]["schedule=linear"] if y == y] == [1e-3, 1e-2]
    for run in runs:
        run.state = "failed"
    assert best_of(collect(runs, None)) is None
    assert plot(collect(runs, None), SWEPT, tmp_path / "none.png").startswith("no picture")
    assert len(collect(runs, "nothing")) == 6


def test_the_picture(runs, tmp_path, plotted):
    assert plot(collect(runs, None), SWEPT, tmp_path / "sweep.png") == str(tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").stat().st_size > 5000
    assert (plotted["x"], plotted["scale"]) == ("learning_rate", "log")
    # In the order of the sweep, without a title such as "label".
    assert list(plotted["lines"]) == ["schedule=linear", "schedule=cosine"]
    assert not plotted["title"]
    assert plotted["lines"]["schedule=cosine"] == [(1e-4, 2.1), (1e-3, 2.3), (1e-2, 2.5)]
    assert set(plotted["lines"]) == {"schedule=linear", "schedule=cosine"}


@pytest.mark.parametrize(
    ("name", "lower"),
    [
        ("test/nll", True),
        ("train_mean_nll", True),
        ("optim/kl_policy_base", True),
        ("test/env/all/reward/total", False),
        ("test/brier", True),
        ("test/accuracy", False),
        ("env/all/skill", False),
    ],
)
def test_which_way_is_better(name, lower):
    assert lower_is_better(name) is lower
