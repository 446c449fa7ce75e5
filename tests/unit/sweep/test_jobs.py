"""The runs as processes, with a recipe of a few lines and no server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from made_up import make_jobs, write_rows

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.sweep import parent_death
from tinker_cookbook.sweep.grid import make_runs
from tinker_cookbook.sweep.jobs import Jobs
from tinker_cookbook.sweep.records import RecordFolder
from tinker_cookbook.sweep.serving import Server, last_lines, wait_until_up

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
def jobs(tmp_path, monkeypatch):
    (tmp_path / "made_up_recipe.py").write_text(RECIPE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.getcwd()}")

    def make(*modes: str, at_once: int = 2) -> Jobs:
        made = make_jobs(tmp_path, {"mode": list(modes)}, "made_up_recipe")
        server = Server("http://127.0.0.1:1", "tml-secret")
        return Jobs("made_up_recipe", made, at_once, server, RecordFolder(tmp_path))

    return make


def test_a_failed_run_does_not_stop_the_others(jobs):
    work = jobs("fail", "fine", "good", at_once=1)
    seen = []
    work.work(lambda job: seen.append((job.run.name, job.state)), lambda: None)
    assert seen == [
        ("mode=fail", "running"),
        ("mode=fail", "failed"),
        ("mode=fine", "running"),
        ("mode=fine", "done"),
        ("mode=good", "running"),
        ("mode=good", "done"),
    ]
    assert last_lines(work.jobs[0].log).split("\n") == ["    seen fail", "    it went wrong"]
    given = json.loads((work.jobs[1].log_path / "seen.json").read_text())
    assert given["backend"] == "http://127.0.0.1:1"
    assert given["key"] == "tml-secret"
    assert given["behavior_if_log_dir_exists"] == "resume"
    records = RecordFolder(work.jobs[0].log_path.parent)
    kept = [records.read(job.run, "made_up_recipe", {}) for job in work.jobs]
    assert [record.done for record in kept] == [False, True, True]
    assert all(record.seconds > 0 and record.started is None for record in kept)


def test_stop_interrupts_what_runs(jobs):
    work = jobs("wait", "fine", at_once=1)

    def enough() -> None:
        if (work.jobs[0].log_path / "seen.json").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work.work(lambda job: None, enough)
    process = work.jobs[0].process
    assert process is not None
    begun = time.monotonic()
    work.stop()
    assert time.monotonic() - begun < 20
    assert process.returncode != 0
    assert "KeyboardInterrupt" in work.jobs[0].log.read_text()
    assert work.jobs[1].state == "waiting"


def test_finished_is_what_ended_well_or_has_its_final_checkpoint(tmp_path):
    records = RecordFolder(tmp_path)
    (run,) = make_runs({"seed": ["1"]})
    record = records.read(run, "recipe", {})
    assert not records.is_finished(run, record)
    (tmp_path / run.name).mkdir()
    lines = tmp_path / run.name / "checkpoints.jsonl"
    lines.write_text('{"name": "000001", "batch": 1, "state_path": "tinker://r/weights/000001"}\n')
    assert not records.is_finished(run, record)
    with lines.open("a") as file:
        file.write('{"name": "final", "state_path": "tinker://r/weights/final", "final": true}\n')
    assert records.is_finished(run, record)


def test_other_settings_in_the_same_folder_are_refused(tmp_path):
    records = RecordFolder(tmp_path)
    (run,) = make_runs({"seed": ["1"]})
    records.write(run, records.read(run, "recipe", {"device": "cpu"}))
    records.read(run, "recipe", {"device": "cpu"})
    with pytest.raises(ConfigurationError, match="device: got none, expected cpu"):
        records.read(run, "recipe", {})
    with pytest.raises(ConfigurationError, match="got another, expected recipe"):
        records.read(run, "another", {"device": "cpu"})


def test_the_seconds_of_an_attempt_that_was_cut_off(tmp_path):
    records = RecordFolder(tmp_path)
    (run,) = make_runs({"seed": ["1"]})
    record = records.read(run, "recipe", {})
    record.seconds, record.started = 5.0, time.time() - 100
    records.write(run, record)
    path = write_rows(tmp_path / run.name, [{"step": 1}])
    os.utime(path, (record.started + 20, record.started + 20))
    again = records.read(run, "recipe", {})
    assert again.seconds == pytest.approx(25, abs=0.1)
    assert again.started is None


def test_a_server_that_ends_is_quoted(tmp_path):
    from tinker_cookbook.exceptions import BackendError

    log = tmp_path / "server.log"
    log.write_text("no such model\n")
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    process.wait()
    with pytest.raises(BackendError, match=r"status 3(.|\n)*no such model"):
        wait_until_up(Server("", "", process=process, log=log), tmp_path)


PARENT = """
import signal, subprocess, sys, time
from tinker_cookbook.sweep import parent_death
command = parent_death.tied_to_parent(
    [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"],
    signal.SIGKILL,
)
if sys.argv[1] == "beside":
    at = command.index("-m")
    command[at : at + 2] = ["-c", (
        "import sys; from tinker_cookbook.sweep import parent_death; "
        "parent_death._request_kernel_signal = lambda at_death: False; "
        "sys.exit(parent_death.main(sys.argv[1:]))"
    )]
subprocess.Popen(command)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(
            "kernel", marks=pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
        ),
        "beside",
    ],
)
def test_a_program_tied_to_its_parent_ends_with_its_killed_parent(how):
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), how], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    parent.kill()
    parent.wait()
    until = time.monotonic() + 20
    while _lives(child):
        assert time.monotonic() < until, "it outlived its parent"
        time.sleep(0.05)


def test_a_program_whose_parent_is_already_gone_does_not_begin():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    words = [sys.executable, "-m", "tinker_cookbook.sweep.parent_death", str(gone.pid)]
    done = subprocess.run(
        [*words, str(int(signal.SIGKILL)), sys.executable, "-c", "print('begun')"],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "begun" not in done.stdout


def test_the_one_that_stays_beside_hands_on_the_status():
    ends = [sys.executable, "-c", "import time; time.sleep(0.1); raise SystemExit(7)"]
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert parent_death.watch_parent(os.getppid(), signal.SIGKILL, ends) == 7
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return sys.platform != "linux"
