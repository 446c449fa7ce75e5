"""Progress, table, results and picture from generated ``metrics.jsonl``."""

from __future__ import annotations

import builtins
import json

import pytest
from made_up import make_runs, write_rows
from rich.console import Console

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.best import lower_is_better
from tinker_cookbook.run.jsonl import encode_row
from tinker_cookbook.sweep.results import (
    METRICS,
    best_of,
    collect,
    plot,
    progress_line,
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


def test_a_run_that_diverged_is_never_best(runs):
    with (runs[0].log_path / "metrics.jsonl").open("ab") as file:
        file.write(encode_row({"step": 3, "progress": 1.0, "test/nll": float("nan")}))
    results = collect(runs, "test/nll")
    assert results[0]["value"] != results[0]["value"]
    assert best_of(results) is results[1]


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


def test_a_run_without_rows(tmp_path):
    runs = make_runs(tmp_path, {"lora_rank": ["1", "2"]})
    results = collect(runs, None)
    assert [(row["value"], row["step"], row["metric"]) for row in results] == [(None,) * 3] * 2
    text_of(runs_table(runs, METRICS))


def test_the_picture(runs, tmp_path, plotted):
    assert plot(collect(runs, None), SWEPT, tmp_path / "sweep.png") == str(tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").stat().st_size > 5000
    assert (plotted["x"], plotted["scale"]) == ("learning_rate", "log")
    # In the order of the sweep, without a title such as "label".
    assert list(plotted["lines"]) == ["schedule=linear", "schedule=cosine"]
    assert not plotted["title"]
    assert plotted["lines"]["schedule=cosine"] == [(1e-4, 2.1), (1e-3, 2.3), (1e-2, 2.5)]
    assert set(plotted["lines"]) == {"schedule=linear", "schedule=cosine"}


def test_the_axis_is_linear_within_a_factor_of_ten(tmp_path, plotted):
    runs = make_runs(tmp_path, {"rank": ["1", "10"]})
    for run in runs:
        write_rows(run.log_path, [{"step": 1, "reward/total": 1.0}])
        run.state = "done"
    plot(collect(runs, None), ["rank"], tmp_path / "sweep.png")
    assert plotted["scale"] == "linear"
    assert list(plotted["lines"].values()) == [[(1.0, 1.0), (10.0, 1.0)]]


def test_without_matplotlib_the_reason_is_printed(runs, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **named):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "needs matplotlib" in plot(collect(runs, None), SWEPT, tmp_path / "sweep.png")


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


def test_runs_on_pairs_are_compared_by_their_own_loss(tmp_path):
    (run,) = make_runs(tmp_path, {"seed": ["1"]})
    write_rows(run.log_path, [{"step": 1, "test/nll": 3.5, "test/dpo_loss": 0.6}])
    (row,) = collect([run], None)
    assert (row["metric"], row["value"]) == ("test/dpo_loss", 0.6)


def test_only_new_rows_are_read(tmp_path):
    rows = [{"step": step, "progress": step / 4000, "x": "y" * 50} for step in range(1, 2001)]
    rows[3]["early"], rows[-3]["test/nll"] = 2.5, 1.5
    (run,) = make_runs(tmp_path, {"seed": ["1"]})
    path = write_rows(run.log_path, rows)
    run.read_metrics()
    assert (run.step, run.total) == (2000, 4000)
    assert run.metrics["test/nll"] == 1.5
    with path.open("a") as file:
        file.write('{"step": 2001, "progress": 0.500')  # an incomplete line
    run.read_metrics()
    assert run.step == 2000
    with path.open("r+b") as file:
        file.write(b"x" * 10)  # read before, so it is not read again
        file.seek(0, 2)
        file.write(b'25}\n{"step": 2002}\n')
    run.read_metrics()
    assert (run.step, run.total) == (2002, 4000)
    assert collect([run], "early")[0]["value"] == 2.5
    trim = [row for row in rows if row["step"] <= 10]
    write_rows(tmp_path / "new", trim * 300).rename(path)  # as a resumed run drops its last rows
    run.read_metrics()
    assert run.step == 10
    assert "test/nll" not in run.metrics


def test_the_live_table_shows_failed_and_running_runs_first(tmp_path):
    runs = make_runs(tmp_path, {"seed": [str(seed) for seed in range(40)]})
    for run in runs[:30]:
        run.state = "done"
    runs[3].state = "failed"
    runs[30].state = runs[31].state = "running"
    write_rows(runs[30].log_path, [{"step": 3, "progress": 0.25, "train_mean_nll": 2.5}])
    runs[30].read_metrics()
    shown = text_of(runs_table(runs, METRICS, 5))
    assert "seed=3 " in shown
    assert "3/12" in shown
    assert "train_mean_nll 2.5" in shown
    assert "1 failed, 2 running, 8 waiting, 29 done" in " ".join(shown.split())
    assert "seed=29" not in shown


def test_without_a_terminal_there_are_lines(tmp_path):
    runs = make_runs(tmp_path, {"seed": ["1", "2"]})
    runs[0].state = "running"
    assert progress_line(runs[0], METRICS).split() == ["running", "seed=1"]
    runs[0].step, runs[0].metrics, runs[0].seconds = 3, {"test/nll": 2.5}, 61.0
    assert progress_line(runs[0], METRICS) == "running   seed=1  3  test/nll 2.5  1:01"
