"""The runs as processes, with a recipe of a few lines and no server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from made_up import make_runs

from tinker_cookbook.sweep.runs import Server, last_lines, run_all, stop_runs

RECIPE = """
import json, os, pathlib, sys, time
settings = dict(word.split("=", 1) for word in sys.argv[1:])
folder = pathlib.Path(settings["log_path"])
folder.mkdir(exist_ok=True)
(folder / "seen.json").write_text(json.dumps({**settings, "key": os.environ["TINKER_API_KEY"]}))
print("seen", settings["mode"], flush=True)
if settings["mode"] == "fail":
    sys.exit("it went wrong")
if settings["mode"] == "wait":
    time.sleep(60)
"""


@pytest.fixture
def runs(tmp_path, monkeypatch):
    (tmp_path / "made_up_recipe.py").write_text(RECIPE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.getcwd()}")
    return lambda *modes: make_runs(tmp_path, {"mode": list(modes)}, "made_up_recipe")


SERVER = Server("http://127.0.0.1:1", "tml-secret")


def test_a_failed_run_does_not_stop_the_others(runs):
    made, seen = runs("fail", "fine", "good"), []
    run_all(made, 1, SERVER, lambda run: seen.append((run.point.name, run.state)))
    assert seen == [
        ("mode=fail", "running"),
        ("mode=fail", "failed"),
        ("mode=fine", "running"),
        ("mode=fine", "done"),
        ("mode=good", "running"),
        ("mode=good", "done"),
    ]
    assert last_lines(made[0].log).split("\n") == ["    seen fail", "    it went wrong"]
    given = json.loads((made[1].log_path / "seen.json").read_text())
    assert given["backend"] == "http://127.0.0.1:1"
    assert given["key"] == "tml-secret"
    assert given["behavior_if_log_dir_exists"] == "resume"
    again = runs("fail", "fine", "good")
    for run in again:
        run.load()
    assert [run.state for run in again] == ["waiting", "done", "done"]
    assert all(run.seconds > 0 and run.started is None for run in again)


def test_stop_interrupts_running_processes(runs):
    made = runs("wait", "fine")
    made[0].start(SERVER)
    while not (made[0].log_path / "seen.json").exists():
        time.sleep(0.05)
    process = made[0].process
    assert process is not None
    stop_runs(made)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in made[0].log.read_text()
    assert [run.state for run in made] == ["failed", "waiting"]


def test_a_run_with_its_final_checkpoint_is_done(tmp_path):
    def state() -> str:
        (run,) = make_runs(tmp_path, {"seed": ["1"]})
        run.load()
        return run.state

    assert state() == "waiting"
    (tmp_path / "run").mkdir()
    lines = tmp_path / "run" / "checkpoints.jsonl"
    lines.write_text('{"name": "000001", "batch": 1, "state_path": "tinker://r/weights/000001"}\n')
    assert state() == "waiting"
    with lines.open("a") as file:
        file.write('{"name": "final", "state_path": "tinker://r/weights/final", "final": true}\n')
    assert state() == "done"


PARENT = """
import signal, sys, time
from tinker_cookbook.sweep.child import start_child
start_child("sleeper", [], signal.SIGKILL, stdout=None)
time.sleep(60)
"""
SLEEPER = "import os, time; print(os.getpid(), flush=True); time.sleep(3600)"


def test_a_child_ends_when_its_parent_is_killed(tmp_path):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"},
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    parent.kill()
    parent.wait()
    until = time.monotonic() + 120
    while _lives(child):
        assert time.monotonic() < until, "it outlived its parent"
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return sys.platform != "linux"
