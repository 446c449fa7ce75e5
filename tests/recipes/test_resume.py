"""A run that was killed and continued equals one that was never killed, bit for bit."""

from __future__ import annotations

import json

import pytest
from recipe_runs import RecipeRuns

pytestmark = pytest.mark.slow

JSON_LOGGER = "tinker_cookbook.run.loggers:append_row"
CHECKPOINT_LINE = "tinker_cookbook.run.checkpoints:append_row"
STORE_RENAME = "tinker_cookbook.engine.checkpoints.files:replace_folder"
OPTIM_STEP = "tinker_cookbook.engine.training.run:TrainingRun.optim_step"
EVALUATE = "tinker_cookbook.training.session:run_evaluators"

# Kills inside of a checkpoint's writing: tests/unit/engine/test_store_crashes.py.
KILL_POINTS = [
    pytest.param(OPTIM_STEP, 2, "after", id="before the first checkpoint"),
    pytest.param(OPTIM_STEP, 6, "after", id="between an update and its row"),
    pytest.param(JSON_LOGGER, 4, "after", id="between a row and its checkpoint"),
    pytest.param(STORE_RENAME, 2, "after", id="between a checkpoint and its line"),
    pytest.param(CHECKPOINT_LINE, 2, "after", id="right after a checkpoint's line"),
    pytest.param(STORE_RENAME, 5, "before", id="at the final checkpoint"),
]


@pytest.fixture(scope="module")
def recipe_runs(tmp_path_factory, stories_model):
    """A folder with a small data set, and the finished run that was never killed."""
    folder = tmp_path_factory.mktemp("resume")
    place = RecipeRuns(folder, stories_model)
    place.shorten()
    assert place.run("straight").returncode == 0
    return place


@pytest.mark.parametrize(("point", "count", "when"), KILL_POINTS)
def test_killed_and_resumed_equals_never_killed(recipe_runs, request, point, count, when):
    name = request.node.callspec.id.replace(" ", "-")
    recipe_runs.check_killed_and_resumed(name, point, count, when)


def test_the_straight_run_is_what_it_says(recipe_runs):
    rows = recipe_runs.rows("straight")
    assert [row["step"] for row in rows] == list(range(13))
    assert rows[-1]["progress"] == 1.0
    assert [row["step"] for row in rows if "test/nll" in row] == [0, 4, 8, 12]
    # The last, partial batch trains: 4+4+4+4+4+2 conversations an epoch.
    assert [row["num_sequences"] for row in rows[1:7]] == [4, 4, 4, 4, 4, 2]
    assert rows[-1]["test/nll"] < rows[0]["test/nll"]
    lines = (recipe_runs.folder / "straight" / "checkpoints.jsonl").read_text().splitlines()
    assert [json.loads(line)["batch"] for line in lines] == [3, 6, 9, 12]


def test_a_finished_run_is_left_alone(recipe_runs):
    before = (recipe_runs.folder / "straight" / "metrics.jsonl").read_bytes()
    again = recipe_runs.run("straight", "resume")
    assert again.returncode == 0
    assert "complete" in again.stdout
    assert (recipe_runs.folder / "straight" / "metrics.jsonl").read_bytes() == before


# --- the best checkpoint, and an early stop ------------------------------------------------------


class StoppedRuns(RecipeRuns):
    """Runs with a learning rate that rises until they diverge, so that they stop early."""

    def words(self, name: str, behavior: str = "raise", *extra: str) -> list[str]:
        stopping = [
            "eval_every=1", "best_metric=test/nll", "early_stopping_patience=3",
            "learning_rate=0.05", "lr_schedule=constant", "warmup_steps=12", "num_epochs=4",
        ]  # fmt: skip
        return super().words(name, behavior, *stopping, *extra)

    def best(self, name: str) -> tuple[int, float, bytes]:
        """Step, value and adapter of the best checkpoint."""
        lines = (self.folder / name / "checkpoints.jsonl").read_text().splitlines()
        (best,) = [line for line in map(json.loads, lines) if line.get("best")]
        adapter = self.weights(best["state_path"]) / "adapter_model.safetensors"
        return best["batch"], best["best_value"], adapter.read_bytes()


def test_a_killed_run_has_the_same_best_checkpoint_and_early_stop(tmp_path, stories_model):
    runs = StoppedRuns(tmp_path, stories_model)
    runs.shorten()
    straight = runs.run("straight")
    assert straight.returncode == 0, straight.stderr[-2000:]
    nll = [row["test/nll"] for row in runs.rows("straight")]
    step, value, _ = runs.best("straight")
    assert value == min(nll) == nll[step]
    assert 0 < step == len(nll) - 1 - 3
    # The weights of a best without their line, and the evaluation that ends the run.
    for name, point, count in (("line", CHECKPOINT_LINE, 2), ("end", EVALUATE, len(nll))):
        runs.check_killed_and_resumed(name, point, count, "before")
        assert runs.best(name) == runs.best("straight")
