"""What the sweep itself keeps of a run: its settings, its seconds, and whether it is finished."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tinker_cookbook.checkpoint_utils import get_last_checkpoint
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.sweep.grid import Run
from tinker_cookbook.utils.run_folder.paths import write_atomically

RECORDS = ".sweep"
METRICS = "metrics.jsonl"


@dataclass
class Record:
    """``LOG_DIR/.sweep/NAME.json``.

    Attributes:
        recipe: Module of the recipe.
        settings: What the run was started with.
        seconds: Of all attempts that have ended.
        started: Time of day at which the attempt in hand began, or ``None``.
        done: The run's process ended with status 0.
    """

    recipe: str
    settings: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    started: float | None = None
    done: bool = False

    def begin(self) -> None:
        """An attempt begins."""
        self.started = time.time()

    def end(self, done: bool) -> None:
        """The attempt has ended."""
        self.seconds += time.time() - (self.started or time.time())
        self.started, self.done = None, done


class RecordFolder:
    """The records of a sweep."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir, self.folder = log_dir, log_dir / RECORDS

    def read(self, run: Run, recipe: str, extra: dict[str, str]) -> Record:
        """Returns the record of a run, or a fresh one.

        Args:
            run: The point of the grid.
            recipe: Module of the recipe.
            extra: Settings of the server, which a run's numbers depend on as well.

        Raises:
            ConfigurationError: The folder holds a run of other settings; going on with it would
                put numbers of two experiments into one table.
        """
        wanted = {**run.settings, **extra}
        path = self._path(run)
        try:
            record = Record(**json.loads(path.read_bytes()))
        except FileNotFoundError:
            return Record(recipe, wanted)
        except (ValueError, TypeError) as error:
            raise DataFormatError(
                f"{path}: cannot be read ({error}), expected what the sweep writes of a run; "
                "delete it, and the run is looked at afresh"
            ) from error
        self._check_same(record, run, recipe, wanted)
        self._close_cut_attempt(record, run)
        return record

    def write(self, run: Run, record: Record) -> None:
        """Keeps a record."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path(run), json.dumps(asdict(record), indent=2).encode())

    def is_finished(self, run: Run, record: Record) -> bool:
        """Returns whether nothing is left to run: the process said so, or its last checkpoint
        is final."""
        if record.done:
            return True
        with contextlib.suppress(DataFormatError):  # the recipe will say it better
            last = get_last_checkpoint(self.log_dir / run.name)
            return last is not None and bool(last.final)
        return False

    def _path(self, run: Run) -> Path:
        return self.folder / f"{run.name}.json"

    def _check_same(self, record: Record, run: Run, recipe: str, wanted: dict[str, str]) -> None:
        if record.recipe != recipe:
            raise ConfigurationError(
                f"log_dir={self.log_dir}: got {recipe}, expected {record.recipe}, which the runs "
                "there were made with; give this sweep another log_dir"
            )
        for key in dict.fromkeys((*wanted, *record.settings)):
            got, made_with = wanted.get(key), record.settings.get(key)
            if got != made_with:
                raise ConfigurationError(
                    f"{key}: got {got or 'none'}, expected {made_with or 'none'}, which "
                    f"{self.log_dir / run.name} was made with; give this sweep another log_dir, "
                    f"or delete that folder and {self._path(run)}"
                )

    def _close_cut_attempt(self, record: Record, run: Run) -> None:
        # Whoever was killed could not say when, but its last row can.
        if record.started is None:
            return
        with contextlib.suppress(OSError):
            last = (self.log_dir / run.name / METRICS).stat().st_mtime
            record.seconds += max(0.0, last - record.started)
        record.started = None
