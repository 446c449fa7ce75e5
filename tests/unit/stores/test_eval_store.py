"""The store of evaluations, and the folder that it writes to (under 1 s)."""

from __future__ import annotations

import asyncio
import json

import pytest

from tinker_cookbook.eval.benchmarks import BenchmarkResult, StoredTrajectory, StoredTurn
from tinker_cookbook.exceptions import ConfigurationError, DataError
from tinker_cookbook.stores import EvalStore, LocalStorage, Storage, StorageStat, storage_join


def test_a_run_is_written_and_read(tmp_path):
    store = EvalStore(tmp_path)
    run_id = store.create_run("model", ["gsm8k"], "tinker://a/b/c", config={"limit": 2})
    answers = [
        StoredTrajectory(i, "gsm8k", f"g{i}", [StoredTurn("assistant", "4")], float(i))
        for i in (0, 1)
    ]
    for answer in answers:
        store.write_trajectory(run_id, "gsm8k", answer)
    result = BenchmarkResult("gsm8k", 0.5, 2, 1, pass_at_k={1: 0.5})
    store.write_result(run_id, result)
    store.write_summary(run_id, {"gsm8k": result})
    assert store.finalize_run(run_id).scores == {"gsm8k": 0.5}
    (metadata,) = store.list_runs()
    assert (metadata.run_id, metadata.checkpoint_path) == (run_id, "tinker://a/b/c")
    assert store.read_result(run_id, "gsm8k") == result
    assert store.read_trajectories(run_id, "gsm8k") == answers
    assert store.read_trajectories(run_id, "gsm8k", incorrect_only=True) == answers[:1]
    assert store.read_single_trajectory(run_id, "gsm8k", 1) == answers[1]
    assert store.list_benchmarks(run_id) == ["gsm8k"]
    assert store.read_summary(run_id)["gsm8k"]["pass_at_k"] == {"1": 0.5}
    assert asyncio.run(store.alist_runs()) == [metadata]
    assert asyncio.run(store.aread_trajectories(run_id, "gsm8k", correct_only=True)) == answers[1:]
    # The files of the official package.
    assert (tmp_path / "runs" / run_id / "gsm8k" / "result.json").exists()
    line = json.loads((tmp_path / "runs.jsonl").read_text())
    assert line["run_id"] == run_id
    store.delete_run(run_id)
    assert store.list_runs() == []


def test_a_run_is_continued_under_its_id(tmp_path):
    store = EvalStore(tmp_path, prefix="evals")
    for names in (["gsm8k"], ["math500"], ["gsm8k"]):
        assert store.create_run("model", names, run_id="mine") == "mine"
    (metadata,) = store.list_runs()
    assert metadata.benchmarks == ["gsm8k", "math500"]
    assert len((tmp_path / "evals" / "runs.jsonl").read_text().splitlines()) == 1


def test_names_that_cannot_be(tmp_path):
    store = EvalStore(tmp_path)
    with pytest.raises(ConfigurationError, match=r"run_id: got '\.\./x'"):
        store.create_run("model", [], run_id="../x")
    store.create_run("model", [], run_id="first")
    with pytest.raises(DataError, match="did you mean 'first'"):
        store.read_run("fist")


def test_a_folder_as_storage(tmp_path):
    storage = LocalStorage(tmp_path / "new")
    assert isinstance(storage, Storage)
    storage.write("a/b.txt", b"hello")
    storage.append("a/b.txt", b" world")
    assert storage.read("a/b.txt") == b"hello world"
    assert storage.read_range("a/b.txt", 6) == b"world"
    assert storage.read_range("a/b.txt", 0, 5) == b"hello"
    stat = storage.stat("a/b.txt")
    assert isinstance(stat, StorageStat)
    assert stat.size == 11
    assert (storage.stat("none"), storage.list_dir("none")) == (None, [])
    assert storage.list_dir("a") == ["b.txt"]
    with pytest.raises(ConfigurationError, match="expected a path inside"):
        storage.read("../other")
    storage.remove("a/b.txt")
    storage.remove("a/b.txt")
    storage.remove_dir("a")
    assert not storage.exists("a")
    assert storage_join("", "a/", "/b") == "a/b"
