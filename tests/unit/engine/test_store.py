"""The checkpoint store: whole or not at all, damage noticed, nothing outside its folder."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest
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


@pytest.mark.parametrize("ttl", [0, -1, True, 10**12, 2**62])
def test_invalid_ttl_is_refused(store: CheckpointStore, ttl: int) -> None:
    with pytest.raises(CheckpointError, match="ttl_seconds: got"):
        save(store, ttl_seconds=ttl)
    path = save(store)
    with pytest.raises(CheckpointError, match="ttl_seconds: got"):
        store.set_ttl(path, ttl)


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
    save(store)
    newest, oldest = store.list_runs()
    assert (newest.run_id, oldest.run_id) == ("run-2", "run-1")
    assert oldest.info == INFO
    assert (oldest.created_at, oldest.last_used_at) == (clock.now - 20, clock.now)
    with pytest.raises(CheckpointError, match="exists; expected a new one"):
        store.create_run("run-1", INFO)
    with pytest.raises(CheckpointError, match=r"not among the 2 runs.*did you mean 'run-1'"):
        store.write_checkpoint("run-11", "weights", "x", adapter={}, adapter_config={})


def test_a_damaged_run_file_hides_that_run_alone(store: CheckpointStore) -> None:
    store.create_run("run-2", INFO)
    (store.root / "runs" / "run-1" / "run.json").write_text('{"run_id": "run-1"')
    assert [run.run_id for run in store.list_runs()] == ["run-2"]
    with pytest.raises(CheckpointError, match=r"run\.json: got 18 bytes that do not describe"):
        store.get_run("run-1")


def test_foreign_files_are_kept(store: CheckpointStore) -> None:
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
