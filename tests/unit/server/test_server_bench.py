"""The measurement of what HTTP costs runs to its end, with figures for each side."""

from __future__ import annotations

import json
import sys

import forks
import pytest

SIDES = {"in process", "server", "empty server", "empty server, held"}


@pytest.mark.slow  # starts four processes: 20 s on an idle machine
def test_every_side_has_figures(stories_model, tmp_path):
    words = [f"model_name={stories_model}", "device=cpu", "dtype=float32", "calls=2", "warmup=1"]
    words += ["length=16", "batch_size=2", "max_tokens=3", f"output={tmp_path / 'out.json'}"]
    command = [sys.executable, "-m", "benchmarks.server", *words]
    done = forks.run(command)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "out.json").read_bytes())
    for kind in ("forward_backward", "optim_step", "sample"):
        found = result["calls"][kind]
        middle = found["milliseconds"]
        assert set(middle) == SIDES
        assert min(middle.values()) > 0
        assert found["above_quartiles"][0] <= found["above"] <= found["above_quartiles"][2]
        assert found["above_by_sdk"] == middle["empty server"]
        assert kind[:6] in done.stdout
