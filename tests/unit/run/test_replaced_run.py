"""A run that is replaced is kept until the new one has its first row, however the new one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tinker_cookbook.cli_utils import check_log_dir, log_dir_of_run
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.run.lock import RunLock
from tinker_cookbook.run.ml_log import setup_logging


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 0, "old": 1}\n')
    (folder / "checkpoints.jsonl").write_text('{"name": "000001"}\n')
    return folder


def is_old(run: Path) -> bool:
    return '"old"' in (run / "metrics.jsonl").read_text()


def hidden(run: Path) -> list[str]:
    return [entry.name for entry in run.parent.iterdir() if entry.name != run.name]


def new_run(run: Path, rows: int) -> None:
    """What a loop does: takes the folder, opens the log, writes its rows."""
    with RunLock(run):
        log = setup_logging(run, config={"learning_rate": 1.0}, do_configure_logging_module=False)
        for step in range(rows):
            log.log_metrics({"new": step}, step=step)
        log.close()


def test_the_old_run_goes_with_the_first_row(run):
    with log_dir_of_run(run, "delete"):
        assert list(run.iterdir()) == []
        assert len(hidden(run)) == 1
        new_run(run, rows=1)
        assert hidden(run) == []
        assert not is_old(run)
    assert not is_old(run)
    assert not (run / "checkpoints.jsonl").exists()


def test_a_new_run_without_a_row_brings_the_old_one_back(run, capsys):
    def fail() -> None:
        with log_dir_of_run(run, "delete"):
            new_run(run, rows=0)
            (run / "record").mkdir()
            (run / "record" / "vocabulary.parquet").touch()
            raise DataValidationError("no such file")

    with pytest.raises(DataValidationError):
        fail()
    assert is_old(run)
    assert sorted(entry.name for entry in run.iterdir()) == [
        ".lock",
        "checkpoints.jsonl",
        "metrics.jsonl",
    ]
    assert hidden(run) == []
    assert "holds the old run again" in capsys.readouterr().out.replace("\n", " ")


PROGRAM = """
import os, signal, sys
from tinker_cookbook.cli_utils import check_log_dir
from tinker_cookbook.run.ml_log import setup_logging
check_log_dir(sys.argv[1], "delete")
log = setup_logging(sys.argv[1], config={})
if sys.argv[2] == "row":
    os.replace(sys.argv[1] + "/config.json", sys.argv[1] + "/metrics.jsonl")  # its bytes are a row
if sys.argv[2] != "error":
    os.kill(os.getpid(), signal.SIGKILL)
raise SystemExit("no such file")
"""


def run_program(run: Path, how: str) -> int:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(run), how], capture_output=True
    ).returncode


@pytest.mark.parametrize("behavior", ["resume", "delete", "raise"])
def test_after_kill_9_the_next_start_finds_the_old_run(run, behavior):
    assert run_program(run, "kill") == -signal.SIGKILL
    assert not (run / "metrics.jsonl").exists()
    if behavior == "raise":
        with pytest.raises(ConfigurationError, match="already holds a run"):
            check_log_dir(run, "raise")
    else:
        check_log_dir(run, behavior)
    if behavior == "delete":
        assert list(run.iterdir()) == []
        with pytest.raises(ConfigurationError), log_dir_of_run(run, "delete"):
            raise ConfigurationError("and fails again")
    assert is_old(run)
    assert hidden(run) == []


def test_two_starts_at_once(run):
    """The second waits for neither: it is refused, and the first goes on undisturbed."""
    program = f"from tinker_cookbook.cli_utils import check_log_dir as c; c({str(run)!r}, 'delete')"
    with log_dir_of_run(run, "delete"):
        second = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert f"is being started over by another run (pid {os.getpid()}" in second.stderr
        new_run(run, rows=2)
    assert not is_old(run)


def test_a_folder_that_cannot_be_renamed_stays(run, monkeypatch):
    def refuse(self: Path, target: Path) -> Path:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(ConfigurationError, match=r"mount point.*another log_path"):
        check_log_dir(run, "delete")
    assert is_old(run)
    with RunLock(run):
        pass
