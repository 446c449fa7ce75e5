"""An RL run that was killed and continued equals one that was never killed, bit for bit.

Its groups are sampled together, in an order and in batches that differ from run to run.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from recipe_runs import REPO, RecipeRuns, finish, last_of_each

pytestmark = pytest.mark.slow

STORIES = REPO / "tests" / "unit" / "rl"  # where animal_stories.py is

JSON_LOGGER = "tinker_cookbook.run.loggers:append_row"
OPTIM_STEP = "tinker_cookbook.engine.training.run:TrainingRun.optim_step"
QUEUE = "tinker_cookbook.rl.loop.async_source:write_queue"
RECORD = "tinker_cookbook.record.files:write_atomically"
EVALUATE = "tinker_cookbook.training.session:run_evaluators"
GROUP_DONE = "tinker_cookbook.rl.loop.sources:RolloutWorker.count"

KILL_POINTS = [
    pytest.param(GROUP_DONE, 14, "after", id="in the middle of sampling"),
    pytest.param(OPTIM_STEP, 7, "after", id="between two substeps"),
    pytest.param(JSON_LOGGER, 5, "after", id="between a row and its checkpoint"),
    pytest.param(EVALUATE, 3, "before", id="at the last evaluation"),
    pytest.param(RECORD, 4, "before", id="before a file of the record"),
]


class StoryRuns(RecipeRuns):
    """Runs of ``animal_stories``: 6 iterations of 4 groups, two substeps each."""

    def __init__(self, folder: Path, model: str) -> None:
        super().__init__(folder, model, recipe="animal_stories")

    def arguments(self, name: str, behavior: str = "raise") -> list[str]:
        return [
            f"model_name={self.model}",
            f"log_path={self.folder / name}",
            f"behavior_if_log_dir_exists={behavior}",
            "num_batches=3",
            "num_epochs=2",
            "num_substeps=2",
            "save_every=2",
            "eval_every=3",
            "reward_for=length",
            "warmup_steps=2",
            "lora_rank=4",
            "backend=local",
            "device=cpu",
            "dtype=float32",
        ]

    def environment(self, **extra: str) -> dict[str, str]:
        path = os.pathsep.join([str(REPO), str(STORIES)])
        # With one thread each, runs on a busy machine do not wait for one another's barriers.
        return {**super().environment(), "PYTHONPATH": path, **extra}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, stories_model):
    """The finished run that was never killed."""
    place = StoryRuns(tmp_path_factory.mktemp("rl-resume"), stories_model)
    straight = place.run("straight")
    assert straight.returncode == 0, straight.stderr[-2000:]
    return place


@pytest.mark.parametrize(("point", "count", "when"), KILL_POINTS)
def test_killed_and_resumed_equals_never_killed(runs, request, point, count, when):
    name = request.node.callspec.id.replace(" ", "-")
    runs.check_killed_and_resumed(name, point, count, when)
    assert transcripts(runs, name) == transcripts(runs, "straight")
    assert recorded(runs, name) == recorded(runs, "straight")


def recorded(runs: StoryRuns, name: str) -> dict[str, list]:
    """The rows of each file of the record."""
    folder = runs.folder / name / "record"
    return {
        path.name: pq.read_table(path).to_pylist() for path in folder.rglob("*") if path.is_file()
    }


def transcripts(runs: StoryRuns, name: str) -> dict[str, str]:
    folder = runs.folder / name
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.glob("iteration_*/*_rollout_summaries.jsonl"))
    }


def test_the_straight_run_is_what_it_says(runs):
    rows = runs.rows("straight")
    assert [row["step"] for row in rows] == list(range(7))
    assert [row["epoch"] for row in rows[1:]] == [0, 0, 0, 1, 1, 1]
    assert [row["step"] for row in rows if "test/env/all/reward/total" in row] == [0, 3, 6]
    assert {row["optim/num_steps"] for row in rows[1:]} == {2}
    lines = (runs.folder / "straight" / "checkpoints.jsonl").read_text().splitlines()
    assert [json.loads(line)["batch"] for line in lines] == [2, 4, 6]


@pytest.mark.parametrize(
    ("point", "count", "when"),
    [
        pytest.param(JSON_LOGGER, 5, "after", id="before the queue is written"),
        pytest.param(QUEUE, 2, "after", id="between the queue and its checkpoint"),
    ],
)
def test_an_asynchronous_run_goes_on_with_its_queue(runs, request, point, count, when):
    """The public package loses queued groups and the place in the data."""
    name = "async-" + request.node.callspec.id.replace(" ", "-")
    killed = runs.run(name, "raise", "mode=async", kill=[point, str(count), when])
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    (saved,) = (runs.folder / name).glob("async_queue_000002.jsonl")
    head, *queued = [json.loads(line) for line in saved.read_text().strip().split("\n")]
    kept = {(group["batch"], group["index"]) for group in queued}
    begun = {tuple(place) for place in head["in_flight"]}
    assert kept | begun  # there was something to lose
    resumed = runs.run(name, "resume", "mode=async")
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert [row["step"] for row in runs.rows(name)] == list(range(7))
    # The third update trains the oldest groups, so what was queued comes before anything new.
    rows = runs.rows(name)
    assert rows[3]["async/staleness_max"] <= 2
    assert head["position"] > [0, 3]


def test_ctrl_c_in_the_middle_of_sampling(runs):
    name = "ctrl-c"
    # One group of four takes an hour; the others are done at once.
    slow = ("slow_seconds=3600", "save_every=1")
    process, paused = runs.start_paused(GROUP_DONE, 3, name, *slow)
    folder = runs.folder / name
    process.send_signal(signal.SIGINT)
    paused.unlink()
    stopped = finish(process)
    assert stopped.returncode == 130, stopped.stderr[-2000:]
    assert "stopped by Ctrl-C" in stopped.stdout
    assert "Traceback" not in stopped.stderr
    text = (folder / "iteration_000000" / "train_rollout_summaries.jsonl").read_text()
    found = {json.loads(line)["tags"][0] for line in text.splitlines()}
    assert len(found) == 3
    lines = stopped.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith("continue with:"))
    command = shlex.split(lines[at + 1])
    continued = finish(runs.start(last_of_each([*command, "slow_seconds=0", "save_every=2"])))
    assert continued.returncode == 0, continued.stderr[-2000:]
    assert runs.rows(name) == runs.rows("straight")
    assert runs.adapter(name) == runs.adapter("straight")
