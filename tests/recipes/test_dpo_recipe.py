"""The DPO recipe as a user runs it: it learns, is killed and resumed, and refuses bad input."""

from __future__ import annotations

import json
import math
import signal

import pytest
from recipe_runs import RecipeRuns

from recipes.start import example_data

pytestmark = pytest.mark.slow

OPTIM_STEP = "tinker_cookbook.engine.training.run:TrainingRun.optim_step"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, stories_model):
    """24 pairs of the project's own to train on in batches of 4, 8 held out."""
    folder = tmp_path_factory.mktemp("dpo")
    for name, count in (("comparisons", 24), ("comparisons_test", 8)):
        rows = example_data(f"{name}.jsonl").read_text().splitlines()[:count]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    options = f"""dataset={folder}/comparisons.jsonl test_path={folder}/comparisons_test.jsonl
        batch_size=4 num_epochs=2 save_every=4 eval_every=6 learning_rate=0.003 max_length=256
        show_samples=0"""
    place = RecipeRuns(folder, stories_model, "recipes.preference.dpo.train", options)
    straight = place.run("straight")
    assert straight.returncode == 0, straight.stderr[-2000:]
    return place


def test_it_begins_where_the_definitions_say_and_learns(runs):
    rows = runs.rows("straight")
    start, end = rows[0], rows[-1]
    assert [row["step"] for row in rows] == list(range(13))
    assert start["test/dpo_loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert start["test/accuracy"] == 0.5
    for name in ("margin", "chosen_reward", "rejected_reward"):
        assert start[f"test/{name}"] == pytest.approx(0, abs=1e-4)
    assert rows[1]["dpo_loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert end["test/accuracy"] >= 0.875
    assert end["test/margin"] > 0.1
    assert end["test/dpo_loss"] < 0.65


def test_killed_and_resumed_equals_never_killed(runs):
    """Between an update and its row."""
    runs.check_killed_and_resumed("killed", OPTIM_STEP, 6, "after")


def test_measured_from_a_checkpoint_the_start_is_the_same(runs):
    """Training goes on from weights, which are the reference then: no preference at the start."""
    lines = (runs.folder / "straight" / "checkpoints.jsonl").read_text().splitlines()
    path = json.loads(lines[-1])["state_path"]
    done = runs.run("further", "raise", f"load_checkpoint_path={path}", "max_steps=1")
    assert done.returncode == 0, done.stderr[-2000:]
    assert runs.rows("further")[0]["test/accuracy"] == 0.5
    assert runs.rows("further")[0]["test/margin"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("dpo_beta=0", "dpo_beta"),
        ("dataset=nothing.jsonl", "nothing.jsonl"),
        ("reference_model_name=/no/such/model", "/no/such/model"),
        ("load_checkpoint_path=tinker://a/weights/b", "tinker://a/weights/b"),
    ],
)
def test_bad_input_ends_before_anything_is_written(runs, argument, says):
    done = runs.run("bad", "raise", argument)
    assert done.returncode not in (0, -signal.SIGKILL)
    assert says in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert not (runs.folder / "bad" / "metrics.jsonl").exists()
