"""Runs, sweeps and evaluations of a folder, read from their files; nothing is written.

Each function returns a JSON object. The server answers with it, and a report has all of them.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.record.read import Record
from tinker_cookbook.run.best import METRICS, lower_is_better
from tinker_cookbook.run.jsonl import NONFINITE_KEY, Row
from tinker_cookbook.run.lock import lock_holder
from tinker_cookbook.run.paths import METRICS_FILE
from tinker_cookbook.run.scan import RunFolder, find_run_folders, read_run_folder
from tinker_cookbook.training.diagnosis.causes import causes_of
from tinker_cookbook.view import evaluations
from tinker_cookbook.view.evidence import add_evidence
from tinker_cookbook.view.files import has_files
from tinker_cookbook.view.guard import NotFoundError, attempt, reason

_MAX_POINTS = 1000
"""Of a longer series the page gets the lowest and the highest value of each part."""
_SLOW_SEARCH = 0.5
"""Seconds of a search for runs, above which the next one is ten times as long after it."""
_KEPT_RUNS = 8
"""Runs whose rows stay in memory, because a page asks for them every few seconds."""

Series = dict[str, list[Any]]
_T = TypeVar("_T")


@dataclass
class Runs:
    """The runs at and below ``folder``."""

    folder: Path
    _rows: dict[Path, tuple[Any, dict[str, Any]]] = field(default_factory=dict)
    _read: dict[Path, tuple[Any, RunFolder]] = field(default_factory=dict)
    _found: tuple[float, tuple[Sequence[Path], ...]] = (0.0, ())
    """Folders of the last search, and until when they are not searched again."""

    @cached_property
    def root(self) -> Path:
        """The folder, resolved; raises ``ConfigurationError`` if there is none."""
        path = self.folder.expanduser().resolve()
        if not path.is_dir():
            raise ConfigurationError(f"folder: got {str(self.folder)!r}, there is no such folder")
        return path

    def list(self) -> dict[str, Any]:
        """Returns a row for each run, the one that changed last first, and other folders."""
        runs, (folders, sweeps, answers) = [], self._folders()
        for path in folders:
            try:
                runs.append(self._row_of(path))
            except OSError:  # deleted since it was found
                continue
        runs.sort(key=lambda run: -run["updated"])
        return {
            "folder": str(self.root),
            "runs": runs,
            "sweeps": [self.name_of(path) for path in sweeps],
            "evaluations": [
                evaluations.evaluation(path) | {"name": self.name_of(path)} for path in answers
            ],
        }

    def run(self, name: str) -> dict[str, Any]:
        """Returns the settings, the metrics by name, and the steps with a record of a run."""
        run, problems = self._run(self.path_of(name)), list[str]()
        metrics, record = metrics_of(run.rows), Record(run.path)
        row = _list_row(run, name)
        found = row | {
            "config": attempt("config", lambda: flat(run.config), {}, problems),
            "metrics": {name: thinned(one) for name, one in metrics.items()},
            "axes": axes_of(run.rows),
            "record": {
                str(step): splits
                for step, splits in attempt("record", record.steps, {}, problems).items()
            },
            "causes": self._causes(run, problems),
            "checked": checked(run),
            "has": has_files(run.path),
            "error": run.error,
        }
        return found | {"problem": "; ".join(filter(None, (row["problem"], *problems))) or None}

    @staticmethod
    def _causes(run: RunFolder, problems: list[str]) -> list[dict[str, Any]]:
        record = Record(run.path)
        causes = attempt("causes", lambda: causes_of(run.rows, run.config), [], problems)
        for cause in causes:
            attempt(cause.name, lambda one=cause: add_evidence(one, record), None, problems)
        return [vars(cause) for cause in causes]

    def path_of(self, name: str) -> Path:
        """Returns a folder at or below the root; raises ``NotFoundError`` for another name."""
        try:
            path = (self.root / name).resolve()
            if path.is_relative_to(self.root) and path.is_dir():
                return path
        except (OSError, ValueError, RuntimeError):  # too long, NUL, a loop of links
            pass
        raise NotFoundError(name)

    def name_of(self, path: Path) -> str:
        """Returns the name of a folder in the list, its path below the root."""
        return str(path.relative_to(self.root))

    def _folders(self) -> tuple[Sequence[Path], ...]:
        """Returns the folders of runs, sweeps and evaluations."""
        # A page asks every few seconds, so that a search of many folders is not repeated each time.
        until, found = self._found
        begin = time.monotonic()
        if begin >= until:
            found = [*find_run_folders([self.root])], *evaluations.find_folders(self.root)
            took = time.monotonic() - begin
            self._found = begin + (10 * took if took > _SLOW_SEARCH else 0), found
        return found

    def _row_of(self, path: Path) -> dict[str, Any]:
        return _kept(self._rows, path, lambda: _list_row(self._run(path), self.name_of(path)))

    def _run(self, path: Path) -> RunFolder:
        def read() -> RunFolder:
            run = read_run_folder(path)
            return dataclasses.replace(run, rows=[*map(_usable, run.rows)])

        run = _kept(self._read, path, read)
        if len(self._read) > _KEPT_RUNS:
            self._read.pop(next(iter(self._read)), None)
        return run


def _kept(known: dict[Path, tuple[Any, _T]], path: Path, make: Callable[[], _T]) -> _T:
    """Returns what is known of a run; makes it anew, as the last, if a file of it has changed."""
    stamp, found = _stamp(path), known.pop(path, None)
    if found is None or found[0] != stamp:
        found = stamp, make()
    known[path] = found
    return found[1]


def _stamp(path: Path) -> tuple[Any, ...]:
    """Returns what differs after a change of a run: times, size of the metrics, its process."""
    probe = dataclasses.replace(RunFolder(path), holder=lock_holder(path))
    metrics = path / METRICS_FILE
    size = metrics.stat().st_size if metrics.is_file() else 0
    return probe.updated, size, probe.holder


def _usable(row: Row) -> Row:
    """Returns a row of any program without integers that no float has, and odd ``nonfinite``."""
    kept = {k: v for k, v in row.items() if type(v) is not int or abs(v) < 2**63}
    odd = kept.pop(NONFINITE_KEY, None)
    if isinstance(odd, dict):
        kept[NONFINITE_KEY] = {k: v for k, v in odd.items() if v in ("nan", "inf", "-inf")}
    return kept


def _list_row(run: RunFolder, name: str) -> dict[str, Any]:
    try:
        return _row(run, name)
    except Exception as error:  # one run must not hide the others
        return _row(RunFolder(run.path, holder=run.holder, problem=reason(error)), name)


def _row(run: RunFolder, name: str) -> dict[str, Any]:
    config = run.config
    metric = config.get("best_metric") or next((m for m in METRICS if run.values(m)), None)
    values = run.values(metric) if metric else {}
    best = None
    if values:
        best = (min if lower_is_better(str(metric)) else max)(values.values())
    axes = axes_of(run.rows)
    dollars = run.values("cost/cumulative_usd")
    return {
        "name": name,
        "title": run.path.name,
        "path": str(run.path),
        "recipe": run.recipe,
        "state": run.state,
        "step": run.step,
        "model": config.get("model_name"),
        "metric": metric,
        "best": best,
        "last": list(values.values())[-1] if values else None,
        "minutes": axes["minutes"][-1] if run.rows else None,
        "tokens": axes["tokens"][-1] if run.rows else None,
        "cost": list(dollars.values())[-1] if dollars else None,
        "causes": [cause.name for cause in causes_of(run.rows, config)],
        "updated": run.updated,
        "problem": run.problem,
    }


def checked(run: RunFolder) -> bool:
    """Returns whether causes were looked for: not by other programs, nor before three steps."""
    steps = sum("progress/batch" in row or "num_sequences" in row for row in run.rows)
    return "_type" in run.config and steps >= 3


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Returns nested settings as keys of the command line."""
    if not isinstance(value, dict):
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= flat(item, f"{prefix}.{key}" if prefix else key)
    return found


