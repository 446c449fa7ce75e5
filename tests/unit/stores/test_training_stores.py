"""Storages, the files of runs in them and the registry of runs (under 1 s)."""

from __future__ import annotations

import asyncio
import json
import pickle

import fsspec
import pytest

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.run.lock import RunLock
from tinker_cookbook.run.loggers import JsonLogger
from tinker_cookbook.stores import (
    AsyncStorage,
    FsspecStorage,
    IncrementalReader,
    LocalStorage,
    RunRegistry,
    Storage,
    TrainingRunStore,
    storage_from_uri,
)


@pytest.fixture(params=["local", "file", "memory"])
def storage(request, tmp_path):
    fsspec.filesystem("memory").store.clear()
    if request.param == "file":
        return FsspecStorage(fsspec.filesystem("file"), str(tmp_path))
    uri = tmp_path.as_uri() if request.param == "local" else "memory://runs/one"
    return storage_from_uri(uri)


def file_system(storage):
    """The storage's folder as fsspec sees it, which is the reference."""
    return fsspec.core.url_to_fs(storage.url())


def test_operations_on_files_are_those_of_the_file_system(storage):
    fs, root = file_system(storage)
    assert isinstance(storage, Storage)
    assert isinstance(storage, AsyncStorage)
    with storage as same:
        same.write("a/b.txt", b"hello")
        asyncio.run(same.aappend("a/b.txt", b" world"))
        same.append("a/new.txt", b"x")
        # Before a flush, the same object sees what it appended.
        assert same.read("a/b.txt") == asyncio.run(same.aread("a/b.txt")) == b"hello world"
        assert (same.read_range("a/b.txt", 6), same.read_range("a/b.txt", 0, 5)) == (
            b"world",
            b"hello",
        )
        assert same.list_dir("a") == ["b.txt", "new.txt"]
        assert same.list_dir("") == ["a"]
        assert same.stat("a/b.txt").size == 11
    assert fs.cat_file(f"{root}/a/b.txt") == b"hello world"
    restored = pickle.loads(pickle.dumps(storage))
    fs.pipe_file(f"{root}/a/later.txt", b"by another program")
    assert restored.list_dir("a") == ["b.txt", "later.txt", "new.txt"]
    stat = restored.stat("a/later.txt")
    assert stat.size == fs.size(f"{root}/a/later.txt")
    assert stat.mtime == pytest.approx(fs.modified(f"{root}/a/later.txt").timestamp(), abs=2)
    assert restored.read_range("a/later.txt", 3, 7) == b"another"
    restored.remove_dir("a")
    assert restored.exists("a/later.txt")
    for name in ("b.txt", "later.txt", "new.txt", "new.txt"):
        restored.remove(f"a/{name}")
    restored.remove_dir("a")
    assert not fs.exists(f"{root}/a")
    assert (restored.stat("a"), restored.list_dir("a"), restored.exists("a")) == (None, [], False)
    with pytest.raises(FileNotFoundError):
        restored.read("a/b.txt")
    for call in (restored.read, restored.url, restored.list_dir):
        with pytest.raises(ConfigurationError, match="expected a path inside"):
            call("../../other")


def test_two_writers_append_to_one_file(storage):
    """Each flush adds to the file as it is then, so that no row of the other is lost."""
    other = pickle.loads(pickle.dumps(storage))
    for number, one in enumerate((storage, other, storage, other)):
        one.append("rows", b"%d\n" % number)
    assert storage.stat("rows").size == len(storage.read("rows"))
    storage.flush()
    assert other.read_range("rows", 2) in (b"2\n1\n3\n", b"1\n2\n3\n")
    other.flush()
    assert sorted(storage.read("rows").split()) == [b"0", b"1", b"2", b"3"]


