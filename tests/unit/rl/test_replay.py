"""Replays and forks of a recorded run."""

from __future__ import annotations

import asyncio

import chz
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from homes import new_home
from train_runs import run, without_times

from tinker_cookbook import fork
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.record.read import open_record
from tinker_cookbook.replay.command import ReplaySettings, compare
from tinker_cookbook.replay.compared import Result
from tinker_cookbook.run.config import load_config


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
    ],
    ids=str,
)
def test_a_replay_is_identical(recorded, settings):
    result = replayed(recorded[0], **settings)
    assert len(result.compared) >= 4
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
    finally:
        path.write_bytes(original)
    assert lines[0].endswith("turns are identical")
    assert " was " in lines[1]


def test_a_fork_repeats_the_rest_of_its_run(recorded, tmp_path):
    folder, rows = recorded
    target = tmp_path / "fork"
    command = fork.make_fork(fork.ForkSettings(run=str(folder), step=2, log_path=str(target)))
    assert command[:2] == ["-m", "tinker_cookbook.rl.train"]
    config = chz.replace(
        load_config(target), log_path=str(target), behavior_if_log_dir_exists="resume"
    )
    # What a run wrote after its last checkpoint, before it was killed, is replaced.
    later = target / "record" / "step_000099.train.parquet"
    later.write_bytes(b"not whole")
    again = run(config)
    assert not later.exists()
    assert [without_times(row) for row in again] == [without_times(row) for row in rows]
    for step in (3, 4):
        tables = open_record(target).table(step), open_record(folder).table(step)
        assert tables[0] is not None
        assert tables[0].equals(tables[1])
    with pytest.raises(ConfigurationError, match="steps 2, 4"):
        fork.make_fork(fork.ForkSettings(run=str(folder), step=3, log_path=str(tmp_path / "no")))
