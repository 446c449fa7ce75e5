"""Run folders of training commands: default paths, and handling of existing folders."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.run import replaced_run
from tinker_cookbook.run.lock import lock_holder
from tinker_cookbook.run.paths import CHECKPOINTS_FILE, LOCK_FILE, METRICS_FILE, local_path
from tinker_cookbook.utils.command_line.programs import started_as

LogdirBehavior = Literal["delete", "resume", "ask", "raise"]

RUNS_DIR_ENV_VAR = "TINKER_COOKBOOK_RUNS_DIR"
DEFAULT_RUNS_DIR = "~/tinker-runs"

_KEY = "behavior_if_log_dir_exists"
EXAMPLES_ROOT = "/tmp/tinker-examples"


@contextmanager
def log_dir_of_run(
    log_dir: str | os.PathLike[str], behavior_if_exists: LogdirBehavior
) -> Iterator[None]:
    """Calls :func:`check_log_dir`, then runs the block.

    If the block ends before the new run's first row, an old run that ``delete`` replaced is
    restored immediately.
    """
    check_log_dir(log_dir, behavior_if_exists)
    try:
        yield
    finally:
        replaced_run.settle(local_path(log_dir))


def check_log_dir(log_dir: str | os.PathLike[str], behavior_if_exists: LogdirBehavior) -> None:
    """Handles an existing log folder, which is never overwritten.

    Args:
        log_dir: The run's folder. A missing or empty one, or one of a run that ended before its
            first row, is always accepted.
        behavior_if_exists: ``resume`` leaves it unchanged; ``delete`` leaves an empty folder;
            ``raise`` raises an error; ``ask`` prompts on a terminal, and raises without one.

    With ``delete`` the old run is renamed to a hidden folder in the same parent folder. It is
    removed when the new run writes its first row with ``ml_log``, and restored if the program ends
    before that, or at the next call for this folder if the program was killed.

    Raises:
        ConfigurationError: The folder is in use, exists (``raise``), is not local, is a file, or
            must not be deleted.
    """
    choices = get_args(LogdirBehavior)
    if behavior_if_exists not in choices:
        raise ConfigurationError(
            f"{_KEY}={behavior_if_exists!r}: expected one of {', '.join(choices)}"
            f"{nearest(behavior_if_exists, choices)}"
        )
    path = local_path(log_dir)
    if path.exists() and not path.is_dir():
        raise ConfigurationError(f"log_path={path} is a file; expected a folder")
    # Restore an old run first, if a failed attempt had renamed it.
    replaced_run.settle(path)  # a failed attempt of this process
    replaced_run.recover(path)  # an attempt of a process that was killed
    # A run that was refused before it wrote anything leaves only its lock file.
    if not path.is_dir() or all(entry.name == LOCK_FILE for entry in path.iterdir()):
        return
    holder = lock_holder(path)
    if holder is not None:
        raise ConfigurationError(
            f"log_path={path} is in use by another run ({holder}); wait for it, stop it, or give "
            f"this run its own log_path=…"
        )
    # The earlier run ended before its first row, so nothing is lost.
    ended_early = replaced_run.ended_before_the_first_row(path) and _was_written_by_a_run(path)
    if behavior_if_exists != "delete" and ended_early:
        return
    if behavior_if_exists == "ask":
        behavior_if_exists = _ask(path)
    if behavior_if_exists == "raise":
        raise ConfigurationError(f"log_path={path} already holds a run; add {_choices()}")
    if behavior_if_exists == "delete":
        # Resolve links, so that a link to the home folder is recognised.
        target = path.resolve()
        reason = why_not_deletable(target)
        if reason:
            raise ConfigurationError(
                f"{_KEY}=delete: {target} is not deleted because {reason}; remove it yourself or "
                f"give another log_path=…"
            )
        replaced_run.set_aside(target)


def runs_path(*parts: str) -> str:
    """Returns a folder under ``$TINKER_COOKBOOK_RUNS_DIR`` (default ``~/tinker-runs``)."""
    root = os.environ.get(RUNS_DIR_ENV_VAR) or DEFAULT_RUNS_DIR
    return str(local_path(root, RUNS_DIR_ENV_VAR).joinpath(*parts))


def default_log_path(recipe: str) -> str:
    """Returns the default ``log_path`` of a recipe: ``/tmp/tinker-examples/RECIPE``, or
    ``$TINKER_COOKBOOK_RUNS_DIR/RECIPE`` where the variable is set."""
    # Not checked here, where it would break the import of programs that have their own log_path.
    root = os.environ.get(RUNS_DIR_ENV_VAR, "").strip() or EXAMPLES_ROOT
    return os.path.join(os.path.expanduser(root), recipe)


def model_name_from_argv(argv: Sequence[str], default: str) -> str:
    """Returns the model name on a command line, for defaults that are needed before parsing.

    Reads ``model_name=X`` and chz's wildcard ``...model_name=X``; the last one takes precedence, as
    in chz.
    """
    name = default
    for argument in argv:
        key, equals, value = argument.partition("=")
        if equals and value and key.lstrip(".") == "model_name":
            name = value
    return name


def _ask(path: Path) -> LogdirBehavior:
    # A job without a terminal must not wait for input.
    if not sys.stdin.isatty():
        raise ConfigurationError(
            f"log_path={path} already holds a run and there is no terminal to ask on; add "
            f"{_choices()}"
        )
    while True:
        question = f"{path} already holds a run. [r]esume, [d]elete or [q]uit? "
        # A question in a pipe, as of `… | tail`, would not be seen.
        seen = sys.stdout if sys.stdout.isatty() else sys.stderr
        print(question, end="", file=seen, flush=True)
        answer = input().strip()
        if answer in ("r", "resume"):
            return "resume"
        if answer in ("d", "delete"):
            return "delete"
        if answer in ("q", "quit"):
            raise ConfigurationError(f"log_path={path} already holds a run; stopped as requested")


def _choices() -> str:
    # A script passes texts of Python, and a command line has no quotes.
    quote = '"' if started_as() is None else ""
    resume, delete = (f"{_KEY}={quote}{way}{quote}" for way in ("resume", "delete"))
    ways = f"{resume} (continue from its last checkpoint), {delete} (start over)"
    return f"{ways}, or another log_path=…"


def why_not_deletable(target: Path) -> str | None:
    """Returns why a log folder, resolved, must not be removed; ``None`` if it may be."""
    for name, folder in (("your home folder", Path.home()), ("the current folder", Path.cwd())):
        # Parents of these folders too, because deleting a parent would delete them.
        if folder.resolve().is_relative_to(target):
            return f"it is or holds {name}"
    if (target / ".git").exists():
        return "it is a git checkout"
    if not _was_written_by_a_run(target):
        return "it holds none of the files of a run (metrics.jsonl, checkpoints.jsonl, config.json)"
    return None


def _was_written_by_a_run(target: Path) -> bool:
    if any((target / name).exists() for name in (METRICS_FILE, CHECKPOINTS_FILE, LOCK_FILE)):
        return True
    return replaced_run.was_configured_by_a_run(target)
