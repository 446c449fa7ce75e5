"""The checkpoint store: whole or not at all, damage noticed, nothing outside its folder."""

from __future__ import annotations

import json
import os
import tarfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import safetensors.torch
import torch
from store_samples import (
    INFO,
    Clock,
    adapter,
    clock_fixture,
    folder_of,
    optimizer,
    save,
    store_fixture,
)

from tinker_cookbook.backends.local_rest import LocalRestClient
from tinker_cookbook.engine.checkpoints import format as fmt
from tinker_cookbook.engine.checkpoints.store import CheckpointStore, RunInfo
from tinker_cookbook.engine.home import home_dir
from tinker_cookbook.exceptions import CheckpointError

__all__ = ["clock_fixture", "store_fixture"]


def test_round_trip_returns_every_tensor_and_value(store: CheckpointStore) -> None:
    moments = {**optimizer(), "half": torch.randn(3).bfloat16(), "none": torch.zeros(0, 2)}
    path = save(store, optimizer=moments, user_metadata={"renderer_name": "qwen3"})
    assert path == "tinker://run-1/weights/step-1"

    loaded = CheckpointStore(store.root, store.clock).read_checkpoint(path, with_optimizer=True)
    assert loaded.optimizer is not None
    for got, wanted in ((loaded.adapter, adapter()), (loaded.optimizer, moments)):
        assert got.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert got[name].dtype == tensor.dtype
            assert torch.equal(got[name], tensor)
    assert loaded.adapter_config == {"r": 4, "target_modules": ["q_proj"]}
    assert loaded.state == {"step": 5, "rng": [1, 2, 3], "nested": {"x": 0.1}}
    assert loaded.user_metadata == {"renderer_name": "qwen3"}
    assert store.read_checkpoint(path, with_optimizer=False).optimizer is None


def test_files_are_the_formats_own(store: CheckpointStore) -> None:
    folder = folder_of(store, save(store))
    read = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in adapter().items())
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
    assert json.loads((folder / "state.json").read_text())["state"]["step"] == 5


def test_equal_tensors_give_equal_bytes(store: CheckpointStore) -> None:
    first = folder_of(store, save(store, "one"))
    shuffled = dict(reversed(adapter().items()))
    strided = {name: t.t().contiguous().t() for name, t in shuffled.items()}
    second = folder_of(store, save(store, "two", adapter=strided))
    name = "adapter_model.safetensors"
    assert (first / name).read_bytes() == (second / name).read_bytes()
    changed = {key: t.clone() for key, t in adapter().items()}
    changed["base_model.model.q_proj.lora_A.weight"][0, 0] += 1e-6
    third = folder_of(store, save(store, "three", adapter=changed))
    assert (first / name).read_bytes() != (third / name).read_bytes()


def test_tensors_that_share_storage_are_saved_as_they_are(store: CheckpointStore) -> None:
    flat = torch.arange(10.0)
    shared = {"x": flat[:6].view(2, 3), "y": flat[4:], "z": flat}
    loaded = store.read_checkpoint(save(store, optimizer=shared), with_optimizer=True)
    assert loaded.optimizer is not None
    assert all(torch.equal(loaded.optimizer[name], tensor) for name, tensor in shared.items())


def test_state_with_integer_keys_survives_its_own_checksum(store: CheckpointStore) -> None:
    path = save(store, state={"by_step": {2: "a", 10: "b"}, "loss": float("nan")})
    state = store.read_checkpoint(path, with_optimizer=False).state
    assert state["by_step"] == {"2": "a", "10": "b"}


@pytest.mark.parametrize(
    "name", ["adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"]
)
@pytest.mark.parametrize("keep", [0, 1, 0.5, -1])
def test_a_truncated_file_is_named_with_its_sizes(store, name, keep) -> None:
    save(store, "step-0")
    path = save(store)
    file = folder_of(store, path) / name
    size = file.stat().st_size
    kept = {0: 0, 1: 1, 0.5: size // 2, -1: size - 1}[keep]
    os.truncate(file, kept)
    with pytest.raises(CheckpointError) as error:
        store.read_checkpoint(path, with_optimizer=True)
    for part in (str(file), f"got {kept} bytes", f"expected {size}", "'step-0'"):
        assert part in str(error.value)
    problems = {info.path.name: info.problem for info in store.list_checkpoints("run-1")}
    assert problems["step-0"] is None
    assert f"expected {size}" in str(problems["step-1"])


def test_every_truncation_of_the_state_file_is_noticed(store: CheckpointStore) -> None:
    path = save(store)
    file = folder_of(store, path) / "state.json"
    whole = file.read_bytes()
    for kept in range(len(whole)):
        file.write_bytes(whole[:kept])
        with pytest.raises(CheckpointError, match=f"{file}: got {kept} bytes"):
            store.read_checkpoint(path, with_optimizer=False)


def test_every_flipped_byte_is_noticed(store: CheckpointStore) -> None:
    path = save(store)
    for file in sorted(folder_of(store, path).iterdir()):
        whole = file.read_bytes()
        for place in range(0, len(whole), 7):
            damaged = bytearray(whole)
            damaged[place] ^= 1
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=file.name):
                store.read_checkpoint(path, with_optimizer=True)
        file.write_bytes(whole)
    assert store.read_checkpoint(path, with_optimizer=True).state["step"] == 5


