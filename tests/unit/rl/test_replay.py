"""Replays of a recorded RL run."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from homes import new_home

from tinker_cookbook.replay.command import ReplaySettings, compare
from tinker_cookbook.replay.compared import Result


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
