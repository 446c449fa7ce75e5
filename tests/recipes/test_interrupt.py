"""Ctrl-C and kill -9 at moments that nobody chose: the run continues as if nothing had been."""

from __future__ import annotations

import random
import shlex
import signal
import subprocess
import time

import pytest
from workplace import Workplace, count_lines, finish, wait_for

LONG = ("num_epochs=5",)  # 30 steps: long enough to be interrupted in


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, stories_model):
    place = Workplace(tmp_path_factory.mktemp("interrupt"), stories_model)
    begun = time.monotonic()
    assert place.run("straight", "raise", *LONG).returncode == 0
    place.seconds = time.monotonic() - begun
    return place


def interrupt(
    place, name: str, rows: int, *extra: str
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Starts a run, sends Ctrl-C after so many rows; gives what it left and how long it took."""
    process = place.start(place.command(name, "raise", *LONG, *extra))
    metrics = place.folder / name / "metrics.jsonl"
    wait_for(lambda: count_lines(metrics) >= rows, process)
    sent = time.monotonic()
    process.send_signal(signal.SIGINT)
    return finish(process, 60), time.monotonic() - sent


def printed_command(stdout: str) -> list[str]:
    lines = stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith("continue with:"))
    return shlex.split(lines[at + 1])


def test_ctrl_c_prints_the_command_that_continues(workplace):
    stopped, seconds = interrupt(workplace, "ctrl-c", 8)
    assert stopped.returncode == 130
    assert seconds < 10
    assert "stopped by Ctrl-C" in stopped.stdout
    assert "Traceback" not in stopped.stderr
    assert len(workplace.rows("ctrl-c")) < len(workplace.rows("straight"))
    # What was printed runs as it stands, in a shell's words.
    continued = finish(workplace.start(printed_command(stopped.stdout)))
    assert continued.returncode == 0, continued.stderr[-2000:]
    assert "continuing after step" in continued.stdout
    assert workplace.rows("ctrl-c") == workplace.rows("straight")
    assert workplace.adapter("ctrl-c") == workplace.adapter("straight")


def test_ctrl_c_before_the_first_checkpoint(workplace):
    stopped, seconds = interrupt(workplace, "early", 1, "save_every=25")
    assert stopped.returncode == 130
    assert seconds < 10
    assert "before the first checkpoint" in stopped.stdout
    assert count_lines(workplace.folder / "early" / "checkpoints.jsonl") == 0
    continued = finish(workplace.start(printed_command(stopped.stdout)))
    assert continued.returncode == 0, continued.stderr[-2000:]
    assert workplace.rows("early") == workplace.rows("straight")


def test_ctrl_c_while_the_program_starts(workplace):
    process = workplace.start(workplace.command("starting"))
    wait_for((workplace.folder / "starting" / ".lock").exists, process)
    process.send_signal(signal.SIGINT)
    stopped = finish(process, 30)
    assert stopped.returncode == 130
    assert "Traceback" not in stopped.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_at_a_random_moment(workplace, seed):
    name = f"random-{seed}"
    process = workplace.start(workplace.command(name, "raise", *LONG))
    try:
        process.wait(timeout=random.Random(seed).uniform(0.2, 0.95) * workplace.seconds)
    except subprocess.TimeoutExpired:
        process.kill()
    finish(process)
    continued = workplace.run(name, "resume", *LONG)
    assert continued.returncode == 0, continued.stderr[-2000:]
    assert workplace.rows(name) == workplace.rows("straight")
    assert workplace.adapter(name) == workplace.adapter("straight")
