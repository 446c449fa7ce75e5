"""All runs of this machine: their log folders, and their weights in the engine's home."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tinker_cookbook.cli_utils import default_log_path, runs_path
from tinker_cookbook.engine.home import home_dir
from tinker_cookbook.exceptions import ConfigurationError, nearest_sentence
from tinker_cookbook.run.paths import folder_size
from tinker_cookbook.run.scan import RunFolder, find_run_folders, is_run_folder, read_run_folder
from tinker_cookbook.run.weights_paths import SCHEME


@dataclass(frozen=True)
class Weights:
    """The folder ``runs/RUN`` of saved weights.

    Attributes:
        run_id: RUN in ``tinker://RUN/…``.
        path: The folder.
        recipe: Name of the recipe, if recorded.
        log_path: Log folder of the run as recorded, which may be gone or on another machine.
        host: Machine of the log folder, ``None`` if not recorded.
        updated: Time of the last save, in seconds since the epoch.
    """

    run_id: str
    path: Path
    recipe: str
    log_path: Path | None
    host: str | None
    updated: float

    @cached_property
    def size(self) -> int:
        """Bytes of all its files."""
        return folder_size(self.path)

    @property
    def is_local(self) -> bool:
        """Whether its log folder would be on this machine: a client of a server has its own."""
        return self.log_path is not None and self.host == socket.gethostname()


@dataclass
class Inventory:
    """Log folders and weights, and the log folder of each weights folder.

    Attributes:
        runs: Log folders, those below the chosen folder.
        weights: Weights whose log folder is, or was, below the chosen folder.
        everywhere: All log folders that are known: any of them may use any weights.
        owners: RUN -> log folders that list its checkpoints, among all; a copy of a log folder
            lists those of the original.
    """

    runs: list[RunFolder]
    weights: list[Weights]
    everywhere: list[RunFolder]
    owners: dict[str, list[Path]] = field(default_factory=dict)

    def weights_of(self, run: RunFolder) -> list[Weights]:
        """Returns the weights of a run; it has several folders if it was resumed."""
        return [one for one in self.weights if run.path in self.owners.get(one.run_id, ())]

    @property
    def without_folder(self) -> list[Weights]:
        """Weights whose log folder is gone, or belongs to another run now."""
        return [one for one in self.weights if one.run_id not in self.owners and one.log_path]

    def users_of(self, run_ids: Iterable[str], but: Path | None = None) -> list[str]:
        """Returns the log folders of other runs whose settings name weights of these runs."""
        ids = [f"{SCHEME}{run_id}/" for run_id in run_ids]
        texts = {run.path: json.dumps(run.config) for run in self.everywhere if run.path != but}
        return [str(path) for path, text in texts.items() if any(i in text for i in ids)]


def take_inventory(folder: str | None = None, run: str | None = None) -> Inventory:
    """Finds the runs in ``folder``; by default where recipes write, and those with weights here.

    ``run`` is the log folder of one more run, which may be elsewhere; a name finds none.

    Raises:
        ConfigurationError: There is no such folder.
    """
    weights = weights_at_home()
    recorded = [one.log_path for one in weights if one.log_path]
    roots: list[str | Path] = [default_log_path(""), runs_path()]
    roots += filter(is_run_folder, recorded)
    top = None if folder is None else Path(folder).expanduser().resolve()
    if top is not None and not top.is_dir():
        raise ConfigurationError(f"folder: got {folder!r}, there is no such folder")
    roots += filter(None, (top, run))
    runs = [read_run_folder(path) for path in find_run_folders(roots)]
    runs.sort(key=lambda one: -one.updated)
    found = Inventory(runs, weights, runs)
    if top is not None:
        found.runs = [one for one in runs if one.path.is_relative_to(top)]
        found.weights = [w for w in weights if w.log_path and w.log_path.is_relative_to(top)]
    for one in runs:
        for run_id in _listed_ids(one):
            found.owners.setdefault(run_id, []).append(one.path)
    # A run that is going on may not have saved its first checkpoint.
    busy = {one.path for one in runs if one.holder is not None}
    for one in weights:
        if one.log_path in busy:
            found.owners.setdefault(one.run_id, [one.log_path])
    return found


def weights_at_home() -> list[Weights]:
    """Returns the weights of the engine on this machine, newest first.

    The files are read without the engine, which takes seconds to import.
    """
    found = []
    for file in (home_dir() / "runs").glob("*/run.json"):
        try:
            metadata = json.loads(file.read_bytes()).get("user_metadata") or {}
        except (OSError, ValueError, AttributeError):
            metadata = {}
        # Earlier versions recorded a relative path as it was given.
        log_path = Path(metadata.get("log_path") or "").expanduser()
        found.append(
            Weights(
                run_id=file.parent.name,
                path=file.parent,
                recipe=str(metadata.get("recipe", "")),
                log_path=log_path.resolve() if log_path.is_absolute() else None,
                host=metadata.get("host"),
                updated=file.stat().st_mtime,
            )
        )
    return sorted(found, key=lambda one: -one.updated)


def find_run(
    name: str, inventory: Inventory, expected: str = "a log folder or its name"
) -> RunFolder:
    """Returns the run of a log folder, or of a folder name that is unique.

    Raises:
        ConfigurationError: There is none, or several.
    """
    path = Path(name).expanduser().resolve()
    if is_run_folder(path):
        known = [run for run in inventory.runs if run.path == path]
        return known[0] if known else read_run_folder(path)
    found = [run for run in inventory.runs if run.path.name == name]
    if len(found) > 1:
        paths = ", ".join(str(run.path) for run in found)
        raise ConfigurationError(f"run: {name!r} is the name of {len(found)} runs: {paths}")
    if not found:
        names = [run.path.name for run in inventory.runs]
        raise ConfigurationError(
            f"run: got {name!r}, expected {expected}"
            f"{nearest_sentence(name, names)} `python -m tinker_cookbook.runs` lists them"
        )
    return found[0]


def _listed_ids(run: RunFolder) -> set[str]:
    paths = [path for one in run.checkpoints for path in (one.state_path, one.sampler_path) if path]
    return {path.removeprefix(SCHEME).partition("/")[0] for path in paths}