def test_what_a_run_writes_is_read_while_it_runs(tmp_path):
    store = TrainingRunStore(LocalStorage(tmp_path))
    assert (store.read_config(), store.read_metrics(), store.read_rollouts(0)) == (None, [], [])
    log = JsonLogger(tmp_path)
    log.log_hparams({"loss_fn": "ppo"})
    for step in range(3):
        log.log_metrics({"loss": float("nan") if step == 1 else 1.0}, step)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert store.read_metrics() == rows
    assert store.read_config() == json.loads((tmp_path / "config.json").read_text())
    # A killed run leaves half a row, which the continued run replaces.
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 3, "lo')
    assert (store.read_new_metrics(), store.read_metrics()) == ([], rows)
    assert store.truncate_metrics(2) == 2  # step 2 and the torn row
    kept = [{"step": 2, "other": 5}, {"step": 3}]
    for row in kept:
        store.write_metrics({k: v for k, v in row.items() if k != "step"}, row["step"])
    assert [row["step"] for row in store.read_metrics()] == [0, 1, 2, 3]
    assert "other" in store.metric_keys()
    assert (tmp_path / "metrics.jsonl.pre_resume_000002").read_bytes().endswith(b'"lo')
    store.write_checkpoint({"name": "000003", "batch": 3, "mine": 1})
    with open(tmp_path / "checkpoints.jsonl", "ab") as file:
        file.write(b'{"name": "0000')
    (record,) = store.read_checkpoint_records()
    assert (record.name, record.batch, record.extra) == ("000003", 3, {"mine": 1})


def test_a_reader_follows_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    reader = IncrementalReader(LocalStorage(tmp_path), "rows.jsonl", max_records=2)
    steps = [
        (b"", [], 0),
        (b'{"a": 1}\n{"b"', [{"a": 1}], 1),
        (b'{"a": 1}\n{"b": 2}\n\n{"step": 3}\n', [{"b": 2}, {"step": 3}], 3),
        (b'{"c": 1}\n', [{"c": 1}], 1),  # shorter: it was written again
        # Written again, and longer since.
        (b'{"d": 1}\n{"d": 2}\n', [{"d": 1}, {"d": 2}], 2),
        (b'{"d": 1}\n{"e": 2}\n', [{"d": 1}, {"e": 2}], 2),
    ]
    for content, new, total in steps:
        path.write_bytes(content)
        assert (reader.read(), reader.total_read) == (new, total)
        assert reader.read() == []
    path.write_bytes(b'{"c": 1}\nnot a row\n')
    for _ in range(2):
        with pytest.raises(DataFormatError, match=r"rows\.jsonl:2: not JSON"):
            reader.read()


def test_the_registry_of_runs(tmp_path):
    folders = {
        "rl": {"loss_fn": "ppo", "num_epochs": 1},
        "sl": {"num_epochs": 1},
        "dpo": {"dpo_beta": 0.1, "num_epochs": 1},
        "other": {},
    }
    for root in ("a", "b"):
        for name, config in folders.items():
            TrainingRunStore(LocalStorage(tmp_path / root), name).write_config(config)
    (tmp_path / "a" / "sl" / "config.json").write_text("{")  # a broken run hides no other one
    (tmp_path / "a" / "no run").mkdir()
    done = TrainingRunStore(LocalStorage(tmp_path / "a"), "rl")
    done.write_metrics({}, 0)
    done.write_checkpoint({"name": "final", "final": True})
    registry = RunRegistry([LocalStorage(tmp_path / "a"), LocalStorage(tmp_path / "b")])
    with RunLock(tmp_path / "a" / "dpo"):
        found = registry.refresh()
    found_a = {run.run_id: (run.status, run.training_type) for run in found[:4]}
    assert found_a == {
        "rl": ("completed", "rl"),
        "sl": ("idle", None),
        "dpo": ("running", "dpo"),
        "other": ("idle", None),
    }
    # The second folder has runs of the same names.
    assert registry.storage_for("b--sl").url() == (tmp_path / "b").as_uri()
    assert registry.get_run("b--sl").training_type == "sl"
    assert registry.get_run("b--sl").run_id == "b--sl"
    # A finished run that was continued and killed has later rows.
    done.write_checkpoint({"name": "final", "final": True, "batch": 3})
    done.write_metrics({"step": 9}, 9)
    assert registry.refresh()[0].status != "completed"
    assert registry.get_run("none") is None
    assert registry.get_eval_store() is None
    (alone,) = RunRegistry([LocalStorage(tmp_path / "b" / "rl")]).get_runs()
    assert (alone.run_id, alone.prefix, alone.has_metrics) == ("root", "", False)