def test_a_missing_file_is_named(store: CheckpointStore) -> None:
    path = save(store)
    for name in ("adapter_model.safetensors", "optimizer.safetensors", "state.json"):
        file = folder_of(store, path) / name
        whole = file.read_bytes()
        file.unlink()
        with pytest.raises(CheckpointError, match=f"{file}: the file is missing"):
            store.read_checkpoint(path, with_optimizer=True)
        file.write_bytes(whole)


def test_a_damaged_optimizer_does_not_keep_the_weights_from_loading(store) -> None:
    path = save(store)
    os.truncate(folder_of(store, path) / "optimizer.safetensors", 3)
    assert store.read_checkpoint(path, with_optimizer=False).adapter.keys() == adapter().keys()


def test_missing_checkpoints_point_to_the_nearest(store: CheckpointStore) -> None:
    save(store, "step-000100")
    save(store, "final", kind="sampler_weights")
    with pytest.raises(CheckpointError, match="did you mean 'step-000100'"):
        store.read_checkpoint("tinker://run-1/weights/step-00100", with_optimizer=True)
    with pytest.raises(CheckpointError, match="tinker://run-1/sampler_weights/final"):
        store.read_checkpoint("tinker://run-1/weights/final", with_optimizer=True)
    with pytest.raises(CheckpointError, match=r"'run-2', which is not among.*did you mean 'run-1'"):
        store.read_checkpoint("tinker://run-2/weights/final", with_optimizer=True)


def test_sampler_weights_hold_no_optimizer(store: CheckpointStore) -> None:
    save(store, "step-1")
    path = save(store, "step-1", kind="sampler_weights")
    assert store.read_checkpoint(path, with_optimizer=False).state["step"] == 5
    with pytest.raises(CheckpointError, match=r"only the adapter, no optimizer.*weights: 'step-1'"):
        store.read_checkpoint(path, with_optimizer=True)
    with pytest.raises(CheckpointError, match="expected kind 'weights'"):
        save(store, "two", kind="sampler_weights", optimizer=optimizer())
    bare = save(store, "bare", optimizer=None)
    with pytest.raises(CheckpointError, match="saved without optimizer state"):
        store.read_checkpoint(bare, with_optimizer=True)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc", ".hidden", "a b", "é", "x" * 129, "a\0", "a\n"]
)
def test_unsafe_names_are_refused(store: CheckpointStore, name: str) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint name: got .*step-000100"):
        save(store, name)
    with pytest.raises(CheckpointError, match="run id: got"):
        store.create_run(name, INFO)
    with pytest.raises(CheckpointError):
        store.read_checkpoint(f"tinker://run-1/weights/{name}", with_optimizer=False)
    with pytest.raises(CheckpointError):
        store.delete_checkpoint(f"tinker://{name}/weights/x")


@pytest.mark.parametrize("path", ["step-1", "tinker://run-1/step-1", "tinker://run-1/w/x", "/a/b"])
def test_other_paths_are_refused(store: CheckpointStore, path: str) -> None:
    with pytest.raises(CheckpointError, match="expected tinker://RUN/weights/NAME"):
        store.read_checkpoint(path, with_optimizer=False)


def test_an_existing_name_needs_overwrite(store: CheckpointStore) -> None:
    path = save(store, state={"step": 1})
    with pytest.raises(CheckpointError, match="overwrite=True"):
        save(store, state={"step": 2})
    assert store.read_checkpoint(path, with_optimizer=True).state == {"step": 1}
    save(store, state={"step": 3}, overwrite=True)
    assert store.read_checkpoint(path, with_optimizer=True).state == {"step": 3}
    assert os.listdir(store.root / "runs" / "run-1" / "weights") == ["step-1"]


