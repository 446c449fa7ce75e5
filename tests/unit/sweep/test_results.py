"""Progress, table, results and picture from made-up ``metrics.jsonl``."""

from __future__ import annotations

import builtins
import json

import pytest
from made_up import make_jobs, write_rows
from rich.console import Console

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.sweep.results import (
    best_of,
    check_metric,
    collect,
    curves_of,
    draw,
    results_table,
    write_results,
)
from tinker_cookbook.sweep.run import _draw
from tinker_cookbook.sweep.show import SweepDisplay, runs_table
from tinker_cookbook.sweep.watch import Watch, lower_is_better

GRID = {"learning_rate": ["1e-4", "1e-3", "1e-2"], "schedule": ["linear", "cosine"]}


@pytest.fixture
def jobs(tmp_path):
    made = make_jobs(tmp_path, GRID)
    for number, job in enumerate(made):
        rows = [
            {"step": 1, "progress": 0.5, "train_mean_nll": 3.0, "test/nll": 2.0 + number / 10},
            {"step": 2, "progress": 1.0, "train_mean_nll": 2.0 - number / 10},
        ]
        write_rows(job.log_path, rows)
        job.state, job.record.seconds = "done", 61.0
    return made


def text_of(table, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_results_hold_the_last_value_of_the_first_usual_metric(jobs, tmp_path):
    results = collect(jobs, None)
    write_results(results, tmp_path / "results.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    assert rows[1] == {
        "run": "learning_rate=1e-4,schedule=cosine",
        "metric": "test/nll",
        "value": 2.1,
        "step": 2,
        "seconds": 61.0,
        "state": "done",
        "log_path": str(jobs[1].log_path),
        "learning_rate": 0.0001,
        "schedule": "cosine",
    }
    assert best_of(results) is results[0]
    shown = text_of(results_table(results))
    assert "test/nll" in shown
    assert "1:01" in shown


def test_a_metric_of_choice_and_one_that_nobody_logs(jobs):
    best = best_of(collect(jobs, "train_mean_nll"))
    assert best is not None
    assert (best.name, best.value) == ("learning_rate=1e-2,schedule=cosine", 1.5)
    with pytest.raises(ConfigurationError, match="did you mean 'train_mean_nll'"):
        check_metric(collect(jobs, "train_mean_nl"))


def test_failed_runs_are_listed_but_never_best_or_drawn(jobs):
    jobs[0].state = "failed"
    results = collect(jobs, None)
    assert best_of(results) is results[1]
    curves = curves_of(results)
    assert curves is not None
    assert [x for x, _ in curves.lines["schedule=linear"]] == [1e-3, 1e-2]
    for job in jobs:
        job.state = "failed"
    assert best_of(collect(jobs, None)) is None
    assert curves_of(collect(jobs, None)) is None
    check_metric(collect(jobs, "nothing"))


def test_a_run_without_rows(tmp_path):
    results = collect(make_jobs(tmp_path, {"lora_rank": ["1", "2"]}), None)
    assert [(result.value, result.step, result.metric) for result in results] == [(None,) * 3] * 2
    text_of(results_table(results))


def test_the_picture(jobs, tmp_path):
    curves = curves_of(collect(jobs, None))
    assert curves is not None
    assert (curves.x, curves.metric, curves.log_axis) == ("learning_rate", "test/nll", True)
    assert set(curves.lines) == {"schedule=linear", "schedule=cosine"}
    draw(curves, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").stat().st_size > 5000


def test_the_axis_is_linear_within_a_factor_of_ten(tmp_path):
    jobs = make_jobs(tmp_path, {"rank": ["1", "10"]})
    for job in jobs:
        write_rows(job.log_path, [{"step": 1, "reward/total": 1.0}])
        job.state = "done"
    curves = curves_of(collect(jobs, None))
    assert curves is not None
    assert not curves.log_axis
    assert curves.lines == {"": [(1.0, 1.0), (10.0, 1.0)]}


def test_without_matplotlib_there_is_a_sentence(jobs, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **named):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "needs matplotlib" in _draw(collect(jobs, None), tmp_path / "sweep.png")


@pytest.mark.parametrize(
    ("name", "lower"),
    [
        ("test/nll", True),
        ("train_mean_nll", True),
        ("optim/kl_policy_base", True),
        ("test/env/all/reward/total", False),
        ("test/accuracy", False),
        ("env/all/skill", False),
    ],
)
def test_which_way_is_better(name, lower):
    assert lower_is_better(name) is lower


def test_runs_on_pairs_are_compared_by_their_own_loss(tmp_path):
    write_rows(tmp_path, [{"step": 1, "test/nll": 3.5, "test/dpo_loss": 0.6}])
    watch = Watch(tmp_path / "metrics.jsonl")
    watch.look()
    assert watch.metric() == ("test/dpo_loss", 0.6)


def test_a_look_reads_the_end_alone(tmp_path):
    rows = [{"step": step, "progress": step / 4000, "x": "y" * 50} for step in range(1, 2001)]
    rows[-3]["test/nll"] = 1.5
    path = write_rows(tmp_path, rows)
    watch = Watch(path)
    watch.look()
    assert (watch.step, watch.total) == (2000, 4000)
    assert watch.metric() == ("test/nll", 1.5)
    with path.open("a") as file:
        file.write('{"step": 2001, "progress": 0.500')  # being written
    watch.look()
    assert watch.step == 2000
    write_rows(tmp_path, rows[:10])  # a resumed run has trimmed it
    watch.look()
    assert watch.step == 10


def test_the_live_table_keeps_what_matters_when_it_does_not_fit(tmp_path):
    jobs = make_jobs(tmp_path, {"seed": [str(seed) for seed in range(40)]})
    for job in jobs[:30]:
        job.state = "done"
    jobs[3].state = "failed"
    jobs[30].state = jobs[31].state = "running"
    write_rows(jobs[30].log_path, [{"step": 3, "progress": 0.25, "train_mean_nll": 2.5}])
    jobs[30].watch.look()
    shown = text_of(runs_table(jobs, 5))
    assert "seed=3 " in shown
    assert "3/12" in shown
    assert "train_mean_nll 2.5" in shown
    assert "8 waiting, 2 running, 29 done, 1 failed" in " ".join(shown.split())
    assert "seed=29" not in shown


def test_without_a_terminal_there_are_lines(tmp_path, capsys):
    jobs = make_jobs(tmp_path, {"seed": ["1", "2"]})
    jobs[0].state = "running"
    with SweepDisplay(jobs) as display:
        display.changed(jobs[0])
        display.looked()
    assert capsys.readouterr().out.split() == ["running", "seed=1"]
