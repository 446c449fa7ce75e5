"""Published checkpoints: every owner reads them, their owner alone changes them (one server)."""

from __future__ import annotations

import httpx
import pytest
import torch
from serving import Serving

from tinker_cookbook.engine.checkpoints.store import RunInfo
from tinker_cookbook.exceptions import CheckpointError
from tinker_cookbook.server.keys import KeyFile

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 44, 101]}]}


@pytest.fixture
def owners(tmp_path):
    """Stores of ann, who has a run with two checkpoints of each kind, and of bob."""
    keys = KeyFile(tmp_path / "keys.json", tmp_path)
    keys.ensure(["ann", "bob"])
    ann, bob = keys.owner("ann").store, keys.owner("bob").store
    ann.create_run("r", RunInfo("m", 4, user_metadata={"renderer_name": "x", "log_path": "/a"}))
    for kind in ("weights", "sampler_weights"):
        for name in ("shown", "hidden"):
            ann.write_checkpoint(
                "r", kind, name, adapter={"w": torch.ones(2)}, adapter_config={},
                optimizer={"m": torch.ones(2)} if kind == "weights" else None,
            )  # fmt: skip
    return ann, bob


def test_a_save_above_the_quota_is_refused_before_it_is_written(owners):
    ann, bob = owners

    def save(name: str, numbers: int, store=ann, **more) -> str:
        adapter = {"w": torch.ones(numbers)}
        return store.write_checkpoint(
            "r", "weights", name, adapter=adapter, adapter_config={}, **more
        )

    largest = save("large", 5000)
    ann.quota_bytes = ann.used_bytes() + 2000
    before = sorted(ann.root.rglob("*")), ann.used_bytes()
    said = rf"'ann' already uses .* of .*disk_quota_gb.* delete {largest} \(0\.0 MiB\)"
    with pytest.raises(CheckpointError, match=said):
        save("another", 5000)
    assert (sorted(ann.root.rglob("*")), ann.used_bytes()) == before
    save("small", 1)
    save("large", 5000, overwrite=True)
    bob.create_run("r", RunInfo("m", 4))
    save("large", 9000, bob)  # each owner has a quota
    ann.delete_checkpoint(largest)
    save("another", 5000)


def reads(store, path: str) -> bool:
    """Whether an owner can read a checkpoint in every way, or in none."""
    ways = [
        lambda: store.get_checkpoint(path),
        lambda: store.read_checkpoint(path, with_optimizer="/weights/" in path),
        lambda: store.peft_files(path),
        lambda: store.archive(path),
    ]
    worked, messages = [], []
    for way in ways:
        try:
            way()
            worked.append(True)
        except CheckpointError as error:
            worked.append(False)
            messages.append(str(error).replace(path, ""))
    assert len(set(worked)) == 1
    assert not any("hidden" in message for message in messages)  # the name of a private one
    return worked[0]


@pytest.mark.parametrize("kind", ["weights", "sampler_weights"])
def test_only_published_checkpoints_are_readable(owners, kind):
    ann, bob = owners
    path, hidden = f"tinker://r/{kind}/shown", f"tinker://r/{kind}/hidden"
    assert not reads(bob, path)
    ann.set_public(path, True)
    assert reads(bob, path)
    assert not reads(bob, hidden)
    assert [str(info.path) for info in bob.list_checkpoints("r")] == [path]
    assert [str(info.path) for _, info, _ in bob.published_by_others()] == [path]
    assert bob.get_run("r").info.user_metadata == {"renderer_name": "x"}
    assert (bob.run_ids(), bob.list_runs()) == ([], [])
    ann.set_public(path, False)
    assert not reads(bob, path)
    with pytest.raises(CheckpointError, match="not among the 0 runs of 'bob'"):
        bob.get_run("r")
    assert reads(ann, path)


