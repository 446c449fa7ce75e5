"""Ctrl-C and SIGTERM: the run continues as if nothing had been."""

from __future__ import annotations

import shlex
import signal
import subprocess

import pytest
from recipe_runs import RecipeRuns, count_lines, finish, wait_for

pytestmark = pytest.mark.slow

ROW = "tinker_cookbook.run.loggers:append_row"
LONG = ("num_epochs=3",)  # 18 steps


@pytest.fixture(scope="module")
def recipe_runs(tmp_path_factory, stories_model):
    place = RecipeRuns(tmp_path_factory.mktemp("interrupt"), stories_model)
    assert place.run("straight", "raise", *LONG).returncode == 0
    return place


def interrupt(
    place, name: str, rows: int, *extra: str, by: signal.Signals = signal.SIGINT
) -> subprocess.CompletedProcess[str]:
    """Starts a run and sends a signal after so many rows; gives what it left."""
    # As a script starts a program in the background: SIGINT is ignored.
    prefix = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"] if by == signal.SIGTERM else []
    process, paused = place.start_paused(ROW, rows, name, *LONG, *extra, prefix=prefix)
    process.send_signal(by)
    paused.unlink()
    return finish(process)


def printed_command(stdout: str) -> list[str]:
    lines = stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith("continue with:"))
    return shlex.split(lines[at + 1])


def test_ctrl_c_prints_the_command_that_continues(recipe_runs):
    stopped = interrupt(recipe_runs, "ctrl-c", 8)
    assert stopped.returncode == 130
    assert "stopped by Ctrl-C" in stopped.stdout
    assert "save_every=None" not in stopped.stdout
    assert "Traceback" not in stopped.stderr
    assert len(recipe_runs.rows("ctrl-c")) == 8
    # What was printed runs as it stands, in a shell's words.
    continued = finish(recipe_runs.start(printed_command(stopped.stdout)))
    assert continued.returncode == 0, continued.stderr[-2000:]
    assert "continuing after step" in continued.stdout
    assert recipe_runs.rows("ctrl-c") == recipe_runs.rows("straight")
    assert recipe_runs.adapter("ctrl-c") == recipe_runs.adapter("straight")


def test_sigterm_before_the_first_checkpoint(recipe_runs):
    stopped = interrupt(recipe_runs, "early", 1, "save_every=100", by=signal.SIGTERM)
    assert stopped.returncode == 143
    assert "before the first checkpoint" in stopped.stdout
    assert count_lines(recipe_runs.folder / "early" / "checkpoints.jsonl") == 0
    continued = finish(recipe_runs.start(printed_command(stopped.stdout)))
    assert continued.returncode == 0, continued.stderr[-2000:]
    assert recipe_runs.rows("early") == recipe_runs.rows("straight")


def test_ctrl_c_while_the_program_starts(recipe_runs):
    process = recipe_runs.start(
        recipe_runs.command("starting", "raise", "num_epochs=500"), fresh=True
    )
    wait_for((recipe_runs.folder / "starting" / ".lock").exists, process)
    process.send_signal(signal.SIGINT)
    stopped = finish(process)
    assert stopped.returncode == 130
    assert "Traceback" not in stopped.stderr
