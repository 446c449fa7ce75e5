"""The one-page loop: it resumes after a kill."""

from __future__ import annotations

import json

import pytest
from homes import new_home
from recipe_runs import RecipeRuns

from recipes import sl_loop
from tinker_cookbook.backends import connect
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments

pytestmark = pytest.mark.slow

OPTIM_STEP = "tinker_cookbook.engine.training.run:TrainingRun.optim_step"


@pytest.fixture(scope="module")
def recipe_runs(tmp_path_factory, stories_model):
    folder = tmp_path_factory.mktemp("loop")
    place = RecipeRuns(folder, stories_model, recipe="recipes.sl_loop")
    place.shorten()
    done = place.run("straight")
    assert done.returncode == 0, done.stderr[-2000:]
    return place


def test_a_whole_run(recipe_runs):
    rows = recipe_runs.rows("straight")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[-1]["progress"] == 1.0
    assert rows[-1]["train_mean_nll"] < rows[0]["train_mean_nll"]
    # Each conversation once an epoch, the partial batch too.
    assert [row["num_sequences"] for row in rows] == [4, 4, 4, 4, 4, 2] * 2


def test_killed_and_resumed_equals_never_killed(recipe_runs):
    recipe_runs.check_killed_and_resumed("killed", OPTIM_STEP, 5, "after")


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("batch_size=23", "batch_size: got 23, expected at most 22"),
        ("max_length=4", "nothing is left to train on with max_length=4"),
    ],
)
def test_invalid_settings_are_refused(recipe_runs, argument, words):
    done = recipe_runs.run("wrong", "raise", argument)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_finished_loop_can_be_made_longer(recipe_runs, monkeypatch, caplog):
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", new_home(recipe_runs.folder / "home"))

    def saved(max_steps: int) -> list[str]:
        caplog.clear()
        words = recipe_runs.words("longer", "resume", "save_every=1", f"max_steps={max_steps}")
        sl_loop.main(parse_arguments(sl_loop.Config, words))
        steps = [row["step"] for row in recipe_runs.rows("longer")]
        assert steps == list(range(1, max_steps + 1))
        lines = (recipe_runs.folder / "longer" / "checkpoints.jsonl").read_text().splitlines()
        return [json.loads(line)["state_path"] for line in lines]

    first, final = saved(2)
    assert saved(2) == [first, final]
    assert "longer is complete (2 steps)" in caplog.text
    # It continues from the final checkpoint, or from the one before if that one is gone.
    assert saved(3)[:2] == [first, final]
    with connect("local", device="cpu") as connection:
        for path in saved(3)[1:]:
            rest = connection.service.create_rest_client()
            rest.delete_checkpoint_from_tinker_path(path).result()
    paths = saved(4)
    assert paths[0] == first
    assert [path.rpartition("/")[2] for path in paths[1:]] == ["000002", "000003", "final"]
    assert "later checkpoints that no longer exist: 2" in caplog.text
