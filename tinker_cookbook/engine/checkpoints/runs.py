"""Runs of a store: one folder each, described by ``run.json``."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tinker_cookbook.engine.checkpoints.files import explain_disk_errors, replace_file
from tinker_cookbook.engine.checkpoints.format import encode_json
from tinker_cookbook.engine.checkpoints.paths import check_name, is_safe_name
from tinker_cookbook.engine.home import home_dir
from tinker_cookbook.exceptions import CheckpointError, nearest_sentence

logger = logging.getLogger(__name__)

_RUN = "run.json"
_NAMES_IN_MESSAGES = 8


@dataclass(frozen=True)
class RunInfo:
    """Base model and adapter shape of a run."""

    base_model: str
    lora_rank: int
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    seed: int | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """A run of the store. Times are seconds since the epoch."""

    run_id: str
    info: RunInfo
    created_at: float
    last_used_at: float


class RunStore:
    """Keeps ``<root>/runs/<run_id>/run.json``.

    ``_opened`` is called after opening, for subclasses.

    Args:
        root: where the store lies; ``None`` is ``TINKER_COOKBOOK_HOME`` or ``~/.tinker_cookbook``.
        clock: gives the time in seconds since the epoch.
        owner: owner of the runs. Errors then name the owner and not the folder, which remote
            clients must not see.
    """

    def __init__(
        self,
        root: Path | None = None,
        clock: Callable[[], float] = time.time,
        owner: str | None = None,
    ) -> None:
        self.root = home_dir() if root is None else Path(root).expanduser()
        self.clock = clock
        self.owner = owner
        self._runs_of = f"under {self.root}" if owner is None else f"of {owner!r}"
        self._opened()

    def _opened(self) -> None:
        pass

    def create_run(self, run_id: str, info: RunInfo) -> RunRecord:
        """Registers a run; raises ``CheckpointError`` if there is one of this id."""
        folder = self.run_folder(run_id)
        with explain_disk_errors(f"creating run {run_id!r}", self.root):
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / _RUN).exists():
                raise CheckpointError(f"run id: got {run_id!r}, which exists; expected a new one")
            now = self.clock()
            body = {"run_id": run_id, "created_at": now, **asdict(info)}
            replace_file(folder / _RUN, encode_json(body, "run info", indent=2))
            os.utime(folder / _RUN, (now, now))
        return RunRecord(run_id, info, created_at=now, last_used_at=now)

    def touch_run(self, run_id: str) -> None:
        """Updates the time of last use."""
        now = self.clock()
        path = self.run_folder(run_id) / _RUN
        if not path.exists():
            raise self._unknown_run(run_id)
        # The time of last use is the file's own: noting it costs no write that a crash could tear.
        with explain_disk_errors(f"touching run {run_id!r}", self.root):
            os.utime(path, (now, now))

    def get_run(self, run_id: str) -> RunRecord:
        """Returns the run of this id; raises ``CheckpointError`` with the nearest known ids."""
        path = self.run_folder(run_id) / _RUN
        try:
            body = json.loads(path.read_bytes())
            created_at = body.pop("created_at")
            if body.pop("run_id") != run_id:
                raise ValueError("it describes another run")
            info = RunInfo(**body)
        except FileNotFoundError:
            raise self._unknown_run(run_id) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                self._shown(
                    f"{path}: got {path.stat().st_size} bytes that do not describe a run ({error})"
                )
            ) from error
        return RunRecord(run_id, info, created_at, last_used_at=path.stat().st_mtime)

    def _shown(self, text: str) -> str:
        """Returns an error text, without the store's folder if the owner is a client of a
        server."""
        return text if self.owner is None else text.replace(f"{self.root}{os.sep}", "")

    def list_runs(self) -> list[RunRecord]:
        """Returns all runs, newest first, without those whose ``run.json`` is damaged."""
        records = []
        for run_id in self.run_ids():
            try:
                records.append(self.get_run(run_id))
            except CheckpointError as error:
                logger.warning("Left out of the list of runs: %s", error)
        return sorted(records, key=lambda record: (-record.created_at, record.run_id))

    def run_ids(self) -> list[str]:
        """Returns the sorted ids of all runs; other folders are ignored."""
        folders = (path.parent.name for path in (self.root / "runs").glob(f"*/{_RUN}"))
        return sorted(filter(is_safe_name, folders))

    def run_folder(self, run_id: str) -> Path:
        """Returns the folder of a run, which may not exist."""
        check_name(run_id, "run id")
        return self.root / "runs" / run_id

    def _unknown_run(self, run_id: str) -> CheckpointError:
        known = self.run_ids()
        return CheckpointError(
            f"run id: got {run_id!r}, which is not among the {len(known)} runs {self._runs_of}"
            f"{nearest_sentence(run_id, known)} {some_of('Its runs', known)}"
        )


def some_of(label: str, names: list[str]) -> str:
    """Returns ``"LABEL: 'a', 'b' and 3 more."``, at most a handful, the last ones; or ``""``."""
    if not names:
        return f"{label}: none."
    shown = ", ".join(repr(name) for name in names[-_NAMES_IN_MESSAGES:])
    more = len(names) - _NAMES_IN_MESSAGES
    return f"{label}: {shown}{f' and {more} more' if more > 0 else ''}."
