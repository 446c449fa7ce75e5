"""The checkpoint store under kills, full disks and other processes."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from store_samples import clock_fixture, save, store_fixture

from tinker_cookbook.engine.checkpoints import files as store_files
from tinker_cookbook.engine.checkpoints.store import CheckpointStore, RunInfo
from tinker_cookbook.exceptions import CheckpointError

__all__ = ["clock_fixture", "store_fixture"]

DRIVER = Path(__file__).with_name("store_crash_driver.py")


def run_driver(root: Path) -> dict:
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(root)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_killed_before_every_single_file_operation(tmp_path: Path) -> None:
    report = run_driver(tmp_path)
    assert report["calls"] >= 15
    # Once the new one is in place it stays: no later kill brings the old one back.
    first_new = report["new_after"][0]
    assert report["new_after"] == list(range(first_new, report["calls"] + 1))


def test_all_is_on_disk_before_the_rename_shows_it(store, monkeypatch) -> None:
    """A power cut, unlike a kill, loses what was not fsynced."""
    log: list[tuple[str, str]] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(handle: int) -> None:
        log.append(("fsync", Path(os.readlink(f"/proc/self/fd/{handle}")).name))
        real_fsync(handle)

    def rename(source: Path, target: Path) -> None:
        log.append(("rename", Path(target).name))
        real_rename(source, target)

    save(store)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    save(store, overwrite=True)
    shown = log.index(("rename", "step-1"))
    flushed = {name.partition(".new-")[0] for kind, name in log[:shown] if kind == "fsync"}
    assert flushed >= {
        "adapter_config.json",
        "adapter_model.safetensors",
        "optimizer.safetensors",
        "state.json",
        ".step-1",
        "weights",
    }
    assert ("fsync", "weights") in log[shown:]


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_a_full_disk_leaves_the_old_checkpoint(store, monkeypatch, fails_at: int) -> None:
    path = save(store, state={"step": 1})
    real, calls = store_files.write_durably, 0

    def full(target: Path, content: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            target.write_bytes(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        real(target, content)

    monkeypatch.setattr(store_files, "write_durably", full)
    with pytest.raises(CheckpointError, match=r"disk is full .* saved before are intact"):
        save(store, state={"step": 2}, overwrite=True)
    assert os.listdir(store.root / "runs" / "run-1" / "weights") == ["step-1"]
    assert store.read_checkpoint(path, with_optimizer=True).state == {"step": 1}


FULL_DISK = """
import sys
from pathlib import Path
import torch
from tinker_cookbook.engine.checkpoints.store import CheckpointStore, RunInfo
from tinker_cookbook.exceptions import CheckpointError
store = CheckpointStore(Path(sys.argv[1]))
store.create_run("r", RunInfo("m", 1))
try:
    for i in range(99):
        store.write_checkpoint("r", "weights", f"s{i}", adapter={"a": torch.full((50_000,), i)},
                               adapter_config={}, state={"step": i})
except CheckpointError as error:
    print(error)
for info in store.list_checkpoints("r"):
    assert store.read_checkpoint(str(info.path), with_optimizer=False).state["step"] >= 0
print(i, len(store.list_checkpoints("r")), len(list((store.root / "runs/r/weights").iterdir())))
"""


def run_on_mount(code: str, mount: str, where: Path) -> str:
    """Runs ``code`` with ``where`` mounted by ``mount``, in a name space of its own."""
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode
    ):
        pytest.skip("cannot mount a file system here")
    script = f"{mount} && exec '{sys.executable}' -c '{code}' {where}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    said = run_on_mount(FULL_DISK, f"mount -t tmpfs -o size=2m tmpfs {tmp_path}", tmp_path)
    message, figures = said.splitlines()
    assert "the disk is full" in message
    saved, listed, on_disk = map(int, figures.split())
    assert 1 <= saved == listed == on_disk


READ_ONLY = """
import sys
from pathlib import Path
from tinker_cookbook.engine.checkpoints.store import CheckpointStore, RunInfo
from tinker_cookbook.exceptions import CheckpointError
store = CheckpointStore(Path(sys.argv[1]))
print(store.read_checkpoint("tinker://run-1/weights/step-1", with_optimizer=True).state["step"])
print(len(store.list_checkpoints("run-1")))
for write in (
    lambda: store.create_run("r", RunInfo("m", 1)),
    lambda: store.delete_checkpoint("tinker://run-1/weights/step-1"),
    lambda: store.write_checkpoint("run-1", "weights", "x", adapter={}, adapter_config={}),
):
    try:
        write()
    except CheckpointError as error:
        print(error)
