"""A loop over a server has no torch in its process, and the same numbers as one that has."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys

import forks
import pytest
from serving import Serving

from tinker_cookbook import _process
from tinker_cookbook.backends.connect import leave_torch_out

pytestmark = pytest.mark.slow

RUN = """
import sys
from recipes import sl_loop
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
run_entrypoint(sl_loop.main)
print("torch._C" in sys.modules, sum(name.startswith("torch.") for name in sys.modules))
"""

BUSY_TO_THE_END = """
import asyncio, sys, time
from pydantic import BaseModel, field_validator
from tinker_cookbook.backends.connect import connect

class Slow(BaseModel):
    x: int
    @field_validator("x")
    @classmethod
    def ask_for_the_interpreter(cls, x):
        return x + sum(range(2000))

async def busy():
    while True:
        for _ in range(50):
            Slow.model_validate({"x": 1})
        await asyncio.sleep(0)

service = connect(sys.argv[1]).service
asyncio.run_coroutine_threadsafe(busy(), service.holder.get_loop())
time.sleep(0.3)
print("done")
"""


@pytest.fixture(scope="module")
def serving(stories_model, tmp_path_factory):
    running = Serving(tmp_path_factory.mktemp("light"), {"model_name": stories_model}).start()
    yield running
    running.stop()


def test_the_loop_over_a_server_loads_no_torch(serving, stories_model, tmp_path, monkeypatch):
    shared = [f"model_name={stories_model}", "renderer_name=role_colon", "max_length=200"]
    shared += ["max_steps=2", "save_every=1", "learning_rate=0.01", "lora_rank=4"]
    monkeypatch.setenv("TINKER_API_KEY", serving.key())
    found = {}
    fresh = functools.partial(subprocess.run, capture_output=True, text=True)
    for name, run, words in (
        ("over", fresh, [f"backend={serving.url}"]),
        ("here", forks.run, ["backend=local", "device=cpu", "dtype=float32"]),
    ):
        log_path = tmp_path / name
        done = run(
            [sys.executable, "-c", RUN, *shared, *words, f"log_path={log_path}"], timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]
        loaded, parts = done.stdout.splitlines()[-1].split()
        rows = [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]
        found[name] = [{k: v for k, v in r.items() if not k.startswith("time/")} for r in rows]
        assert (loaded == "True") == (name == "here")
        assert (int(parts) > 0) == (name == "here")
    assert found["over"] == found["here"]
    # What it trained left the server's memory with its end, not when heartbeats lapse.
    assert serving.metrics()["tinker_cookbook_runs"] == 0


@pytest.mark.parametrize(
    ("given", "key", "words"),
    [
        ({"model_name": "COPY"}, None, "BadRequestError: base_model: got .* not serve.*It serves"),
        ({}, "tml-wrong", "AuthenticationError: TINKER_API_KEY: the key is not one of this"),
        (
            {"load_checkpoint_path": "tinker://no-such-run:train:0/weights/final"},
            None,
            r"no-such-run:train:0', which is not among the \d+ runs of 'local'",
        ),
    ],
)
def test_what_a_server_refuses_ends_a_recipe_with_its_sentence(
    serving, stories_model, tmp_path, given, key, words
):
    copy = shutil.copytree(stories_model, tmp_path / "copy")
    settings = {"model_name": stories_model, "backend": serving.url, "renderer_name": "role_colon"}
    settings |= {"max_steps": 1, "log_path": tmp_path / "run"}
    settings |= {key: value.replace("COPY", str(copy)) for key, value in given.items()}
    done = forks.run(
        [sys.executable, "-m", "recipes.sl_basic", *(f"{k}={v}" for k, v in settings.items())],
        timeout=120,
        env={**os.environ, "TINKER_API_KEY": key or serving.key()},
    )
    assert done.returncode == 1
    assert re.search(words, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("attempt", range(3))  # a race, lost at every third or more without the end
def test_a_thread_of_the_sdk_in_compiled_code_does_not_abort_the_program(serving, attempt):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUSY_TO_THE_END, serving.url],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TINKER_API_KEY": serving.key()},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_torch_that_is_there_stays_and_the_engine_keeps_it(monkeypatch):
    import torch

    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    assert not leave_torch_out("http://127.0.0.1:1")
    assert sys.modules["torch"] is torch
    modules = {name: module for name, module in sys.modules.items() if name != "torch"}
    monkeypatch.setattr(_process.sys, "modules", modules)
    assert not leave_torch_out("local")
    assert "torch" not in modules
    assert leave_torch_out("http://127.0.0.1:1")
    assert modules["torch"] is None
