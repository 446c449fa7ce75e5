"""Trackers beside metrics.jsonl: none can stop or hold a run, and each gets its values."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import forks
import pytest
from environments import REPO, python_with
from homes import new_home

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run import trackers
from tinker_cookbook.run.loggers import Logger
from tinker_cookbook.run.ml_log import NeptuneLogger, start_logging
from tinker_cookbook.run.remote_loggers import RemoteLogger
from tinker_cookbook.run.trackers import Trackers, start_trackers


class Rows(Logger):
    def __init__(self, broken_step: int = -1, error: BaseException | None = None):
        self.rows: list = []
        self.error = error or ConnectionError("no route to host")
        self.closed, self.broken_step = False, broken_step

    def log_metrics(self, metrics, step=None):
        if step == self.broken_step:
            raise self.error
        self.rows.append((metrics, step))

    def close(self):
        self.closed = True


def test_a_tracker_that_hangs_or_fails_holds_neither_the_run_nor_the_others(monkeypatch, caplog):
    monkeypatch.setattr(trackers, "START_SECONDS", 100)
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 100)
    monkeypatch.setattr(trackers, "_RETRY_SECONDS", 0.1)
    # The start looks at the clock, and then before it waits for each of the four; so does the end.
    looks = iter([0, 0, 0, 0, 99.7] * 2)
    main = threading.current_thread()
    clock = lambda: next(looks) if threading.current_thread() is main else 0.0  # noqa: E731
    monkeypatch.setattr(trackers, "time", SimpleNamespace(monotonic=clock))
    caplog.set_level(logging.INFO)
    good, broken, late = Rows(), Rows(broken_step=1), Rows()
    forever, attempts = threading.Event(), []

    def hang() -> Logger:
        forever.wait()
        return Rows()

    def second_time() -> Logger:
        attempts.append(1)
        if len(attempts) == 1:
            raise ConnectionError("refused")
        return late

    begun = time.monotonic()
    log = Trackers(
        # The one that hangs is waited for last, so that it takes no time from the others.
        {"good": lambda: good, "broken": lambda: broken, "late": second_time, "hangs": hang}
    )
    while len(attempts) < 2:
        time.sleep(0.01)
    for step in range(4):
        log.log_metrics({"loss": step / 2}, step)
    log.close()
    log.close()
    took = time.monotonic() - begun
    forever.set()
    rows = [({"loss": step / 2}, step) for step in range(4)]
    assert took > 0.5
    assert good.rows == late.rows == rows
    assert broken.rows == [rows[0], *rows[2:]]
    assert all(one.closed for one in (good, broken, late))
    messages = [record.getMessage() for record in caplog.records]
    assert sorted(messages) == [
        "broken did not take 1 rows or texts; the same command sends the rows later",
        "broken fails: ConnectionError: no route to host; the run goes on, and what it does not "
        "take is left out",
        "hangs did not take 5 rows or texts; the same command sends the rows later",
        "hangs has not answered in 100 seconds; the run goes on, and its rows wait",
        "late fails: ConnectionError: refused; the run goes on, and it is tried again every 0.1 "
        "seconds",
    ]


def test_steps_are_kept_after_the_last_step_of_the_run_so_far(tmp_path, monkeypatch):
    class Kept(RemoteLogger):
        tracker = "json"  # a package that is there

        def log_metrics(self, metrics, step=None):
            pass

        def keep(self, step=None, **run):
            kept.append(step)

    kept: list[int | None] = []
    # Each look at the clock is two seconds later.
    clock = SimpleNamespace(monotonic=itertools.count(0, 2).__next__)
    monkeypatch.setattr(trackers, "time", clock)
    monkeypatch.setattr(trackers, "START_SECONDS", 60)
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 60)
    log = Trackers({"kept": lambda: Kept(None, tmp_path, None)}, resume_step=4)
    for step in (5, 6):
        log.log_metrics({"loss": 1.0}, step)
    log.close()
    assert kept == [4, 5, 6]


def test_a_package_that_calls_sys_exit_ends_neither_its_thread_nor_the_start(monkeypatch, caplog):
    monkeypatch.setattr(trackers, "_RETRY_SECONDS", 0.1)
    quits = Rows(broken_step=1, error=SystemExit(2))
    log = Trackers({"quits": lambda: quits, "never": partial(sys.exit, 3)})
    for step in range(3):
        log.log_metrics({"loss": step}, step)
    log.close()
    assert quits.rows == [({"loss": 0}, 0), ({"loss": 2}, 2)]
    assert quits.closed
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 4
    assert "quits fails: SystemExit: 2; the run goes on, and what it does not take is left out" in (
        messages
    )
    assert (
        "never fails: SystemExit: 3; the run goes on, and it is tried again every 0.1 seconds"
        in (messages)
    )


def test_what_only_the_user_can_mend_is_said_at_the_start(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match="trackers: got 'tensor', expected some of wandb"):
        start_trackers(["tensor"], tmp_path)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigurationError, match=r"trackers=mlflow.*\[mlflow\]"):
        start_logging(tmp_path, trackers=["mlflow"])
    with pytest.raises(ConfigurationError, match="Neptune's service ended"):
        NeptuneLogger("space/project")


# Reads all back with each package's own reader and compares with metrics.jsonl.
READ = """
import json, re, sys
from collections import Counter
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trackio.sqlite_storage import SQLiteStorage

