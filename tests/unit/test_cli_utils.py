from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tinker_cookbook.cli_utils import (
    check_log_dir,
)
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.lock import RunLock
from tinker_cookbook.run.ml_log import setup_logging


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    (folder / "checkpoints.jsonl").write_text("")
    (folder / "iteration_000001").mkdir()
    (folder / "iteration_000001" / "train_logtree.json").write_text("x")
    return folder


@pytest.mark.parametrize("behavior", ["delete", "resume", "ask", "raise"])
def test_absent_and_empty_folders_pass(tmp_path, behavior):
    check_log_dir(tmp_path / "new", behavior)
    check_log_dir(tmp_path, behavior)
    with RunLock(tmp_path):
        pass
    check_log_dir(tmp_path, behavior)  # a lock file alone is no run
    assert not (tmp_path / "new").exists()


def test_raise_lists_the_ways_out(run):
    with pytest.raises(ConfigurationError) as error:
        check_log_dir(str(run), "raise")
    assert f"log_path={run} already holds a run" in str(error.value)
    for way in ('="resume"', '="delete"'):  # a script, no command line
        assert f"behavior_if_log_dir_exists{way}" in str(error.value)
    assert "another log_path=" in str(error.value)


@pytest.mark.parametrize(("answer", "left"), [("r", 3), ("resume", 3), ("delete", 0), ("q", 3)])
def test_ask_on_a_real_terminal(run, answer, left):
    master, slave = pty.openpty()
    program = (
        "import os; from tinker_cookbook.cli_utils import check_log_dir as c;"
        f"c({str(run)!r}, 'ask'); print('left', len(os.listdir({str(run)!r})))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=slave, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    os.write(master, f"what?\n{answer}\n".encode())
    out, err = child.communicate(timeout=300)
    os.close(master)
    os.close(slave)
    # The output goes into a pipe, so the question is on standard error.
    assert err.count(b"[r]esume, [d]elete or [q]uit") == 2
    assert (f"left {left}".encode() in out) == (answer != "q")
    # Nothing took the run's place before the program ended, so it is there again.
    assert len([entry for entry in run.iterdir() if entry.name != ".lock"]) == 3
    assert (b"stopped as requested" in err) == (answer == "q")


def test_delete_empties_the_folder_and_keeps_what_a_link_points_to(run, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "data").write_text("x")
    (run / "link").symlink_to(tmp_path / "precious")
    (tmp_path / "alias").symlink_to(run)
    check_log_dir(tmp_path / "alias", "delete")
    assert list(run.iterdir()) == []
    assert (tmp_path / "precious" / "data").exists()


def test_delete_refuses_folders_that_are_no_run(tmp_path, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"hidden_size": 8}')  # a model folder has this name too
    with pytest.raises(ConfigurationError, match="holds none of the files of a run"):
        check_log_dir(model, "delete")
    (model / "config.json").write_text('{"_type": "recipes.sl_basic:CLIConfig"}')
    check_log_dir(model, "delete")
    assert list(model.iterdir()) == []


def test_delete_refuses_dangerous_places(run, tmp_path, monkeypatch):
    def refuses(place, reason):
        with pytest.raises(ConfigurationError, match=reason):
            check_log_dir(place, "delete")
        assert (run / "metrics.jsonl").exists()

    refuses("/", "is or holds your home folder")
    monkeypatch.setenv("HOME", str(run))
    refuses("~", "is or holds your home folder")
    monkeypatch.setenv("HOME", str(tmp_path / "elsewhere"))
    monkeypatch.chdir(run / "iteration_000001")
    refuses(run, "is or holds the current folder")
    refuses(".." , "is or holds the current folder")  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (run / ".git").mkdir()
    refuses(run, "is a git checkout")


def test_a_folder_in_use_is_refused_whatever_was_asked(run):
    for behavior in ("delete", "resume", "raise"):
        with RunLock(run), pytest.raises(ConfigurationError, match=f"in use .*pid {os.getpid()}"):
            check_log_dir(run, behavior)
    assert (run / "metrics.jsonl").exists()


@pytest.mark.parametrize("url", ["s3://bucket/run", "s3:/bucket/run"])
def test_cloud_addresses_are_refused_everywhere(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for use in (
        lambda: check_log_dir(url, "ask"),
        lambda: setup_logging(url),
        lambda: RunLock(url),
    ):
        with pytest.raises(ConfigurationError, match=r"is a URL, but only folders"):
            use()
    assert list(tmp_path.iterdir()) == []
