"""Forks of a recorded RL run."""

from __future__ import annotations

import asyncio
import shutil

import pytest
from homes import new_home
from train_runs import run, without_times

from tinker_cookbook import fork
from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.record.read import open_record
from tinker_cookbook.replay.command import ReplaySettings, compare
from tinker_cookbook.rl import train
from tinker_cookbook.rl.loop.sources import RolloutWorker
from tinker_cookbook.run.lock import RunLock
from tinker_cookbook.utils.command_line.arguments import parse_arguments


@pytest.fixture(autouse=True)
def _home_of_the_run(recorded, monkeypatch):
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", new_home(recorded[0].parent / "home"))


def forked(folder, target, step, *changes, **settings) -> tuple[list[dict], list[str]]:
    """Forks and runs in this process what the command would run; gives the rows and the words."""
    command = fork.make_fork(
        fork.ForkSettings(run=str(folder), step=step, log_path=str(target), **settings), changes
    )
    assert command[:2] == ["-m", "tinker_cookbook.rl.train"]
    return run(parse_arguments(train.Config, command[2:])), command[2:]


@pytest.mark.parametrize("step", [2, 3], ids=["of a checkpoint", "between checkpoints"])
def test_a_fork_repeats_the_rest_of_its_run(recorded, tmp_path, step):
    folder, rows = recorded
    target = tmp_path / "fork"
    command = fork.make_fork(fork.ForkSettings(run=str(folder), step=step, log_path=str(target)))
    # What a run wrote after its last checkpoint, before it was killed, is replaced.
    later = target / "record" / "step_000099.train.parquet"
    later.write_bytes(b"not whole")
    again = run(parse_arguments(train.Config, command[2:]))
    assert not later.exists()
    assert [without_times(row) for row in again] == [without_times(row) for row in rows]
    for step in (3, 4):
        tables = open_record(target).table(step), open_record(folder).table(step)
        assert tables[0] is not None
        assert tables[0].equals(tables[1])


@pytest.mark.parametrize("step", [0, 2])
def test_a_fork_from_the_batch_trains_without_sampling(recorded, tmp_path, step, monkeypatch):
    folder, rows = recorded
    monkeypatch.setattr(RolloutWorker, "run_group", None)
    again, _ = forked(folder, tmp_path / "same", step, "eval_every=0", from_="batch")
    same = [key for key in rows[3] if key.startswith(("optim/", "reward/", "env/all/"))]
    same = [key for key in same if not key.endswith("total_cached_ob_tokens")]
    assert len(same) > 20
    for old, new in zip(rows[-2:], again[-2:], strict=True):
        assert {key: new.get(key) for key in same} == {key: old.get(key) for key in same}
    tables = [open_record(one).table(4) for one in (folder, tmp_path / "same")]
    scored = [table["trainer_logprobs"].to_pylist() for table in tables if table is not None]
    assert scored[0] == scored[1]
    # Another learning rate changes the second update's log-probabilities, on equal data.
    other, _ = forked(
        folder, tmp_path / "other", step, "eval_every=0", "learning_rate=0.001", from_="batch"
    )
    assert other[-1]["reward/total"] == rows[-1]["reward/total"]
    assert other[-1]["optim/kl_sample_train_v1"] != rows[-1]["optim/kl_sample_train_v1"]


def test_forks_of_other_states(recorded, tmp_path):
    folder, rows = recorded
    # From the beginning, while the run trains.
    with RunLock(folder):
        again, _ = forked(folder, tmp_path / "first", 0)
    assert [without_times(row) for row in again] == [without_times(row) for row in rows]
    # Of a fork, into an empty folder.
    target = tmp_path / "second"
    target.mkdir()
    again, _ = forked(tmp_path / "first", target, 2)
    assert [without_times(row) for row in again] == [without_times(row) for row in rows]


def test_each_step_of_a_fork_is_replayed_with_its_own_settings(recorded, tmp_path):
    """5 s. Settings of the fork changed steps 3 and 4 only."""
    target = tmp_path / "fork"
    forked(recorded[0], target, 2, "learning_rate=0.02", "temperature=0.7")
    # Step 2 repeats the update of step 1, step 4 that of step 3.
    for step, what in ((2, "episodes"), (2, "update"), (4, "episodes"), (4, "update")):
        result = asyncio.run(compare(ReplaySettings(run=str(target), step=step, what=what)))
        assert result.identical, (step, what, list(result.lines()))


def test_a_fork_into_a_folder_of_its_run_leaves_out_earlier_forks(recorded, tmp_path):
    run_folder, empty = tmp_path / "run", tmp_path / "empty"
    shutil.copytree(recorded[0], run_folder)
    empty.mkdir()
    (tmp_path / "link").symlink_to(empty)
    for target in (run_folder / "forks" / "a", run_folder / "forks" / "b", tmp_path / "link"):
        fork.make_fork(fork.ForkSettings(run=str(run_folder), step=2, log_path=str(target)))
        assert (target / "record" / "step_000002.train.parquet").is_file()
        assert not (target / "forks").exists()
    assert not list(tmp_path.rglob(".*.fork"))


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({"run": "nowhere"}, (), "run: got 'nowhere', expected the log folder of a run"),
        ({"step": 9}, (), "step: got 9, expected 0 to 4"),
        ({"log_path": "."}, (), "has files; expected a new folder"),
        ({"log_path": "/dev/null/new"}, (), "log_path: /dev/null/new cannot be written"),
        ({}, ("learning_rat=1",), "learning_rat"),
        ({"step": 4, "from_": "batch"}, (), "the record has no step after 4"),
    ],
)
def test_a_fork_refuses(recorded, tmp_path, settings, changes, message):
    given = {"run": str(recorded[0]), "step": 2, "log_path": str(tmp_path / "new"), **settings}
    with pytest.raises(TinkerCookbookError, match=message):
        fork.make_fork(fork.ForkSettings(**given), changes)
    assert not (tmp_path / "new").exists()
