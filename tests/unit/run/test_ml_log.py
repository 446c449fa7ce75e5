from __future__ import annotations

import json
import logging
import math
import subprocess
import time
from pathlib import Path

import chz
import pandas
import pytest
from config_samples import FileBuilder, Run

from tinker_cookbook.run.config import load_config, load_config_of_step
from tinker_cookbook.run.ml_log import (  # the official path
    Logger,
    MultiplexLogger,
    WandbLogger,
    start_logging,
)


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_its_files(tmp_path, capsys):
    config = Run(learning_rate=3e-3, dataset_builder=FileBuilder())
    log = start_logging(tmp_path / "run", config=config)
    log.log_metrics({"test/nll": 3.0}, step=0)
    log.log_metrics({"train_mean_nll": 2.5, "progress": 0.5}, step=1)
    log.log_long_text("sample/before", "hello\n")
    log.log_metrics({"train_mean_nll": math.nan, "progress": 1.0}, step=2)
    logging.getLogger("anything").info("a message")
    log.sync()
    log.close()
    log.close()
    logging.getLogger("anything").warning("after the end")
    folder = tmp_path / "run"
    assert load_config(folder) == config
    assert json.loads((folder / "config.json").read_text())["learning_rate"] == 3e-3
    assert [row["step"] for row in rows(folder)] == [0, 1, 2]
    assert "INFO anything: a message" in (folder / "logs.log").read_text()
    assert "after the end" not in (folder / "logs.log").read_text()
    assert (folder / "sample_before.txt").read_text() == "hello\n"
    frame = pandas.read_json(folder / "metrics.jsonl", lines=True)  # as the documents read it
    assert frame["progress"].iloc[-1] == 1.0
    assert frame["train_mean_nll"].dtype == float
    assert capsys.readouterr().out.splitlines() == [
        "step 0  test/nll=3",
        "step 1  progress=0.5000  train_mean_nll=2.500",
        "step 2  progress=1  train_mean_nll=nan",
    ]


def test_resume_cuts_later_rows_and_keeps_a_copy(tmp_path):
    log = start_logging(tmp_path, print_metrics=False)
    for step in range(8):
        log.log_metrics({"loss": step / 7}, step)
    log.close()
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 8, "lo')
    whole = (tmp_path / "metrics.jsonl").read_bytes()

    resumed = start_logging(tmp_path, resume_step=5, print_metrics=False)
    resumed.log_metrics({"loss": 6 / 7}, 6)
    resumed.close()
    assert rows(tmp_path) == [{"step": step, "loss": step / 7} for step in range(7)]
    assert (tmp_path / "metrics.jsonl.pre_resume_000005").read_bytes() == whole
    assert "3 later rows cut" in (tmp_path / "logs.log").read_text()


def test_a_run_killed_before_its_first_checkpoint_starts_its_rows_anew(tmp_path):
    for _ in range(2):
        log = start_logging(tmp_path, resume_step=-1, print_metrics=False)
        log.log_metrics({"test/nll": 3.0}, 0)
        log.close()
    assert rows(tmp_path) == [{"step": 0, "test/nll": 3.0}]
    assert (tmp_path / "metrics.jsonl.pre_resume_000000").exists()


def test_each_step_has_the_settings_of_its_time(tmp_path):
    builder = FileBuilder()

    def start(learning_rate: float, resume_step: int | None) -> list[float]:
        config = Run(dataset_builder=builder, learning_rate=learning_rate, log_path=str(tmp_path))
        log = start_logging(tmp_path, config=config, resume_step=resume_step, print_metrics=False)
        log.close()
        return [load_config_of_step(tmp_path, step).learning_rate for step in range(7)]

    assert start(0.1, None) == [0.1] * 7
    assert start(0.1, 2) == [0.1] * 7
    assert not (tmp_path / "config.history.jsonl").exists()
    assert start(0.2, 4) == [0.1] * 5 + [0.2] * 2
    # Again from the same step, and from an earlier one with and without another change.
    assert start(0.3, 4) == [0.1] * 5 + [0.3] * 2
    assert start(0.3, 3) == [0.1] * 4 + [0.3] * 3
    assert start(0.4, 1) == [0.1] * 2 + [0.4] * 5
    assert start(0.4, 5) == [0.1] * 2 + [0.4] * 5


def test_code_diff_is_a_patch_of_the_checkout(tmp_path, monkeypatch):
    repo = tmp_path / "repo"
    repo.mkdir()

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", repo, *identity, *arguments], check=True, capture_output=True)

    git("init", "-q")
    (repo / "a.py").write_text("x = 1\n")
    git("add", "a.py")
    git("commit", "-q", "-m", "start")
    (repo / "a.py").write_text("x = 2\n")
    (repo / "new.py").write_text("")
    monkeypatch.chdir(repo)
    start_logging(tmp_path / "run").close()
    diff = (tmp_path / "run" / "code.diff").read_text()
    mine = diff[diff.index(f"# checkout: {repo}") :]
    assert "# untracked: new.py" in mine
    assert "-x = 1\n+x = 2\n" in mine
    git("checkout", "-q", "a.py")
    (tmp_path / "patch").write_text(mine)
    git("apply", str(tmp_path / "patch"))
    assert (repo / "a.py").read_text() == "x = 2\n"


class Note(Logger):
    def __init__(self, notes: list, fail: bool = False):
        self.notes, self.fail = notes, fail

    def log_metrics(self, metrics, step=None):
        self.notes.append((metrics, step))

    def close(self):
        self.notes.append("closed")
        if self.fail:
            raise RuntimeError("no network")

    def get_logger_url(self):
        return None if self.fail else "http://run"


def test_multiplex_closes_all_also_when_one_fails():
    notes: list = []
    log = MultiplexLogger([Note(notes, fail=True), Note(notes)], lambda: notes.append("detached"))
    log.log_metrics({"a": 1}, 2)
    assert log.get_logger_url() == "http://run"
    with pytest.raises(RuntimeError, match="no network"):
        log.close()
    assert notes == [({"a": 1}, 2), ({"a": 1}, 2), "closed", "closed", "detached"]


@chz.chz
class Small:
    learning_rate: float = 0.5


def test_wandb_offline_run_is_resumed_under_its_id(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr("tinker_cookbook.run.trackers.START_SECONDS", 300)
    ids = []
    for resume_step, steps in ((None, range(3)), (1, range(2, 4))):
        log = start_logging(
            tmp_path, "project", "name", Small(), resume_step=resume_step, print_metrics=False
        )
        for step in steps:
            log.log_metrics({"train_mean_nll": 1.0 + step}, step)
        (worker,) = log.loggers[-1].workers  # type: ignore[attr-defined]
        assert isinstance(worker.tracker, WandbLogger)
        ids.append(worker.tracker.run_id)
        log.close()
        time.sleep(1.1)  # wandb names an offline folder by the second
    assert ids[0] == ids[1]
    assert json.loads((tmp_path / "wandb_run.json").read_text())["id"] == ids[0]
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*-{ids[0]}/run-{ids[0]}.wandb"))
    assert len(files) == 2
