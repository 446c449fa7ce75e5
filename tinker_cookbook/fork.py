"""Starts a new run from any step of another one, with other settings.

    python -m tinker_cookbook.fork LOG_PATH step=20 log_path=NEW_PATH learning_rate=1e-4
    python -m tinker_cookbook.fork LOG_PATH step=20 log_path=NEW_PATH from=batch loss_fn=ppo

The new folder has the settings, the metrics and the record of the run up to the step, and continues
from there; the run itself is not changed. Without other settings the new run repeats the rest of
the old one, on a CPU bit for bit.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import chz

from tinker_cookbook.backends.connect import connect_with
from tinker_cookbook.checkpoint_utils import CheckpointRecord, load_checkpoints_file
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.leaves import load_leaf
from tinker_cookbook.record.read import Record
from tinker_cookbook.record.schema import FILE_NAME, FOLDER
from tinker_cookbook.run.checkpoints import save_checkpoint_async
from tinker_cookbook.run.config import TYPE_KEY
from tinker_cookbook.run.jsonl import encode_row, trim_rows
from tinker_cookbook.run.paths import CHECKPOINTS_FILE, METRICS_FILE, local_path
from tinker_cookbook.run.scan import RunFolder, find_run_folders, is_run_folder, read_run_folder
from tinker_cookbook.utils.command_line.arguments import parse_arguments
from tinker_cookbook.utils.command_line.config_file import program_of
from tinker_cookbook.utils.command_line.entrypoint import config_class_of, run_program
from tinker_cookbook.utils.command_line.help import help_text
from tinker_cookbook.utils.command_line.programs import print_whole
from tinker_cookbook.utils.command_line.subcommands import with_keys


@chz.chz
class ForkSettings:
    """Settings of a fork."""

    run: str = chz.field(doc="Log folder of the run to start from")
    step: int | None = chz.field(
        default=None,
        doc="Start after this step, 0: before training. Without a checkpoint there, the updates "
        "since the one before are repeated from the record. Default: the last checkpoint",
    )
    log_path: str = chz.field(doc="Folder of the new run, new or empty")
    from_: Literal["batch"] | None = chz.field(
        default=None,
        doc="from=batch: train on the recorded episodes of the later steps, without sampling",
    )


def make_fork(settings: ForkSettings, changes: Sequence[str] = ()) -> list[str]:
    """Makes the folder of the new run; returns the arguments of Python that continue it.

    ``changes`` are settings of the new run, as words of its command line.

    Raises:
        ConfigurationError: There is no such run or step, the folder has files, or a change is
            not a setting of the run.
        CheckpointError: The checkpoint does not exist any more.
    """
    source, target = local_path(settings.run, "run"), local_path(settings.log_path)
    if not is_run_folder(source):
        raise ConfigurationError(f"run: got {settings.run!r}, expected the log folder of a run")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigurationError(
            f"log_path: {target} has files; expected a new folder. A run in it is continued by its "
            "own program, with behavior_if_log_dir_exists=resume"
        )
    found = read_run_folder(source)
    saved = [one for one in found.checkpoints if one.state_path and one.batch is not None]
    steps = [0, *sorted({one.batch or 0 for one in saved})]
    step = steps[-1] if settings.step is None else settings.step
    last = max([0, *(int(row.get("step", 0)) for row in found.rows)])
    if not 0 <= step <= last:
        raise ConfigurationError(
            f"step: got {step}, expected 0 to {last}, the steps of the run; those with a "
            f"checkpoint are {', '.join(map(str, steps))}"
        )
    program = program_of(str(found.config.get(TYPE_KEY, "")))
    if program is None:
        raise ConfigurationError(f"run: {source} was not written by a program of this package")
    words = [*changes, *(_recorded(found, source, step, changes) if settings.from_ else ())]
    config = _checked(program, source, target, words)
    for one in saved:
        if one.batch == step and one.state_path:
            _check_exists(config, one.state_path)
    again = [] if step in steps else [asyncio.run(_checkpoint_again(source, step))]
    _copy(source, target.resolve(), step, again)
    allowed = ["allow_config_change=true"] if words else []
    return [
        *("-m", program, f"config={target}", f"log_path={target}", *words),
        *("behavior_if_log_dir_exists=resume", *allowed),
    ]


def _checked(program: str, source: Path, target: Path, words: Sequence[str]) -> Any:
    """Returns the settings of the new run; raises for a key or value that they do not have."""
    # Before the folder is made: after a mistake the corrected command must not find it.
    config_class = config_class_of(importlib.import_module(program).main)
    assert config_class is not None
    return parse_arguments(config_class, [f"config={source}", f"log_path={target}", *words])


def _check_exists(config: Any, path: str) -> None:
    """Raises ``CheckpointError`` if the backend no longer has a checkpoint."""
    # A resumed run would go back to an earlier one, and train from there with changed settings.
    with connect_with(config) as connection:
        connection.service.create_rest_client().get_weights_info_by_tinker_path(path).result()


def _recorded(found: RunFolder, source: Path, step: int, changes: Sequence[str]) -> list[str]:
    """Returns the settings of a run that trains on the recorded episodes."""
    if "episodes_from" not in found.config:
        raise ConfigurationError(
            "from: got batch, but this run samples nothing: its batches are those of the dataset, "
            "so that a fork without from=batch trains on the same ones"
        )
    recorded = [number for number, splits in Record(source).steps().items() if "train" in splits]
    last = max(recorded, default=0)
    if last <= step:
        raise ConfigurationError(
            f"from: got batch, but the record has no step after {step}; expected an earlier step="
        )
    words = [f"episodes_from={source.absolute()}"]
    # The run ends with the record.
    return (
        words
        if any(one.startswith("max_steps=") for one in changes)
        else [*words, f"max_steps={last}"]
    )


async def _checkpoint_again(source: Path, step: int) -> CheckpointRecord:
    """Returns a checkpoint after ``step``, where the run has none, by repeating its updates."""
    replay = load_leaf("replay.command", f"step={step}, which has no checkpoint,")
    with replay.open_recorded(str(source), step) as run, TemporaryDirectory() as folder:
        client = await run.weights_after(step)
        row, following = run.metrics[step], run.metrics.get(step + 1, {})
        counts = {"trained": "cumulative_tokens", "sampled": "cumulative_sampled_tokens"}
        state = {"batch": step, "epoch": following.get("epoch", row.get("epoch", 0))}
        for kind, key in counts.items():
            if (name := f"tokens/cumulative/{kind}") in row:
                state[key] = row[name]
        ttl = run.config.ttl_seconds
        await save_checkpoint_async(client, f"{step:06d}", folder, state, ttl_seconds=ttl)
        return load_checkpoints_file(folder)[-1]


def _copy(source: Path, target: Path, step: int, more: Sequence[CheckpointRecord]) -> None:
    """Copies what the run wrote until ``step``, and lists ``more`` checkpoints; the folder appears
    when it is complete."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        # Trackers must not continue the run of the source.
        left = {one for one in names if one.startswith((".", "iteration_"))}
        left |= {one for one in names if one.endswith(("_run.json", "report.html"))}
        # Other runs, such as earlier forks.
        inner = [name for name in names if (Path(folder) / name).is_dir()]
        left |= {name for name in inner if any(find_run_folders([Path(folder) / name]))}
        if Path(folder).name == FOLDER:
            found = {name: FILE_NAME.fullmatch(name) for name in names}
            left |= {name for name, match in found.items() if match and int(match[1]) > step}
        return left

    temporary = target.with_name(f".{target.name}.fork")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        shutil.copytree(source, temporary, ignore=left_out)
        trim_rows(temporary / METRICS_FILE, lambda row: row.get("step", 0) <= step)
        trim_rows(
            temporary / CHECKPOINTS_FILE,
            # A run that ended at this step is to go on.
            lambda row: row.get("batch") is not None and row["batch"] <= step,
        )
        with open(temporary / CHECKPOINTS_FILE, "ab") as file:
            file.writelines(encode_row(one.to_dict()) for one in more)
        os.replace(temporary, target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise ConfigurationError(
            f"log_path: {target} cannot be written: {error.strerror or error}; give another folder"
        ) from error


def main(argv: list[str]) -> None:
    """Makes the fork and continues as its program; further keys are settings of the run."""
    if "--help" in argv:
        text = help_text(ForkSettings, "python -m tinker_cookbook.fork", __doc__ or "")
        print_whole(text.replace("from_ ", "from  "))
        return
    own = dict.fromkeys(chz.chz_fields(ForkSettings))
    # ``from`` is a keyword of Python, so the field has another name.
    words = [
        f"from_={word.removeprefix('from=')}" if word.startswith("from=") else word
        for word in with_keys(argv, ("run", "step"))
    ]
    changes = [word for word in words if word.partition("=")[0] not in own]
    settings: Any = parse_arguments(ForkSettings, [word for word in words if word not in changes])
    command = make_fork(settings, changes)
    print("python", *command, flush=True)
    os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