def test_the_owner_alone_changes_it(owners):
    ann, bob = owners
    path = "tinker://r/weights/shown"
    ann.set_public(path, True)
    for change in (
        lambda: bob.set_public(path, False),
        lambda: bob.delete_checkpoint(path),
        lambda: bob.set_ttl(path, 1),
    ):
        with pytest.raises(
            CheckpointError, match="to another owner, and only the owner may do that"
        ):
            change()
    assert reads(bob, path)


def test_replaced_checkpoint_is_private_and_expired_ones_are_gone(owners):
    ann, bob = owners
    path, other = "tinker://r/weights/shown", "tinker://r/weights/hidden"
    ann.set_public(path, True)
    ann.write_checkpoint("r", "weights", "shown", adapter={"w": torch.zeros(2)},
                         adapter_config={}, overwrite=True)  # fmt: skip
    assert not reads(bob, path)
    for one in (path, other):
        ann.set_public(one, True)
    ann.set_ttl(other, 100)
    real = ann.clock
    ann.clock = lambda: real() + 101
    assert not reads(bob, other)
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        ann.set_public(other, True)
    ann.delete_checkpoint(path)
    assert not reads(bob, path)


def sampled(caller, path: str) -> tuple[int, object]:
    """Status and tokens of a sample of a checkpoint."""
    status, made = caller.post("create_sampling_session", session_id=caller.session(),
                               sampling_session_seq_id=0, model_path=path)  # fmt: skip
    if status != 200:
        return status, made
    answer = caller.post("asample", sampling_session_id=made["sampling_session_id"], seq_id=1,
                         prompt=PROMPT, num_samples=1,
                         sampling_params={"seed": 0, "max_tokens": 8})  # fmt: skip
    if answer[0] != 200:
        return answer
    return 200, caller.result(answer)["sequences"][0]["tokens"]


@pytest.mark.slow
def test_over_http_and_after_a_restart(serving: Serving, caller, stories_model):
    """15 s: the server starts twice."""
    local, ann = caller("local"), caller("ann")
    model = local.model(stories_model)
    local.result(local.train(model, 1))
    local.result(local.step(model, 2))
    saved = local.result(local.post("save_weights", model_id=model, seq_id=3, path="good"))["path"]
    path = local.result(local.post("save_weights_for_sampler", model_id=model, seq_id=4,
                                   path="good"))["path"]  # fmt: skip
    own = sampled(local, path)
    assert own[0] == 200
    assert sampled(ann, path)[0] == 404
    for one in (saved, path):
        address = f"/training_runs/{model}/checkpoints/{one.partition(model + '/')[2]}/publish"
        assert ann.http.post(address).status_code == 404
        assert local.http.post(address).status_code == 204
    assert sampled(ann, path) == own
    # Trained from, with the optimizer.
    loaded = ann.post("load_weights", session_id=ann.session(), model_seq_id=0, path=saved,
                      optimizer=True)  # fmt: skip
    made = ann.result(loaded)
    assert ann.result(ann.train(made["model_id"], 1))["loss_fn_outputs"]
    listed = ann.get(f"/training_runs/{model}/checkpoints")[1]["checkpoints"]
    assert {(one["tinker_path"], one["public"]) for one in listed} == {(saved, True), (path, True)}
    models = httpx.get(f"{serving.url}/oai/api/v1/models",
                       headers={"X-API-Key": serving.key("ann")})  # fmt: skip
    entry = next(one for one in models.json()["data"] if one["id"] == path)
    assert entry["owned_by"] == "local"
    address = f"/training_runs/{model}/checkpoints/sampler_weights/good"
    refused = ann.http.delete(address)
    assert refused.status_code == 404
    assert "belongs to another owner" in refused.json()["detail"]
    serving.stop()
    serving.start()
    local, ann = caller("local"), caller("ann")
    assert sampled(ann, path) == own
    urls = ann.get(f"{address}/external_weights_urls")[1]["urls"]
    assert httpx.get(urls["adapter_model.safetensors"]).status_code == 200
    assert local.http.delete(f"{address}/publish").status_code == 204
    assert sampled(ann, path)[0] == 404
