"""Replays of a recorded RL run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from animal_stories import MODES, story_config
from homes import new_home
from train_runs import run

from tinker_cookbook.exceptions import ConfigurationError, DataError
from tinker_cookbook.replay.command import ReplaySettings, compare
from tinker_cookbook.replay.compared import Compared, Result


@pytest.fixture(autouse=True)
def _home_of_the_run(recorded, monkeypatch):
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", new_home(recorded[0].parent / "home"))


def replayed(folder, **settings) -> Result:
    """What a replay compares."""
    return asyncio.run(compare(ReplaySettings(run=str(folder), **settings)))


@pytest.mark.parametrize(
    "settings",
    [
        {"step": 1},
        # No checkpoint: step 3 is trained again from the record.
        {"step": 4, "group": 2},
        {"step": 2, "what": "update"},
        {"step": 4, "split": "eval_test"},
        {"step": 3, "group": 1, "episode": 2, "tools": "live"},
    ],
    ids=str,
)
def test_a_replay_is_identical(recorded, settings):
    result = replayed(recorded[0], **settings)
    assert len(result.compared) >= (1 if "episode" in settings else 4)
    assert result.identical, list(result.lines())


def test_a_replay_names_the_first_different_token(recorded, tmp_path):
    # Step 3 with the weights of step 1: the record says that these sampled it.
    folder = recorded[0]
    path = folder / "record" / "step_000003.train.parquet"
    original = path.read_bytes()
    table = pq.read_table(path)
    place = table.schema.get_field_index("weights_step")
    wrong = table.set_column(
        place, table.schema.field(place), pa.array([0] * len(table), pa.int32())
    )
    try:
        pq.write_table(wrong, path)
        lines = list(replayed(folder, step=3).lines())
        path.write_bytes(original[:100])
        with pytest.raises(DataError, match=r"step_000003\.train\.parquet: the file is damaged"):
            replayed(folder, step=3)
    finally:
        path.write_bytes(original)
    assert lines[0].endswith("turns are identical")
    assert " was " in lines[1]


@pytest.mark.parametrize("split", ["train", "eval_test"])
def test_recorded_answers_are_graded_again(recorded, split):
    result = replayed(recorded[0], step=4, split=split, what="grading")
    assert list(result.lines()) == [
        f"identical: prompts, rewards and metrics; episodes: {16 if split == 'train' else 8}"
    ]


def test_an_episode_becomes_a_test(recorded, tmp_path):
    """4 s for pytest in a process of its own."""
    file = tmp_path / "test_episode.py"
    result = replayed(recorded[0], step=3, group=2, episode=1, pytest=str(file))
    assert result.notes == [f"wrote {file}; run it with: pytest {file}"]
    folders = [Path(__file__).parents[3], Path(__file__).parent]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file.name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
    )
    assert "1 passed" in done.stdout, done.stdout
    # A grader that changed fails it.
    written = runpy.run_path(str(file))
    written["CONFIG"]["dataset_builder"]["reward_for"] = "length"
    with pytest.raises(AssertionError):
        written["test_the_grading_of_the_episode"]()
    with pytest.raises(ConfigurationError, match="exists; give another file"):
        replayed(recorded[0], step=3, group=2, episode=1, pytest=str(file))


def test_updates_with_other_settings_are_repeated(stories_model, tmp_path):
    """8 s."""
    for name, settings in {
        "cap": {"importance_ratio_cap": 2.0, "num_substeps": 2, "loss_fn": "ppo"},
        "stream": {"importance_ratio_cap": 2.0, **MODES["stream"]},
    }.items():
        data = {"num_batches": 2, "reward_for": "length"}
        run(story_config(stories_model, tmp_path / name, data, save_every=1, **settings))
        result = replayed(tmp_path / name, step=2, what="update")
        assert result.identical, (name, list(result.lines()))
        assert result.also


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"run": "nowhere"}, "run: got 'nowhere', expected the log folder of a run"),
        ({"step": 9}, "step, split: got 9, train; expected one of the 5 recorded steps, 0 to 4"),
        ({"split": "test"}, "got 1, test; expected one of the splits of step 1: train"),
        ({"group": 7}, "group: got 7, expected 0 to 3 in step 1"),
        ({"group": 1, "episode": -1}, "episode: got -1, expected 0 to 3 in step 1"),
        ({"what": "all"}, "what: got 'all', expected episodes, update or grading"),
        (
            {"pytest": "/nowhere/x.py", "group": 1, "episode": 0},
            "pytest: /nowhere/x.py cannot be written: No such file or directory",
        ),
        ({"pytest": "test_x.py", "group": 1}, "a test is of one episode; give group= and episode="),
    ],
)
def test_a_replay_refuses(recorded, settings, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        asyncio.run(compare(ReplaySettings(**{"run": str(recorded[0]), "step": 1, **settings})))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_type": "nowhere.module:Config"}, "nowhere.module:Config cannot be found"),
        ({"record": "off"}, "has no record (record=off)"),
    ],
)
def test_a_replay_refuses_a_run(recorded, tmp_path, change, message):
    config = json.loads((recorded[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        replayed(tmp_path, step=1)


def result_of(difference: float, token: int = 5, **origin: str) -> Result:
    """A result of three tokens, the last of which may be another."""
    tokens = np.array([3, 4, 5], np.int32), np.array([3, 4, token], np.int32)
    logprobs = np.full(3, -1.0, np.float32), np.full(3, -1.0 - difference, np.float32)
    now = {"backend": "local", "device": "cpu", "dtype": "float32", "torch": "2", **origin}
    return Result([Compared("turn", tokens, logprobs)], origins=(now | {"torch": "1"}, now))


def test_the_bound_is_stated_where_results_are_not_identical():
    assert not result_of(1e-6).passed
    one_token = Result(
        [replace(result_of(1e-6).compared[0], tokens=(np.array([3]), np.array([3])))]
    )
    assert "log-probabilities of the token before: mean" in "".join(one_token.lines())
    assert list(Result(notes=["step 1 trained on nothing"]).lines()) == [
        "step 1 trained on nothing"
    ]
    on_gpu = result_of(0.01, 6, device="cuda", dtype="bfloat16")
    assert on_gpu.passed
    assert list(on_gpu.lines()) == [
        "0 of 1 turns are identical",
        "turn: token 0 was 3 (-1.000000), is 3 (-1.010000)",
        "log-probabilities of the 2 tokens before: mean difference 0.01, largest 0.01; within the "
        "bound of the mean, 0.02, for bfloat16 on cuda",
        "torch: was 1, is 2",
    ]
    assert not result_of(0.01, device="cuda").passed
    assert result_of(0.01, backend="https://server").passed
