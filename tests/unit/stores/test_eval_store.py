"""The store of evaluations, and the folder that it writes to (under 1 s)."""

from __future__ import annotations

import asyncio
import json

from tinker_cookbook.eval.benchmarks import BenchmarkResult, StoredTrajectory, StoredTurn
from tinker_cookbook.stores import EvalStore


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
    (tmp_path / "runs" / run_id / "note.txt").write_text("not written by an evaluation")
    for _ in range(2):
        store.delete_run(run_id)
    assert store.list_runs() == []
    assert [p.name for p in (tmp_path / "runs").rglob("*.*") if p.is_file()] == ["note.txt"]
