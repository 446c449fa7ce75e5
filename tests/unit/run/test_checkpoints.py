from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import Future as ThreadFuture
from types import SimpleNamespace

import pytest

from tinker_cookbook.checkpoint_utils import (
    CheckpointRecord,
    RunCheckpoints,
    SavePolicy,
    get_last_checkpoint,
    load_checkpoints_file,
    save_checkpoint,
    save_checkpoint_async,
    submit_checkpoint,
)
from tinker_cookbook.exceptions import (
    CheckpointError,
    DataFormatError,
)


class Ready(ThreadFuture):
    """A future that is done; awaitable as those of the backends are."""

    def __init__(self, value=None, error=None):
        super().__init__()
        if error is None:
            self.set_result(value)
        else:
            self.set_exception(error)

    def __await__(self):
        return asyncio.wrap_future(self).__await__()


class RecordingClient:
    """Notes the order of submissions; ``updates`` is what a save submitted now would hold."""

    def __init__(self, error: Exception | None = None):
        self.calls: list[tuple] = []
        self.updates = 0
        self.deleted: list[str] = []
        self.error = error

    def optim_step(self):
        self.updates += 1

    def save_state(self, name, ttl_seconds=None, overwrite=False):
        self.calls.append(("state", name, self.updates, ttl_seconds, overwrite))
        path = SimpleNamespace(path=f"tinker://run/weights/{name}")
        return Ready(path, self.error)

    def save_weights_for_sampler(self, name, ttl_seconds=None):
        self.calls.append(("sampler", name, self.updates, ttl_seconds))
        return Ready(SimpleNamespace(path=f"tinker://run/sampler_weights/{name}"), self.error)

    def delete_checkpoint_from_tinker_path(self, path):
        self.deleted.append(path)
        return Ready(None, RuntimeError("gone") if "000001" in path else None)


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "checkpoints.jsonl").read_text().splitlines()]


def test_unknown_keys_of_a_line_are_kept():
    row = {
        "name": "000005", "batch": 5, "epoch": 0, "state_path": "tinker://r/weights/000005",
        "elapsed_tokens": 123, "rolling": True,
    }  # fmt: skip
    record = CheckpointRecord.from_dict(row)
    assert record.extra == {"elapsed_tokens": 123, "rolling": True}
    assert record.to_dict() == row
    assert (record["batch"], record["elapsed_tokens"], record.get("sampler_path")) == (5, 123, None)
    with pytest.raises(KeyError):
        record["sampler_path"]
    final = CheckpointRecord(name="final", final=True)
    assert final.to_dict() == {"name": "final", "final": True}


def test_last_checkpoint_by_required_key(tmp_path):
    assert get_last_checkpoint(tmp_path) is None
    client = RecordingClient()
    save_checkpoint(client, "000002", tmp_path, {"batch": 2, "epoch": 0}, "both")
    save_checkpoint(client, "000004", tmp_path, {"batch": 4, "epoch": 0}, "sampler")
    with open(tmp_path / "checkpoints.jsonl", "a") as file:
        file.write('{"name": "000006", "batch": 6, "state_pa')  # killed in mid-write
    assert get_last_checkpoint(tmp_path).name == "000002"
    assert get_last_checkpoint(tmp_path, "sampler_path").batch == 4
    assert get_last_checkpoint(tmp_path, "elapsed") is None
    assert [record.name for record in load_checkpoints_file(tmp_path)] == ["000002", "000004"]


def test_a_damaged_list_is_named(tmp_path):
    (tmp_path / "checkpoints.jsonl").write_text('{"batch": 1}\n')
    with pytest.raises(CheckpointError, match="has no name"):
        load_checkpoints_file(tmp_path)
    (tmp_path / "checkpoints.jsonl").write_text("oops\n")
    with pytest.raises(DataFormatError, match=r"checkpoints\.jsonl:1"):
        load_checkpoints_file(tmp_path)


def test_both_spellings_return_paths_and_overwrite(tmp_path):
    client = RecordingClient()
    state = {"batch": 3, "epoch": 1, "note": "x"}
    paths = save_checkpoint(client, "000003", tmp_path, state, "both", ttl_seconds=3600)
    again = asyncio.run(save_checkpoint_async(client, "000003", tmp_path, state, "both", 3600))
    of = {"state_path": "weights", "sampler_path": "sampler_weights"}
    assert paths == again == {key: f"tinker://run/{kind}/000003" for key, kind in of.items()}
    assert client.calls[0] == ("state", "000003", 0, 3600, True)
    assert lines(tmp_path)[0] == lines(tmp_path)[1] == {"name": "000003", **state, **paths}


def test_a_failed_save_lists_nothing(tmp_path):
    save_checkpoint(RecordingClient(), "000001", tmp_path, {"batch": 1})
    broken = RecordingClient(OSError("No space left on device"))
    with pytest.raises(CheckpointError, match=r"000002: its state .*No space left.* are intact"):
        save_checkpoint(broken, "000002", tmp_path, {"batch": 2})
    with pytest.raises(CheckpointError, match="sampler could not be saved"):
        asyncio.run(save_checkpoint_async(broken, "000002", tmp_path, {"batch": 2}, "sampler"))
    assert [row["name"] for row in lines(tmp_path)] == ["000001"]


