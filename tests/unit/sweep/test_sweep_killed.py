"""A whole sweep on a real server: killed half-way, started again, equal to runs without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.start import example_data
from tinker_cookbook.run.lock import lock_holder

REPO = Path(__file__).resolve().parents[3]
SHARED = {
    "renderer_name": "role_colon",
    "batch_size": "4",
    "max_steps": "6",
    "save_every": "2",
    "device": "cpu",
    "dtype": "float32",
}


def rows_of(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith("time/")}
        for line in lines
    ]


def wait_until(condition, process: subprocess.Popen[str] | None, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        if process is not None and process.poll() is not None:
            pytest.fail(process.communicate()[0][-3000:])
        assert time.monotonic() < until, "it did not come so far"
        time.sleep(0.05)


@pytest.mark.slow
def test_killed_and_started_again_equals_runs_without_a_server(stories_model, tmp_path):
    conversations = example_data("conversations.jsonl").read_text().splitlines()
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(conversations[:22]) + "\n")
    settings = {"model_name": stories_model, "dataset_path": str(data), **SHARED}
    out = tmp_path / "out"
    names = [f"learning_rate={rate},lora_rank={rank}" for rate in ("1e-3", "5e-3") for rank in "24"]
    command = [sys.executable, "-m", "tinker_cookbook.sweep", "recipes.sl_loop"]
    command += ["learning_rate=1e-3,5e-3", "lora_rank=2,4", f"log_dir={out}", "jobs=2"]
    command += [f"{key}={value}" for key, value in settings.items()]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": str(REPO)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    killed = start()
    wait_until(lambda: len(rows_of(out / names[0])) >= 3, killed, 300)
    killed.kill()
    killed.communicate()
    # Nobody is left on the log folders; were it otherwise, the second sweep could not go on.
    wait_until(lambda: not any(lock_holder(out / name) for name in names), None, 30)
    assert not (out / "results.jsonl").exists()
    cut = [name for name in names if 0 < len(rows_of(out / name)) < 6]

    again = start()
    said = again.communicate(timeout=500)[0]
    assert again.returncode == 0, said[-3000:]
    assert all(f"resumed   {name}" in said for name in cut)
    results = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [result["run"] for result in results] == names
    assert all((result["state"], result["step"]) == ("done", 6) for result in results)
    assert (out / "sweep.png").stat().st_size > 5000

    from recipes import sl_loop
    from tinker_cookbook.utils.command_line.entrypoint import parse_arguments

    settings.update(log_path=str(tmp_path / "alone"), backend="local")
    settings.update(learning_rate="1e-3", lora_rank="2")
    words = [f"{key}={value}" for key, value in settings.items()]
    sl_loop.main(parse_arguments(sl_loop.Config, words))
    assert rows_of(out / names[0]) == rows_of(tmp_path / "alone")
    assert results[0]["value"] == rows_of(tmp_path / "alone")[-1]["train_mean_nll"]
