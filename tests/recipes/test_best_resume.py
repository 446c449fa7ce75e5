"""A killed run goes on to the same best checkpoint and the same early stop, bit for bit (25 s)."""

from __future__ import annotations

import json

import pytest
from recipe_runs import RecipeRuns

pytestmark = pytest.mark.slow

CHECKPOINT_LINE = "tinker_cookbook.run.checkpoints:append_row"
EVALUATE = "tinker_cookbook.training.session:run_evaluators"
PATIENCE = 3


class StoppedRuns(RecipeRuns):
    """Runs with a learning rate that rises until they diverge, so that they stop early."""

    def words(self, name: str, behavior: str = "raise", *extra: str) -> list[str]:
        stopping = [
            "eval_every=1", "best_metric=test/nll", f"early_stopping_patience={PATIENCE}",
            "learning_rate=0.05", "lr_schedule=constant", "warmup_steps=12", "num_epochs=4",
        ]  # fmt: skip
        return super().words(name, behavior, *stopping, *extra)

    def best(self, name: str) -> tuple[int, float, bytes]:
        """Step, value and adapter of the best checkpoint."""
        lines = (self.folder / name / "checkpoints.jsonl").read_text().splitlines()
        (best,) = [line for line in map(json.loads, lines) if line.get("best")]
        adapter = self.weights(best["state_path"]) / "adapter_model.safetensors"
        return best["batch"], best["best_value"], adapter.read_bytes()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, stories_model):
    place = StoppedRuns(tmp_path_factory.mktemp("best"), stories_model)
    straight = place.run("straight")
    assert straight.returncode == 0, straight.stderr[-2000:]
    return place


def test_the_straight_run_has_its_best_in_the_middle_and_stops_early(runs):
    nll = [row["test/nll"] for row in runs.rows("straight")]
    step, value, _ = runs.best("straight")
    assert value == min(nll) == nll[step]
    assert 0 < step == len(nll) - 1 - PATIENCE
    assert len(nll) < 24


@pytest.mark.parametrize(
    ("point", "count", "when"),
    [
        pytest.param(CHECKPOINT_LINE, 2, "before", id="the weights of a best without their line"),
        pytest.param(EVALUATE, -1, "before", id="at the evaluation that ends the run"),
    ],
)
def test_killed_and_resumed_equals_never_killed(runs, request, point, count, when):
    name = request.node.callspec.id.replace(" ", "-")
    if count < 0:
        count = len(runs.rows("straight"))
    runs.check_killed_and_resumed(name, point, count, when)
    assert runs.best(name) == runs.best("straight")
