"""Benchmarks run within the test's own process: starting a process for each part takes seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from benchmarks import harness
from benchmarks.engine import jobs, worker

IN_PROCESS = {
    "model": "shape:tiny",
    "dtype": "float32",
    "device": "cpu",
    "repeats": 1,
    "rank": 4,
}

RunBench = Callable[[ModuleType, Any], tuple[dict[str, Any], str]]


def run_job(
    kind: str,
    job: dict[str, Any],
    choice: Any,
    work: Any,
    environment: Any = None,
    python: Any = None,
    checkout: Any = None,
) -> dict[str, Any]:
    """Stands in for ``jobs.run_job``; jobs and results go through JSON here as well."""
    job = job | {"device": str(choice.device), "dtype": harness.dtype_name(choice)}
    result = worker._KINDS[kind](json.loads(json.dumps(job)))
    return json.loads(json.dumps({"status": "ok", **result}))


@pytest.fixture
def in_process_bench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> RunBench:
    """``in_process_bench(runner, config)`` gives the JSON object and all that was printed."""

    def run(runner: ModuleType, config: Any) -> tuple[dict[str, Any], str]:
        monkeypatch.setattr(jobs, "run_job", run_job)
        monkeypatch.setattr(runner, "run_job", run_job)
        assert runner.run_benchmark(config) == 0
        printed = capsys.readouterr().out
        return json.loads(printed.splitlines()[-1]), printed

    return run