"""


def test_a_read_only_store_can_be_read(store: CheckpointStore) -> None:
    save(store)
    save(store, "expired", ttl_seconds=1)  # due for deletion, which is not possible
    (store.root / "runs" / "run-1" / ".lock").unlink()
    (store.root / "runs" / "run-1" / "weights" / ".step-2.new-0123abcd").mkdir()
    mount = f"mount --bind {store.root} {store.root} && mount -o remount,bind,ro {store.root}"
    step, listed, *errors = run_on_mount(READ_ONLY, mount, store.root).splitlines()
    assert (step, listed) == ("5", "1")
    assert len(errors) == 3
    for error in errors:
        assert "cannot be written to" in error
        assert "TINKER_COOKBOOK_HOME" in error


def test_opening_leaves_a_living_writer_alone(store: CheckpointStore) -> None:
    save(store)
    run = store.root / "runs" / "run-1"
    half = run / "weights" / ".step-2.new-0123abcd"
    half.mkdir()
    with store_files.folder_lock(run, exclusive=True):
        CheckpointStore(store.root)
        assert half.exists()
        waiting = store_files.folder_lock(run, exclusive=True, timeout=0.1)
        with (
            pytest.raises(CheckpointError, match=r"has been writing to this run for 0\.1 s"),
            waiting,
        ):
            pass
    CheckpointStore(store.root)
    assert not half.exists()


def test_a_run_is_created_while_another_process_opens_the_store(store, monkeypatch) -> None:
    """The store is opened between the temporary file and its rename to ``run.json``."""
    rename, opened = os.replace, []

    def replace(temporary: Path, path: Path) -> None:
        opened.append(CheckpointStore(store.root))
        rename(temporary, path)

    monkeypatch.setattr(os, "replace", replace)
    store.create_run("run-2", RunInfo("m", 1))
    assert [one.run_ids() for one in opened] == [["run-1", "run-2"]]


def test_readers_and_writers_at_once_see_whole_checkpoints(store: CheckpointStore) -> None:
    path = save(store, state={"step": 0}, adapter={"a": torch.zeros(2000)}, optimizer=None)
    failures: list[BaseException] = []
    seen: set[int] = set()
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                checkpoint = store.read_checkpoint(path, with_optimizer=False)
                assert (checkpoint.adapter["a"] == checkpoint.state["step"]).all()
                seen.add(checkpoint.state["step"])
                time.sleep(0.001)
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    # On a busy machine the readers may wait through many replacements.
    deadline = time.monotonic() + 120
    for step in itertools.count(1):
        tensors = {"a": torch.full((2000,), float(step))}
        save(store, state={"step": step}, adapter=tensors, optimizer=None, overwrite=True)
        enough = step >= 40 and len(seen) > 1
        if enough or failures or time.monotonic() > deadline:
            break
    done.set()
    for reader in readers:
        reader.join()
    assert not failures
    assert len(seen) > 1


def test_a_reader_waits_for_a_replacement_that_begins_while_it_looks(store, monkeypatch) -> None:
    """The reader recovers after a crash; at that very moment another writer begins."""
    path = save(store, state={"step": 7}, optimizer=None)
    folder = store.root / "runs" / path.removeprefix("tinker://")
    aside = folder.with_name(f".{folder.name}.old-01234567")
    folder.rename(aside)
    real_lock = store_files.folder_lock
    writers: list[threading.Timer] = []

    @contextmanager
    def lock(run: Path, *, exclusive: bool, timeout: float = 120.0):
        with real_lock(run, exclusive=exclusive, timeout=timeout):
            yield
        if not exclusive or writers:
            return
        held = ExitStack()
        held.enter_context(real_lock(run, exclusive=True))
        folder.rename(aside)

        def finish() -> None:
            aside.rename(folder)
            held.close()

        writers.append(threading.Timer(0.1, finish))
        writers[0].start()

    monkeypatch.setattr(store_files, "folder_lock", lock)
    assert store.read_checkpoint(path, with_optimizer=False).state == {"step": 7}
    writers[0].join()
