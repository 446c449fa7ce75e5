"""The queue of an asynchronous run on disk."""

from __future__ import annotations

import json
import math

import pytest
import tinker

from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.exceptions import CheckpointError
from tinker_cookbook.rl.loop.async_source import QueueState, read_queue, write_queue
from tinker_cookbook.rl.loop.sources import RolloutGroup
from tinker_cookbook.rl.types import (
    RolloutError,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    Transition,
)
from tinker_cookbook.run.jsonl import append_row


def a_group(index: int = 0) -> RolloutGroup:
    image = tinker.types.ImageChunk(data=b"\x89PNG\x00\xff", format="png", expected_tokens=3)
    pictured = tinker.ModelInput(chunks=[tinker.EncodedTextChunk(tokens=[5, 6]), image])
    turns = [
        Transition(
            ob=tinker.ModelInput.from_ints([1, 2, 3]),
            ac=TokensWithLogprobs([7, 8], [-0.1, -1 / 3], "length", "seq-1", 2),
            reward=0.1 + 0.2,
            episode_done=False,
            metrics={"format": 1, "odd": math.nan},
            logs={"text": 'caf\u00e9 \u2028 "quoted"', "n": 3},
        ),
        Transition(pictured, TokensWithLogprobs([9], [-2.5]), -1.0, True, masked=True),
    ]
    trajectory = Trajectory(
        turns,
        tinker.ModelInput.empty(),
        StopReason.MAX_TURNS,
        reward_without_turn=0.25,
        metrics={"best": math.inf},
        logs={"why": "x"},
        messages='[{"role": "user", "content": "Hi"}]',
        seconds={"sampling": 0.5},
    )
    group = TrajectoryGroup(
        [trajectory, Trajectory([], tinker.ModelInput.empty())],
        [1.5, 0.0],
        [{"judge": 0.5}, {}],
        [RolloutError("TimeoutError", "gone")],
        sampling_client_step=4,
    )
    return RolloutGroup(3, index, result=group, tags=["math", "easy"], seconds=1.25)


def test_a_group_comes_back_as_it_was(tmp_path):
    write_queue(tmp_path, 12, QueueState((5, 1), [(4, 3), (4, 2)], [a_group(0), a_group(1)]))
    state = read_queue(tmp_path, 12)
    assert state is not None
    assert (state.position, list(state.in_flight)) == ((5, 1), [(4, 2), (4, 3)])
    first, second = state.queue
    assert (first.index, second.index) == (0, 1)
    for got, expected in zip(state.queue, [a_group(0), a_group(1)], strict=True):
        assert (got.batch, got.tags, got.seconds) == (3, ["math", "easy"], 1.25)
        # NaN equals nothing, so it is compared as text.
        assert repr(got.group) == repr(expected.group)
        before, after = (g.trajectories_G[0].messages for g in (expected.group, got.group))
        assert after == before
        assert got.group.get_total_rewards() == expected.group.get_total_rewards()


def test_the_file_is_plain_json(tmp_path):
    write_queue(tmp_path, 3, QueueState((1, 0), [], [a_group()]))
    (path,) = tmp_path.iterdir()
    head, group = [json.loads(line) for line in path.read_text().strip().split("\n")]
    assert head == {
        "version": 1,
        "step": 3,
        "position": [1, 0],
        "in_flight": [],
        "num_groups": 1,
    }
    assert group["trajectories"][0]["transitions"][0]["ac"]["tokens"] == [7, 8]


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: lines[:-1],
        lambda lines: [lines[0].replace('"version": 1', '"version": 9'), *lines[1:]],
        lambda lines: [lines[0], lines[1].replace("final_ob", "final")],
        lambda lines: [],
    ],
    ids=["a group is missing", "another version", "a field is missing", "empty"],
)
def test_a_damaged_file_is_refused(tmp_path, damage):
    write_queue(tmp_path, 3, QueueState((1, 0), [], [a_group()]))
    (path,) = tmp_path.iterdir()
    lines = path.read_text().strip().split("\n")
    path.write_text("".join(line + "\n" for line in damage(lines)))
    with pytest.raises(CheckpointError, match="remove the file"):
        read_queue(tmp_path, 3)


def test_files_of_checkpoints_that_are_gone_are_removed(tmp_path):
    state = QueueState((0, 0), [], [])
    for step in (1, 2, 3):
        write_queue(tmp_path, step, state)
        if step != 2:  # killed before its line was written, or rolled away since
            append_row(tmp_path / "checkpoints.jsonl", {"name": f"{step}", "batch": step})
    names = sorted(path.name for path in tmp_path.glob("async_queue_*"))
    assert names == ["async_queue_000001.jsonl", "async_queue_000003.jsonl"]
