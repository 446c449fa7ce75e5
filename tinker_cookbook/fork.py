"""Starts a new run from a checkpoint of another one, with other settings.

    python -m tinker_cookbook.fork LOG_PATH step=20 log_path=NEW_PATH learning_rate=1e-4

The new folder has the settings, the metrics and the record of the run up to the step, and continues
from there; the run itself is not changed. Without other settings the new run repeats the rest of
the old one, on a CPU bit for bit.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook.checkpoint_utils import load_checkpoints_file
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.record.schema import FILE_NAME, FOLDER
from tinker_cookbook.run.config import TYPE_KEY
from tinker_cookbook.run.jsonl import trim_rows
from tinker_cookbook.run.paths import CHECKPOINTS_FILE, LOCK_FILE, METRICS_FILE, local_path
from tinker_cookbook.run.scan import is_run_folder, read_run_folder
from tinker_cookbook.utils.command_line.arguments import parse_arguments
from tinker_cookbook.utils.command_line.config_file import program_of
from tinker_cookbook.utils.command_line.entrypoint import run_program
from tinker_cookbook.utils.command_line.help import help_text
from tinker_cookbook.utils.command_line.programs import print_whole
from tinker_cookbook.utils.command_line.subcommands import with_keys


@chz.chz
class ForkSettings:
    """Settings of a fork."""

    run: str = chz.field(doc="Log folder of the run to start from")
    step: int | None = chz.field(default=None, doc="Step of a checkpoint; default: the last one")
    log_path: str = chz.field(doc="Folder of the new run; it may not exist")


def make_fork(settings: ForkSettings) -> list[str]:
    """Makes the folder of the new run; returns the arguments of Python that continue it.

    Raises:
        ConfigurationError: There is no such run or checkpoint, or the folder exists.
    """
    source, target = local_path(settings.run, "run"), local_path(settings.log_path)
    if not is_run_folder(source):
        raise ConfigurationError(f"run: got {settings.run!r}, expected the log folder of a run")
    if target.exists():
        raise ConfigurationError(f"log_path: {target} exists; expected a new folder")
    checkpoints = [one for one in load_checkpoints_file(source) if one.state_path]
    steps = sorted({one.batch for one in checkpoints if one.batch is not None})
    step = settings.step if settings.step is not None else (steps or [None])[-1]
    if step not in steps:
        raise ConfigurationError(
            f"step: got {step}, but {source} has checkpoints after the steps "
            f"{', '.join(map(str, steps)) or 'none'}; the settings save_every and "
            "rolling_save_every save more"
        )
    config = read_run_folder(source).config
    program = program_of(str(config.get(TYPE_KEY, "")))
    if program is None:
        raise ConfigurationError(f"run: {source} was not written by a program of this package")
    _copy(source, target, step)
    return ["-m", program, f"config={target}", f"log_path={target}"]


def _copy(source: Path, target: Path, step: int) -> None:
    """Copies what the run wrote until ``step``; the folder appears when it is complete."""

    def later(folder: str, names: list[str]) -> set[str]:
        left = {one for one in names if one == LOCK_FILE or one.startswith((".", "iteration_"))}
        if Path(folder).name == FOLDER:
            found = {name: FILE_NAME.fullmatch(name) for name in names}
            left |= {name for name, match in found.items() if match and int(match[1]) > step}
        return left

    temporary = target.with_name(f".{target.name}.fork")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary, ignore=later)
    trim_rows(temporary / METRICS_FILE, lambda row: row.get("step", 0) <= step)
    trim_rows(
        temporary / CHECKPOINTS_FILE,
        # A run that ended at this step is to go on.
        lambda row: row.get("batch") is not None and row["batch"] <= step,
    )
    os.replace(temporary, target)


def main(argv: list[str]) -> None:
    """Makes the fork and continues as its program; further keys are settings of the run."""
    own = dict.fromkeys(chz.chz_fields(ForkSettings), True)
    if "--help" in argv:
        print_whole(help_text(ForkSettings, "python -m tinker_cookbook.fork", __doc__ or ""))
        return
    words = with_keys(argv, ("run",))
    changes = [word for word in words if word.partition("=")[0] not in own]
    settings: Any = parse_arguments(ForkSettings, [word for word in words if word not in changes])
    command = make_fork(settings)
    command += [*changes, "behavior_if_log_dir_exists=resume"]
    command += ["allow_config_change=true"] if changes else []
    print("python", *command, flush=True)
    os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