def test_values_that_json_cannot_hold_leave_nothing_behind(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match=r"adapter_config: .*set is not JSON"):
        save(store, adapter_config={"target_modules": {"q_proj"}})
    with pytest.raises(CheckpointError, match="state: "):
        save(store, state={"x": torch.zeros(1)})
    assert os.listdir(store.root / "runs" / "run-1" / "weights") == []


def test_expiry(store: CheckpointStore, clock: Clock) -> None:
    path = save(store, ttl_seconds=60)
    kept = save(store, "kept")
    assert store.get_checkpoint(path).expires_at == clock.now + 60
    store.set_ttl(path, 100)
    store.set_ttl(kept, 100)
    store.set_ttl(kept, None)
    assert store.get_checkpoint(kept).expires_at is None
    assert store.expire() == []
    clock.now += 100
    with pytest.raises(CheckpointError, match=r"expired at 1970-01-12 13:48:20\+00:00.*'kept'"):
        store.read_checkpoint(path, with_optimizer=True)
    assert [str(info.path) for info in store.list_checkpoints("run-1")] == [kept]
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        store.set_ttl(path, None)
    reopened = CheckpointStore(store.root, clock)
    assert not folder_of(store, path).exists()
    assert reopened.read_checkpoint(kept, with_optimizer=True).state["step"] == 5


def test_expire_at_a_given_time_names_what_it_deleted(store, clock: Clock) -> None:
    path = save(store, ttl_seconds=60)
    save(store, "kept", ttl_seconds=600)
    assert store.expire(clock.now + 61) == [path]
    assert store.expire(clock.now + 61) == []


@pytest.mark.parametrize("ttl", [0, -1, True, 10**12, 2**62])
def test_a_ttl_that_is_no_duration_is_refused(store: CheckpointStore, ttl: int) -> None:
    with pytest.raises(CheckpointError, match="ttl_seconds: got"):
        save(store, ttl_seconds=ttl)
    path = save(store)
    with pytest.raises(CheckpointError, match="ttl_seconds: got"):
        store.set_ttl(path, ttl)


def test_a_hundred_years_are_a_ttl(store: CheckpointStore) -> None:
    path = save(store, ttl_seconds=fmt.MAX_TTL_SECONDS)
    assert store.get_checkpoint(path).expires_at == store.clock() + fmt.MAX_TTL_SECONDS


@pytest.mark.parametrize("metadata", [{"a": "x\ud800"}, {"\udfff": "x"}])
def test_metadata_with_half_a_character_are_refused(store: CheckpointStore, metadata) -> None:
    with pytest.raises(CheckpointError, match=r"user_metadata: '.*ud.*' is not valid Unicode"):
        save(store, user_metadata=metadata)
    with pytest.raises(CheckpointError, match="user_metadata"):
        store.create_run("run-2", replace(INFO, user_metadata=metadata))
    assert store.run_ids() == ["run-1"]
    assert store.list_checkpoints("run-1") == []


def test_stores_of_older_versions_are_listed(store: CheckpointStore, monkeypatch) -> None:
    """They may have dates after the year 9999 and metadata with half a character."""
    monkeypatch.setattr(fmt, "check_metadata", lambda metadata: None)
    store.create_run("run-2", replace(INFO, user_metadata={"a": "\ud800"}))
    path = save(store, user_metadata={"\udfff": "b"})
    for seconds in ("1e12", "inf", "1e300", "nan"):
        (folder_of(store, path) / "expires_at").write_text(seconds)
        rest = LocalRestClient(store)
        (found,) = rest.list_user_checkpoints().result().checkpoints
        assert found.expires_at == datetime(9999, 1, 1, tzinfo=UTC)
        assert found.user_metadata == {"?": "b"}
        found.model_dump_json().encode()
        runs = rest.list_training_runs().result().training_runs
        assert [run.user_metadata for run in runs] == [{"a": "b"}, {"a": "?"}]


def test_the_shape_of_a_checkpoint_is_its_own(store: CheckpointStore) -> None:
    """A run that has loaded a checkpoint of another shape saves that shape."""
    shape = {"rank": 16, "train_mlp": True, "train_attn": False, "train_unembed": False}
    info = LocalRestClient(store).get_weights_info_by_tinker_path(save(store, state=shape)).result()
    assert (info.base_model, info.lora_rank) == (INFO.base_model, 16)
    assert (info.train_mlp, info.train_attn, info.train_unembed) == (True, False, False)


def test_an_expired_name_is_free(store: CheckpointStore, clock: Clock) -> None:
    path = save(store, ttl_seconds=60, state={"step": 1})
    clock.now += 61
    save(store, state={"step": 2})
    assert store.read_checkpoint(path, with_optimizer=False).state == {"step": 2}


