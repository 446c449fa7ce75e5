"""The best checkpoint by a metric, early stopping, and both after a kill."""

from __future__ import annotations

import asyncio
from pathlib import Path

import chz
import pytest
from loop_runs import config_of, rows, run

from tinker_cookbook.checkpoint_utils import load_checkpoints_file
from tinker_cookbook.eval.evaluators import TrainingClientEvaluator
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.best import BestEvaluation
from tinker_cookbook.supervised import train

VALUES = {0: 0.5, 1: 0.4, 2: 0.3, 3: 0.6, 4: 0.7, 5: 0.35, 6: 0.2, 7: 0.9, 8: 0.9}


NEXT_STEP = [0]  # not a setting, because a resumed run has the same ones


class Scripted(TrainingClientEvaluator):
    """Gives a value for each evaluation, in order; continues where a killed run stopped."""

    def __init__(self, first: int) -> None:
        self.step = first

    async def __call__(self, training_client):
        value = VALUES[self.step]
        self.step += 1
        NEXT_STEP[0] = self.step
        return {"eval/score": value}


@chz.chz
class ScriptedBuilder:
    def __call__(self):
        return Scripted(NEXT_STEP[0])


@pytest.fixture(autouse=True)
def from_the_beginning():
    NEXT_STEP[0] = 0


def config(model, folder, **settings):
    common = {
        "eval_every": 1,
        "save_every": 0,
        "best_metric": "eval/score",
        "evaluator_builders": [ScriptedBuilder()],
        "num_epochs": 2,
    }
    return config_of(model, folder, **{**common, **settings})


def best_of(config):
    return [line for line in load_checkpoints_file(config.log_path) if line.extra.get("best")]


def saved(path: str | None) -> bool:
    from tinker_cookbook.backends import connect

    assert path is not None
    with connect("local", device="cpu", dtype="float32") as connection:
        runs = connection.service.create_rest_client()
        run_id = path.removeprefix("tinker://").split("/")[0]
        listed = runs.list_checkpoints(run_id).result().checkpoints
    return path in {checkpoint.tinker_path for checkpoint in listed}


def test_the_best_of_a_rising_and_falling_metric(tmp_path, stories_model, capsys):
    lowest = config(stories_model, tmp_path, best_metric_mode="min", num_epochs=1)
    run(lowest)
    (best,) = best_of(lowest)
    assert (best.name, best.batch, best["best_value"], best["best_metric"]) == (
        "best",
        2,
        0.3,
        "eval/score",
    )
    assert str(best.sampler_path).endswith("/best-000002")
    # The final line is the last one, from which the run would continue.
    assert load_checkpoints_file(lowest.log_path)[-1].name == "final"
    assert saved(best.sampler_path)
    assert saved(best.state_path)
    assert f"best         {best.sampler_path} (eval/score 0.3 after step 2)" in (
        capsys.readouterr().out
    )
    NEXT_STEP[0] = 0
    highest = config(stories_model, tmp_path / "max", num_epochs=1)
    run(highest)
    (best,) = best_of(highest)
    # 0.6 after step 3 was the best for one step, and its weights are gone.
    assert best.batch == 4
    assert not saved(str(best.sampler_path).replace("000004", "000003"))


def test_an_early_stop_and_what_continues_it(tmp_path, stories_model, capsys):
    settings = {"best_metric_mode": "min", "count": 8, "num_epochs": 1}
    stopped = config(stories_model, tmp_path, early_stopping_patience=2, **settings)
    metrics = run(stopped)
    # 0.3 after step 2 is followed by 0.6 and 0.7.
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4]
    last = load_checkpoints_file(stopped.log_path)[-1]
    assert (last.name, last.batch, last.final) == ("final", 4, True)
    said = "stopped after step 4: 2 evaluations were not better than eval/score 0.3 after step 2"
    assert said in capsys.readouterr().out
    run(stopped)
    assert "stopped early after step 4; a larger early_stopping_patience" in capsys.readouterr().out
    # A larger patience continues, and the count goes on: 0.35 is the third, 0.2 is better.
    run(config(stories_model, tmp_path, early_stopping_patience=4, **settings))
    assert [row["step"] for row in rows(stopped)] == list(range(9))
    (best,) = best_of(stopped)
    assert (best.batch, best["best_value"]) == (6, 0.2)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", ["save", "line", "after"])
def test_a_killed_run_continues_with_the_same_best(tmp_path, stories_model, monkeypatch, at):
    from tinker_cookbook.run import checkpoints

    settings = {"best_metric_mode": "min", "save_every": 3, "early_stopping_patience": 4}
    straight = config(stories_model, tmp_path / "straight", **settings)
    run(straight)
    killed = config(stories_model, tmp_path / "killed", **settings)
    NEXT_STEP[0] = 0
    append, submit = checkpoints.append_row, checkpoints.submit_checkpoint

    def append_row(path, row, **options):
        if row.get("best") and row["batch"] == 2 and at == "line":
            raise Killed
        append(path, row, **options)
        if row.get("best") and row["batch"] == 2 and at == "after":
            raise Killed

    def submit_checkpoint(client, name, *rest):
        if name == "best-000002" and at == "save":
            raise Killed
        return submit(client, name, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "append_row", append_row)
        patch.setattr(checkpoints, "submit_checkpoint", submit_checkpoint)
        with pytest.raises(Killed):
            asyncio.run(train.main(killed))
    # The best so far is listed, and its weights exist; an older one is deleted by a later save.
    best = best_of(killed)[-1]
    assert best.batch is not None
    assert best.batch == (2 if at == "after" else 1)
    assert saved(best.state_path)
    NEXT_STEP[0] = best.batch + 1
    run(config(stories_model, tmp_path / "killed", **settings))
    assert rows(killed) == rows(straight)
    shown = [(b.batch, b["best_value"]) for b in best_of(killed)]
    assert shown == [(b.batch, b["best_value"]) for b in best_of(straight)] == [(6, 0.2)]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"best_metric": "eval/scor"}, r"best_metric: got 'eval/scor'.*did you mean 'eval/score'"),
        ({"best_metric": None, "early_stopping_patience": 2}, "early_stopping_patience: got 2 wit"),
        ({"best_metric": None, "best_metric_mode": "min"}, "best_metric_mode: got min without"),
        ({"eval_every": 0, "infrequent_eval_every": 0}, "switch evaluations off"),
    ],
)
def test_settings_without_effect_are_refused(tmp_path, stories_model, settings, word):
    with pytest.raises(ConfigurationError, match=word):
        run(config(stories_model, tmp_path, **settings))
    assert not (Path(tmp_path) / "run" / "checkpoints.jsonl").exists()


@pytest.mark.parametrize(
    ("metric", "mode"),
    [("test/nll", "min"), ("test/bpb", "min"), ("eval/gsm8k/score", "max"), ("a/accuracy", "max")],
)
def test_the_direction_is_inferred(tmp_path, stories_model, metric, mode):
    made = BestEvaluation.of(config(stories_model, tmp_path, best_metric=metric))
    assert made is not None
    assert made.mode == mode


def test_nan_is_never_the_best():
    best = BestEvaluation("a", "min", 2)
    assert not best.update(0, {"a": float("nan")})
    assert best.update(1, {"a": 2.0})
    assert not best.update(2, {"a": float("nan")})
    assert not best.update(3, {"b": 1.0})
    assert (best.step, best.without, best.exhausted) == (1, 1, False)