(folder,) = sys.argv[1:]
rows = {}
for line in open(f"{folder}/metrics.jsonl"):
    row = json.loads(line)
    step = row.pop("step")
    rows[step] = {k: v for k, v in row.items() if type(v) in (int, float)}
want = {(step, key): value for step, row in rows.items() for key, value in row.items()}

def repeated(points, tolerance=0.0):
    got = {(step, key): value for step, key, value in points}
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    assert all(abs(got[k] - want[k]) <= tolerance * abs(want[k]) for k in want)
    return sorted(step for (step, key), n in Counter(p[:2] for p in points).items() if n > 1)

events = EventAccumulator(f"{folder}/tensorboard", size_guidance={"scalars": 0})
events.Reload()
scalars = [(e.step, tag, e.value) for tag in events.Tags()["scalars"] for e in events.Scalars(tag)]

ids = {name: json.load(open(f"{folder}/{name}_run.json"))["id"] for name in ("trackio", "mlflow")}
logs = SQLiteStorage.get_logs("stories", "run", run_id=ids["trackio"])
logged = [(row["step"], k, v) for row in logs for k, v in row.items() if k in rows[row["step"]]]
traces = SQLiteStorage.get_traces("stories", "run", run_id=ids["trackio"])
last = max(traces, key=lambda trace: (trace["step"], trace["key"]))

client = MlflowClient()
run = client.get_run(ids["mlflow"])
names = {re.sub(r"[^\\w\\-. :/]", "_", key): key for _, key in want}
history = [m for key in run.data.metrics for m in client.get_metric_history(ids["mlflow"], key)]
history.sort(key=lambda metric: metric.timestamp)
print(json.dumps({
    "steps": sorted(rows),
    "tensorboard": repeated(scalars, 1e-6),
    "trackio": repeated(logged),
    "trackio runs": len(SQLiteStorage.get_run_records("stories")),
    "traces": sorted(Counter(f"{t['step']} {t['key']}" for t in traces).items()),
    "roles": [message["role"] for message in last["messages"]],
    "prompt": last["messages"][0]["content"],
    "mlflow": sorted(set(repeated([(m.step, names[m.key], m.value) for m in history]))),
    "mlflow runs": len(client.search_runs([run.info.experiment_id])),
    "mlflow state": [run.info.status, run.data.params["max_tokens"]],
}))
"""


@pytest.mark.slow
def test_real_trackers_have_all_values_of_a_killed_and_resumed_run(stories_model, tmp_path):
    """Two runs of the tiny model (20 s), and 130 MB of packages once."""
    python, folder = python_with("trackers"), tmp_path / "run"
    environment = {
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlruns",
        # Without a server; MLflow's database would need its large package.
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TINKER_COOKBOOK_HOME": new_home(tmp_path / "home"),
    }
    command = [
        *("-m", "recipes.rl_basic", "trackers=trackio,tensorboard,mlflow", "wandb_project=stories"),
        *(f"model_name={stories_model}", f"log_path={folder}", "behavior_if_log_dir_exists=resume"),
        *("groups_per_batch=5", "group_size=2", "max_tokens=8", "num_test=2", "eval_every=10"),
        *("max_steps=20", "save_every=2", "lora_rank=4", "device=cpu", "renderer_name=role_colon"),
    ]

    def run(*words: str) -> str:
        done = forks.run([str(python), *words], cwd=REPO, env=os.environ | environment)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
        return done.stdout

    def kept() -> int:
        """The step of the last checkpoint."""
        lines = (folder / "checkpoints.jsonl").read_bytes().split(b"\n")[:-1]
        return json.loads(lines[-1])["batch"]

    def lost() -> set[int]:
        """Steps in MLflow's files (lines of time, value and step) after the last checkpoint."""
        files = (path for path in tmp_path.glob("mlruns/*/*/metrics/**/*") if path.is_file())
        lines = (line.split() for file in files for line in file.read_text().split("\n")[:-1])
        return {step for step in (int(words[2]) for words in lines) if step > kept()}

    killed = forks.Popen(
        [str(python), *command],
        cwd=REPO,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not ((folder / "checkpoints.jsonl").exists() and kept() > 1 and lost()):
        assert killed.poll() is None
        time.sleep(0.02)
    killed.kill()
    killed.wait()
    repeated = lost()
    run(*command)
    found = json.loads(run("-c", READ, str(folder)).splitlines()[-1])
    assert found.pop("prompt").endswith("Assistant:")
    # MLflow cannot remove values: the last one counts.
    assert repeated <= set(found.pop("mlflow"))
    traces = dict(found.pop("traces"))
    del traces["10 episodes/eval_test"]
    assert traces.pop("0 episodes/eval_test") == traces.pop("20 episodes/eval_test") == 2
    assert traces == {f"{step} episodes/train": 4 for step in range(1, 21)}
    assert found == {
        "steps": list(range(21)),
        "tensorboard": [],
        "trackio": [],
        "trackio runs": 1,
        "roles": ["user", "assistant"],
        "mlflow runs": 1,
        "mlflow state": ["FINISHED", "8"],
    }
