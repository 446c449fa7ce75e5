"""Run folders: found below a folder, and what each says about its run."""

from __future__ import annotations

import json
import logging

import pytest

from tinker_cookbook.run.lock import RunLock
from tinker_cookbook.run.ml_log import setup_logging
from tinker_cookbook.run.scan import find_run_folders, read_run_folder
from tinker_cookbook.utils.error_logs import RUN_STOPPED

ROW, SAVED = {"step": 3, "loss": 1.0}, {"name": "000003", "batch": 3, "state_path": "tinker://a"}
CONFIG = {"_type": "m:C", "recipe_name": "sl_basic"}


def write(folder, rows=(), saved=(), config=CONFIG):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, lines in (("metrics.jsonl", rows), ("checkpoints.jsonl", saved)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def stopped_by(folder, error, *later):
    """Writes ``logs.log`` as a session does."""
    log = setup_logging(folder)
    try:
        raise error
    except BaseException as caught:
        logging.getLogger("tinker_cookbook").error(RUN_STOPPED, exc_info=caught)
    for line in later:
        logging.getLogger("tinker_cookbook").warning(line)
    log.close()


@pytest.mark.parametrize(
    ("rows", "saved", "ended_by", "state", "error"),
    [
        ([ROW], [{**SAVED, "final": True}], None, "finished", None),
        ([ROW], [SAVED], None, "stopped", None),
        ([ROW], [], KeyboardInterrupt(), "stopped", None),
        ([ROW], [SAVED], ValueError("two\nlines: 3"), "failed", "ValueError: two lines: 3"),
        ([ROW], [SAVED], [ValueError("x"), "continued"], "stopped", None),
        ([], [], None, "empty", None),
        ([], [], OSError("full"), "failed", "OSError: full"),
        ([[1]], [SAVED], None, "damaged", None),
    ],
)
def test_the_state_of_a_run(tmp_path, rows, saved, ended_by, state, error):
    folder = write(tmp_path / "run", rows, saved)
    if ended_by is not None:
        stopped_by(folder, *(ended_by if isinstance(ended_by, list) else [ended_by]))
    found = read_run_folder(folder)
    assert (found.state, found.error) == (state, error)
    assert found.recipe == "sl_basic"
    if rows == [ROW]:
        assert (found.step, found.values("loss")) == (3, {3: 1.0})
    with RunLock(folder):
        assert read_run_folder(folder).state == "running"


def test_the_run_folders_below_a_folder(tmp_path):
    runs = [write(tmp_path / name) for name in ("a", "sweep/lr=1", "sweep/lr=2", "x/y/z")]
    write(tmp_path / "a" / "iteration_000000")  # part of the run a
    write(tmp_path / "w/x/y/z")  # too deep
    write(tmp_path / ".a.replaced-1")  # hidden
    write(tmp_path / "model", config={"architectures": ["Llama"]}).joinpath(
        "metrics.jsonl"
    ).unlink()
    (tmp_path / "model" / "checkpoints.jsonl").unlink()
    assert list(find_run_folders([tmp_path, tmp_path / "sweep", tmp_path / "none"])) == runs
