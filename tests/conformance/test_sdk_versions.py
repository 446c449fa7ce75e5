"""Older SDKs, unmodified, against the server: each in a process, with its own package folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_clients import client_of, datum

from tinker_cookbook.backends import connect

WALK = Path(__file__).with_name("sdk_walk.py")
CACHE = Path.home() / ".cache" / "tinker_cookbook_tests" / "sdks"
TOKENS = [1, 44, 101, 7, 9, 300]
OTHERS = ["0.28.0"]  # the first that the server supports is 0.25


def sdk_folder(version: str) -> Path:
    """The package alone, put there once; what it imports is what the newest one does."""
    folder = CACHE / version
    if not folder.exists():
        part = folder.with_name(f"{version}.{os.getpid()}")
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(part)]
        found = subprocess.run([*install, f"tinker=={version}"], capture_output=True, text=True)
        if found.returncode:
            pytest.skip(f"tinker {version} cannot be fetched: {found.stderr[-200:]}")
        part.rename(folder)
    return folder


@pytest.fixture(scope="module")
def in_process(stories_model, tmp_path_factory):
    """What the same steps give without a server."""
    root = tmp_path_factory.mktemp("in-process")
    connection = connect("local", device="cpu", dtype="float32", root=root)
    client = client_of((connection.service, stories_model))
    losses = []
    for _ in range(3):
        output = client.forward_backward([datum(TOKENS), datum(TOKENS[:4])], "cross_entropy")
        client.optim_step(_adam()).result()
        losses.append(output.result().metrics["loss:sum"])
    logprobs = client.forward([datum(TOKENS)], "cross_entropy").result().loss_fn_outputs[0]
    connection.close()
    return losses, logprobs["logprobs"].to_numpy()


def _adam():
    from tinker import types

    return types.AdamParams(learning_rate=1e-2, eps=1e-12)


@pytest.mark.parametrize(
    "version",
    ["installed", *(pytest.param(v, marks=pytest.mark.slow) for v in OTHERS)],
)
def test_the_walk_gives_what_the_engine_gives(serving, in_process, stories_model, version):
    env = {**os.environ, "TINKER_BASE_URL": serving.url, "TINKER_API_KEY": serving.key()}
    if version != "installed":
        env["PYTHONPATH"] = str(sdk_folder(version))
    done = subprocess.run(
        [sys.executable, str(WALK), stories_model],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    losses, logprobs = in_process
    assert said["losses"] == losses
    np.testing.assert_array_equal(np.float32(said["logprobs"]), logprobs)
    assert said["overflow"] == "inf"
    assert said["again"] == said["straight"]
    assert said["samples"] == said["saved_samples"]
    assert [len(one) for one in said["samples"]] == [4, 4]
    assert said["prompt_logprobs"] == said["scores"]
    assert said["scores"][0] is None
    assert len(said["scores"]) == len(TOKENS)
    assert [row and len(row) for row in said["topk"]] == [None, 2, 2, 2, 2, 2]
    assert said["listed"] == ["sampler_weights/walk-s", "weights/walk"]
    assert said["after"] == ["sampler_weights/walk-s"]
    assert "cross_entropy" in said["error"]
