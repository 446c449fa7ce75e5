"""Commands ``rm`` and ``prune``: what is removed is listed first, and nothing that is in use."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import chz
from rich.filesize import decimal

from tinker_cookbook.cli_utils import why_not_deletable
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.lock import RunLock
from tinker_cookbook.run.paths import (
    CHECKPOINTS_FILE,
    CONFIG_FILE,
    LOCK_FILE,
    METRICS_FILE,
    folder_size,
)
from tinker_cookbook.run.replaced_run import ended_before_the_first_row
from tinker_cookbook.run.scan import RunFolder, is_run_folder, read_run_folder
from tinker_cookbook.runs.inventory import Inventory, Weights, find_run, take_inventory
from tinker_cookbook.runs.show import FOLDER_DOC
from tinker_cookbook.utils.command_line.programs import print_whole


@chz.chz
class _Confirmed:
    yes: bool = chz.field(default=False, doc="Remove without asking")
    json: bool = chz.field(
        default=False,
        doc="Print as JSON what goes; without yes=true nothing is removed",
    )


@chz.chz
class RemoveSettings(_Confirmed):
    """Settings of ``rm``."""

    run: str = chz.field(doc="Log folder of the run, its name, or RUN of tinker://RUN/…")


@chz.chz
class PruneSettings(_Confirmed):
    """Settings of ``prune``."""

    folder: str | None = chz.field(default=None, doc=FOLDER_DOC)
    gone: bool = chz.field(
        default=False,
        doc="Also weights whose log folder does not exist: it was deleted, or moved elsewhere",
    )
    other_machines: bool = chz.field(
        default=False,
        doc="Also weights whose log folder was on another machine, or on one that is not recorded: "
        "a client of a server on this machine may still use them",
    )


@dataclass(frozen=True)
class Removal:
    """A folder to remove.

    Attributes:
        kind: ``weights`` are locked by their writers, a log folder by its run.
        path: The folder.
        size: Bytes of its files.
        why: What it is.
    """

    kind: Literal["log folder", "weights"]
    path: str
    size: int
    why: str


def remove_run(settings: RemoveSettings) -> None:
    """Removes the log folder of a run and its weights on this machine."""
    inventory = take_inventory(run=settings.run)
    alone = [one for one in inventory.weights if one.run_id == settings.run]
    if alone:
        _remove_weights(alone[0], inventory, settings)
        return
    expected = "a log folder, its name, or RUN of tinker://RUN/…"
    run = find_run(settings.run, inventory, expected)
    _check_stopped(run)
    reason = why_not_deletable(run.path)
    # Other programs write files with this name too.
    if not reason and set(os.listdir(run.path)).isdisjoint(
        {LOCK_FILE, CHECKPOINTS_FILE, CONFIG_FILE}
    ):
        reason = f"it has {METRICS_FILE} but no other file of a run"
    if reason:
        raise ConfigurationError(f"run: {run.path} is not removed because {reason}")
    removals = [_of_log_folder(run.path, f"{run.recipe}, {run.state} at step {run.step}")]
    _check_nothing_inside(run.path)
    notes, ids = list[str](), list[str]()
    for one in inventory.weights_of(run):
        # A copy of the log folder lists the same weights.
        others = [str(path) for path in inventory.owners[one.run_id] if path != run.path]
        if others:
            notes.append(f"kept: weights {one.run_id}, which {' and '.join(others)} lists too")
        else:
            removals.append(_of_weights(one, inventory))
            ids.append(one.run_id)
    _carry_out(removals, settings, notes + _notes_on_users(ids, inventory, run.path))


def _remove_weights(one: Weights, inventory: Inventory, settings: RemoveSettings) -> None:
    """Removes weights only; their log folder stays."""
    owners = inventory.owners.get(one.run_id, [])
    for owner in owners:
        _check_stopped(read_run_folder(owner))
    notes = _notes_on_users([one.run_id], inventory, owners[0] if len(owners) == 1 else None)
    if not owners and not one.is_local:
        notes.append(
            f"their log folder is on {one.host or 'a machine that is not recorded'}, where the run "
            "may still be going on"
        )
    _carry_out([_of_weights(one, inventory)], settings, notes)


def _check_stopped(run: RunFolder) -> None:
    if run.holder is not None:
        raise ConfigurationError(f"run: {run.path} is in use ({run.holder}); stop it first")


def _check_nothing_inside(log_path: Path) -> None:
    """Raises ConfigurationError if another run has its log folder inside this one."""
    inside = sorted({str(lock.parent) for lock in log_path.rglob(LOCK_FILE)} - {str(log_path)})
    if inside:
        raise ConfigurationError(
            f"run: {log_path} contains the log folders of other runs: {', '.join(inside)}; move or "
            "remove these first"
        )


def _notes_on_users(run_ids: Iterable[str], inventory: Inventory, but: Path | None) -> list[str]:
    users = inventory.users_of(run_ids, but=but)
    return [f"the settings of {user} name these weights" for user in users]


def prune_runs(settings: PruneSettings) -> None:
    """Removes weights without a log folder, and log folders without a row."""
    inventory = take_inventory(settings.folder)
    left = inventory.without_folder
    local = [one for one in left if one.is_local or settings.other_machines]
    # A log folder that was moved still needs its weights; one that has another run does not.
    chosen = [
        one for one in local if settings.gone or (one.log_path and is_run_folder(one.log_path))
    ]
    # Weights that another run began with, or that a teacher or a reference has.
    used = [one for one in chosen if inventory.users_of([one.run_id])]
    removals = [_of_weights(one, inventory) for one in chosen if one not in used]
    removals += [
        _of_log_folder(run.path, f"{run.recipe}, ended before its first row")
        for run in inventory.runs
        # A folder with a copied config.json only, which no run has locked, is not a run's.
        if run.holder is None
        and [lock.parent for lock in run.path.rglob(LOCK_FILE)] == [run.path]
        and ended_before_the_first_row(run.path)
    ]
    notes = [f"kept: {len(used)} weights that settings of other runs name"] if used else []
    if missing := len(local) - len(chosen):
        notes.append(f"kept: {missing} weights whose log folder is gone or was moved (gone=true)")
    if others := len(left) - len(local):
        notes.append(f"kept: {others} weights of other or unknown machines (other_machines=true)")
    _carry_out(removals, settings, notes)


def _carry_out(removals: Sequence[Removal], settings: _Confirmed, notes: Sequence[str]) -> None:
    """Prints what goes and the notes, asks, and removes it."""
    total = sum(one.size for one in removals)
    if settings.json:
        listed = [asdict(one) for one in removals]
        data = {"remove": listed, "bytes": total, "notes": notes, "done": settings.yes}
        print_whole(json.dumps(data, indent=2))
    else:
        for one in removals:
            print_whole(f"{decimal(one.size):>10}  {one.kind}  {one.path}  ({one.why})")
        print_whole("\n".join([f"{decimal(total):>10}  in {len(removals)} folders", *notes]))
    if not removals or (not settings.yes and (settings.json or not _asked())):
        return
    for one in removals:
        _remove(one)
    if not settings.json:
        print_whole("removed")


def _asked() -> bool:
    # A job without a terminal must not wait for input.
    if not sys.stdin.isatty():
        raise ConfigurationError(
            "nothing was removed, since there is no terminal to ask on; add yes=true"
        )
    return input("Remove these folders? [y]es or [n]o: ").strip().lower() in ("y", "yes")


def _remove(removal: Removal) -> None:
    path = Path(removal.path)
    if removal.kind == "log folder":
        # Raises an error if a run has started in it meanwhile.
        with RunLock(path, "run"):
            # Renamed first, so that a partly removed folder is never taken for a run.
            gone = path.with_name(f".{path.name}.discarded-{time.time_ns()}")
            path.rename(gone)
            shutil.rmtree(gone)
        return
    # The engine's own lock; imported late, because it takes seconds.
    from tinker_cookbook.engine.checkpoints.files import folder_lock

    with folder_lock(path, exclusive=True, timeout=0):
        # run.json last: if this is interrupted, the rest is still listed and can be removed.
        for entry in sorted(path.iterdir(), key=lambda one: one.name == "run.json"):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    path.rmdir()


def _of_log_folder(path: Path, why: str) -> Removal:
    return Removal("log folder", str(path), folder_size(path), why)


def _of_weights(one: Weights, inventory: Inventory) -> Removal:
    owners = inventory.owners.get(one.run_id, [])
    why = (
        f"of {' and '.join(map(str, owners))}" if owners else f"no run in {one.log_path} lists them"
    )
    return Removal("weights", str(one.path), one.size, f"{one.recipe} {why}".strip())