def metrics_of(rows: Iterable[Row]) -> dict[str, Series]:
    """Returns the steps and values of each numeric metric; NaN and infinity are texts."""
    found: dict[str, Series] = {}
    for row in rows:
        step = row.get("step")
        if type(step) is not int:
            continue
        odd = row.get(NONFINITE_KEY) or {}
        for name, value in row.items():
            if name in odd:
                shown = odd[name]
            elif name != "step" and type(value) in (int, float) and math.isfinite(value):
                shown = value
            else:
                continue
            series = found.setdefault(name, {"steps": [], "values": []})
            series["steps"].append(step)
            series["values"].append(shown)
    return found


def axes_of(rows: Iterable[Row]) -> Series:
    """Returns the steps of a run, and the trained tokens and minutes up to each, with those of
    evaluations."""
    steps, tokens, minutes = [], [], []
    trained = seconds = 0.0
    for row in rows:
        if type(row.get("step")) is int:
            seconds += _number(row.get("time/total", row.get("time/step")))
            seconds += _number(row.get("time/eval"))
            trained = _number(row.get("tokens/cumulative/trained")) or trained
            steps.append(row["step"])
            tokens.append(trained)
            minutes.append(round(seconds / 60, 4))
    return {"steps": steps, "tokens": tokens, "minutes": minutes}


def _number(value: Any) -> float:
    return float(value) if type(value) in (int, float) else 0.0


def thinned(series: Series) -> Series:
    """Returns a series of about ``_MAX_POINTS`` points, which has all of its extremes and the last.

    ``gaps`` are the points that come later than the series usually has one.
    """
    steps, values = series["steps"], series["values"]
    kept = list(range(len(values)))
    if len(values) > _MAX_POINTS:
        numbers = np.array([math.nan if type(v) is str else v for v in values], float)
        kept = []
        for part in np.array_split(np.arange(len(values)), _MAX_POINTS // 2):
            here = part[np.isfinite(numbers[part])]
            ends = (here[numbers[here].argmin()], here[numbers[here].argmax()]) if len(here) else ()
            # One NaN or infinity stands for those of its part.
            odd = part[~np.isfinite(numbers[part])][:1]
            kept += sorted({*map(int, ends), *odd.tolist()})
        kept += [] if kept[-1] == len(values) - 1 else [len(values) - 1]
    shown = (v if type(v) is str else float(f"{v:.6g}") for v in (values[i] for i in kept))
    usual = 1.5 * np.median(np.diff(steps)) if len(steps) > 1 else 0
    gaps = [k for k, i in enumerate(kept[1:], 1) if steps[i] - steps[i - 1] > usual]
    return {"steps": [steps[i] for i in kept], "values": [*shown], "gaps": gaps}
