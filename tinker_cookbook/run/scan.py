"""Finds the run folders under a folder, and reads what each says about its run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.record.schema import FOLDER
from tinker_cookbook.run.checkpoints import CheckpointRecord, load_checkpoints_file
from tinker_cookbook.run.config import TYPE_KEY
from tinker_cookbook.run.jsonl import Row, read_rows
from tinker_cookbook.run.lock import lock_holder
from tinker_cookbook.run.paths import CHECKPOINTS_FILE, CONFIG_FILE, LOG_FILE, METRICS_FILE
from tinker_cookbook.run.replaced_run import was_configured_by_a_run
from tinker_cookbook.utils.error_logs import RUN_STOPPED

RunState = Literal["running", "finished", "stopped", "failed", "empty", "damaged"]

# A sweep or a pipeline is two levels deep.
_DEPTH = 3
_NOT_SEARCHED = (".", "iteration_")
_MESSAGE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", re.MULTILINE)
_ERROR = re.compile(r"^([A-Za-z_][\w.]*)(?:: |$)", re.MULTILINE)
_SHOWN = 300
"""Characters of an error's message."""
_INTERRUPTIONS = ("KeyboardInterrupt", "CancelledError", "SystemExit")


@dataclass(frozen=True)
class RunFolder:
    """What a run's folder says.

    Attributes:
        path: The folder, resolved.
        config: Content of ``config.json``; empty if there is none.
        rows: Rows of ``metrics.jsonl``.
        checkpoints: Lines of ``checkpoints.jsonl``, oldest first.
        holder: The process that runs it now, described; ``None`` if none does.
        error: Type and message of the error that ended it, on one line and shortened; ``None`` if
            it was not ended by one.
        problem: Why a file could not be read; ``None`` if all could.
    """

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    checkpoints: list[CheckpointRecord] = field(default_factory=list)
    holder: str | None = None
    error: str | None = None
    problem: str | None = None

    @property
    def state(self) -> RunState:
        """``stopped``: it may be continued; ``empty``: it ended before its first row."""
        if self.holder is not None:
            return "running"
        if self.problem is not None:
            return "damaged"
        if not self.rows and not self.checkpoints:
            return "failed" if self.error else "empty"
        last = self.checkpoints[-1] if self.checkpoints else None
        # A finished run that was continued has later rows.
        if last is not None and last.final and (last.batch or 0) >= (self.step or 0):
            return "finished"
        return "failed" if self.error else "stopped"

    @property
    def step(self) -> int | None:
        """Updates of the last row, ``None`` without rows."""
        return max((row["step"] for row in self.rows if type(row.get("step")) is int), default=None)

    @property
    def recipe(self) -> str:
        """Name of the recipe, else the loop's package and the class of its dataset builder."""
        if name := self.config.get("recipe_name"):
            return str(name)
        loop = str(self.config.get(TYPE_KEY, "")).partition(":")[0]
        loop = loop.removeprefix("tinker_cookbook.").removeprefix("recipes.")
        builder = self.config.get("dataset_builder")
        data = str(builder.get(TYPE_KEY, "")) if isinstance(builder, dict) else ""
        return " ".join(filter(None, (loop.partition(".")[0], data.rpartition(":")[2])))

    @property
    def updated(self) -> float:
        """Time of the last change of its files, in seconds since the epoch."""
        files = (METRICS_FILE, CHECKPOINTS_FILE, CONFIG_FILE)
        times = [(self.path / n).stat().st_mtime for n in files if (self.path / n).exists()]
        return max(times, default=self.path.stat().st_mtime)

    def values(self, metric: str) -> dict[int, float]:
        """Returns the values of a metric by step, without those that are not finite."""
        return {
            row["step"]: float(row[metric])
            for row in self.rows
            if type(row.get("step")) is int and type(row.get(metric)) in (int, float)
        }


def is_run_folder(folder: Path) -> bool:
    """Returns whether a run has written to ``folder``."""
    if any((folder / name).is_file() for name in (METRICS_FILE, CHECKPOINTS_FILE)):
        return True
    try:
        return was_configured_by_a_run(folder)
    except OSError:  # a file of another user
        return False


def find_run_folders(roots: Iterable[str | os.PathLike[str]]) -> Iterator[Path]:
    """Yields the run folders at and below ``roots``, resolved, each once; a missing root has none.

    Run folders inside run folders are found too.
    """
    seen: set[Path] = set()
    for root in roots:
        for here, _ in walk_folders(Path(root).expanduser().resolve()):
            if here not in seen and is_run_folder(here):
                seen.add(here)
                yield here


def walk_folders(top: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yields the folders at and below ``top`` that may be or have runs, and the folders in each.

    Hidden folders, those of iterations and records, and those of other users that cannot be read
    are not searched.
    """
    for folder, names, _ in os.walk(top):
        here = Path(folder)
        # A record has a file for each step, so that listing it takes long.
        found = sorted(
            name
            for name in names
            if not name.startswith(_NOT_SEARCHED) and name != FOLDER
            and os.access(here / name, os.R_OK | os.X_OK)
        )  # fmt: skip
        names[:] = [] if len(here.relative_to(top).parts) >= _DEPTH else found
        yield here, found


def read_run_folder(folder: Path) -> RunFolder:
    """Reads a run's folder; what cannot be read is left out and described in ``problem``."""
    readers: dict[str, Callable[[], Any]] = {
        "config": lambda: _config_of(folder),
        "rows": lambda: read_rows(folder / METRICS_FILE),
        "checkpoints": lambda: load_checkpoints_file(folder),
    }
    found: dict[str, Any] = {}
    for name, read in readers.items():
        try:
            found[name] = read()
        except (OSError, ValueError, RecursionError, TinkerCookbookError) as error:
            found.setdefault("problem", str(error))
    return RunFolder(folder, holder=lock_holder(folder), error=_error_of(folder), **found)


def _config_of(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    config = json.loads(path.read_bytes()) if path.is_file() else {}
    return config if isinstance(config, dict) else {}


def _error_of(folder: Path) -> str | None:
    """Returns the error that ended the run, if that is the last message of its log."""
    try:
        with open(folder / LOG_FILE, "rb") as file:
            # Without the beginning of a long log.
            file.seek(-min(file.seek(0, os.SEEK_END), 1 << 16), os.SEEK_END)
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    begins = [match.start() for match in _MESSAGE.finditer(text)]
    last = text[begins[-1] :] if begins else ""
    # The last of several chained tracebacks. The frames are indented, and a message may be long.
    text = last.rpartition("Traceback (most recent call last):")[2]
    raised = _ERROR.search(text)
    if raised is None or RUN_STOPPED not in last.partition("\n")[0]:
        return None
    name = raised[1].rpartition(".")[2]
    if name in _INTERRUPTIONS:
        return None
    # A message may have a text of the model, with line breaks and codes for a terminal.
    whole = (c if c.isprintable() else " " for c in f"{name}: {text[raised.end() :]}")
    line = " ".join("".join(whole).split()).removesuffix(":")
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"