def test_a_save_holds_the_updates_submitted_before_it(tmp_path):
    client = RecordingClient()
    manager = RunCheckpoints(client, tmp_path, SavePolicy(save_every=5), total_steps=12)
    for step in range(1, 13):
        client.optim_step()
        if reason := manager.due(step):
            asyncio.run(manager.save_async(step, 0, reason, {"note": step}))
    held = {(name, updates) for _, name, updates, *_ in client.calls}
    assert held == {("000005", 5), ("000010", 10), ("final", 12)}
    assert [(r["batch"], r["note"], r.get("final")) for r in lines(tmp_path)] == [
        (5, 5, None), (10, 10, None), (12, 12, True),
    ]  # fmt: skip
    assert "sampler_path" in lines(tmp_path)[2]


def saved_steps(policy: SavePolicy, tmp_path, start=0, tokens_done=0, stop=20) -> list[int]:
    manager = RunCheckpoints(
        RecordingClient(), tmp_path, policy, total_steps=20, tokens_done=tokens_done
    )
    steps = []
    for step in range(start + 1, stop + 1):
        tokens = step * 37
        assert manager.due(step, tokens) == manager.due(step, tokens)  # asking changes nothing
        reason = manager.due(step, tokens)
        if reason:
            asyncio.run(manager.save_async(step, 0, reason, {"cumulative_tokens": tokens}))
            steps.append(step)
    return steps


def test_saving_by_tokens_is_the_same_after_a_resume(tmp_path):
    policy = SavePolicy(save_every=0, save_every_tokens=100)
    whole = saved_steps(policy, tmp_path)
    crossings = [k for k in range(1, 20) if k * 37 // 100 > (k - 1) * 37 // 100]
    assert whole == [*crossings, 20]
    for k in crossings:
        assert saved_steps(policy, tmp_path, start=k, tokens_done=k * 37) == [
            step for step in whole if step > k
        ]


def test_saving_by_seconds(tmp_path):
    now = [0.0]
    client = RecordingClient()
    policy = SavePolicy(save_every=0, save_every_seconds=60)
    manager = RunCheckpoints(client, tmp_path, policy, 100, clock=lambda: now[0])
    saved = []
    for step in range(1, 11):
        now[0] += 25
        if reason := manager.due(step):
            asyncio.run(manager.save_async(step, 0, reason))
            saved.append(step)
    assert saved == [3, 6, 9]


def test_rolling_checkpoints_give_way_only_once_the_next_is_listed(tmp_path):
    client = RecordingClient()
    policy = SavePolicy(save_every=6, rolling_save_every=2, ttl_seconds=9, rolling_ttl_seconds=7)
    manager = RunCheckpoints(client, tmp_path, policy, 100, rest_client=client)
    listed_at_deletion = []
    delete = client.delete_checkpoint_from_tinker_path

    def note(path):
        listed_at_deletion.append([row["name"] for row in lines(tmp_path)])
        return delete(path)

    client.delete_checkpoint_from_tinker_path = note
    for step in range(1, 9):
        if reason := manager.due(step):
            asyncio.run(manager.save_async(step, 0, reason))
    assert client.deleted == ["tinker://run/weights/000002", "tinker://run/weights/000004"]
    assert listed_at_deletion == [["000002", "000004"], ["000004", "000006"]]
    assert [(row["name"], row.get("rolling")) for row in lines(tmp_path)] == [
        ("000006", None), ("000008", True),
    ]  # fmt: skip
    assert [call[3] for call in client.calls] == [7, 7, 9, 7]


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from test_checkpoints import RecordingClient
from tinker_cookbook.checkpoint_utils import save_checkpoint, submit_checkpoint

save_checkpoint(RecordingClient(), "000001", sys.argv[1], {"batch": 1})
pending = submit_checkpoint(RecordingClient(), "000002", sys.argv[1], {"batch": 2})
[future.result() for future in pending.futures.values()]  # saved, but not listed
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_9_between_save_and_line_leaves_the_checkpoint_before(tmp_path):
    here = os.path.dirname(__file__)
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), here])
    assert done.returncode == -signal.SIGKILL
    assert get_last_checkpoint(tmp_path).batch == 1


def test_on_the_local_backend_a_saved_name_is_saved_over_and_loads(tmp_path, stories_model):
    from tinker_cookbook.backends import connect

    service = connect("local").service
    client = service.create_lora_training_client(stories_model, rank=4).result()
    policy = SavePolicy(save_every=0, rolling_save_every=1)
    rest = service.create_rest_client()
    manager = RunCheckpoints(client, tmp_path, policy, 3, rest_client=rest)
    asyncio.run(manager.save_async(1, 0, "rolling"))
    submit_checkpoint(client, "000002", tmp_path, {}).futures["state_path"].result()  # no line
    asyncio.run(manager.save_async(2, 0, "rolling"))
    asyncio.run(manager.save_async(3, 1, "final"))
    record = get_last_checkpoint(tmp_path)
    assert (record.name, record.batch, record.final) == ("final", 3, True)
    run_id = client.get_info().model_id
    left = rest.list_checkpoints(run_id).result().checkpoints
    assert sorted(c.checkpoint_id for c in left) == ["sampler_weights/final", "weights/final"]
    resumed = service.create_training_client_from_state_with_optimizer(record.state_path).result()
    assert resumed.get_info().lora_rank == 4