def test_delete(store: CheckpointStore) -> None:
    path = save(store)
    archive = store.archive(path)
    store.delete_checkpoint(path)
    assert store.list_checkpoints("run-1") == []
    assert not archive.exists()
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        store.delete_checkpoint(path)


def test_runs(store: CheckpointStore, clock: Clock) -> None:
    clock.now += 10
    store.create_run("run-2", RunInfo(base_model="m", lora_rank=8))
    clock.now += 10
    store.touch_run("run-1")
    newest, oldest = store.list_runs()
    assert (newest.run_id, oldest.run_id) == ("run-2", "run-1")
    assert oldest.info == INFO
    assert (oldest.created_at, oldest.last_used_at) == (clock.now - 20, clock.now)
    with pytest.raises(CheckpointError, match="exists; expected a new one"):
        store.create_run("run-1", INFO)
    with pytest.raises(CheckpointError, match="did you mean 'run-1'"):
        store.touch_run("run-11")
    with pytest.raises(CheckpointError, match="not among the 2 runs"):
        store.write_checkpoint("other", "weights", "x", adapter={}, adapter_config={})


def test_a_damaged_run_file_hides_that_run_alone(store: CheckpointStore) -> None:
    store.create_run("run-2", INFO)
    (store.root / "runs" / "run-1" / "run.json").write_text('{"run_id": "run-1"')
    assert [run.run_id for run in store.list_runs()] == ["run-2"]
    with pytest.raises(CheckpointError, match=r"run\.json: got 18 bytes that do not describe"):
        store.get_run("run-1")


def test_what_is_not_the_stores_own_is_left_alone(store: CheckpointStore) -> None:
    path = save(store)
    strangers = [
        store.root / "runs" / "notes.txt",
        store.root / "runs" / "my run" / "run.json",
        store.root / "runs" / "run-1" / "weights" / ".DS_Store",
        store.root / "runs" / "run-1" / "weights" / "notes.txt",
        store.root / "runs" / "run-1" / "weights" / "a copy" / "state.json",
    ]
    for stranger in strangers:
        stranger.parent.mkdir(exist_ok=True)
        stranger.write_text("mine")
    reopened = CheckpointStore(store.root, store.clock)
    assert [run.run_id for run in reopened.list_runs()] == ["run-1"]
    assert [str(info.path) for info in reopened.list_checkpoints("run-1")] == [path]
    assert all(stranger.read_text() == "mine" for stranger in strangers)


def test_listing_is_oldest_first(store: CheckpointStore, clock: Clock) -> None:
    paths = []
    for name, kind in (("b", "weights"), ("a", "sampler_weights"), ("c", "weights")):
        clock.now += 1
        paths.append(save(store, name, kind=kind, user_metadata={"n": name}))
    listed = store.list_checkpoints("run-1")
    assert [str(info.path) for info in listed] == paths
    assert listed[0].size_bytes == sum(
        file.stat().st_size for file in folder_of(store, paths[0]).iterdir() if file.stem != "state"
    )
    assert listed[1].user_metadata == {"n": "a"}


def test_copy_out_and_archive_hold_the_adapter_alone(store, tmp_path: Path) -> None:
    path = save(store)
    names = ["adapter_config.json", "adapter_model.safetensors"]
    copy = store.copy_out(path, tmp_path / "deep" / "copy")
    assert sorted(os.listdir(copy)) == names
    with tarfile.open(store.archive(path)) as archive:
        assert archive.getnames() == names
        for name in names:
            packed = archive.extractfile(name)
            assert packed is not None
            source = (folder_of(store, path) / name).read_bytes()
            assert packed.read() == (copy / name).read_bytes() == source
    with pytest.raises(CheckpointError, match="new or empty folder"):
        store.copy_out(path, copy)
    os.truncate(folder_of(store, path) / names[1], 9)
    with pytest.raises(CheckpointError, match="got 9 bytes"):
        store.copy_out(path, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_the_default_root_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", str(tmp_path / "home"))
    assert home_dir() == CheckpointStore().root == tmp_path / "home"
    monkeypatch.delenv("TINKER_COOKBOOK_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home_dir() == tmp_path / ".tinker_cookbook"
    assert not (tmp_path / "home").exists()  # looking creates nothing


def test_equal_adapters_have_equal_files():
    tensors = {"a": torch.ones(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}
    metadata = {"renderer_name": "é", "base_model_digest": "1", "other": "x" * 9}
    files = {fmt.encode_tensors(tensors, metadata) for _ in range(20)}
    (content,) = files
    assert fmt.header_metadata(content) == metadata
    read = safetensors.torch.load(content)
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
