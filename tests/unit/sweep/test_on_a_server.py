"""A sweep on a server that runs already, which it uses and leaves alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from serving import Serving

from recipes.start import example_data

REPO = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_a_running_server_is_used_and_left_running(stories_model, tmp_path):
    conversations = example_data("conversations.jsonl").read_text().splitlines()
    data, out = tmp_path / "train.jsonl", tmp_path / "out"
    data.write_text("\n".join(conversations[:12]) + "\n")
    running = Serving(tmp_path / "server", {"model_name": stories_model}).start()
    try:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tinker_cookbook.sweep", "recipes.sl_loop"),
                *(f"server={running.url}", "learning_rate=1e-3,5e-3", f"log_dir={out}"),
                *(f"model_name={stories_model}", f"dataset_path={data}"),
                *("renderer_name=role_colon", "batch_size=4", "max_steps=2", "save_every=0"),
            ],
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": str(REPO), "TINKER_API_KEY": running.key()},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        results = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
        assert [(one["state"], one["step"]) for one in results] == [("done", 2)] * 2
        assert results[0]["value"] != results[1]["value"]
        assert (out / "sweep.png").exists()
        assert not (out / "server.log").exists()  # it started none
        assert httpx.get(f"{running.url}/healthz").status_code == 200
        assert sum("session" in line and "begins" in line for line in running.said) >= 2
    finally:
        assert running.stop() == 0
