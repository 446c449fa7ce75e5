"""Reads the runs of a sweep into a pandas table."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_cookbook.run.jsonl import read_rows
from tinker_cookbook.utils.imports import missing_extra

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)

_COMPLETE = 0.98
"""Value of the metric ``progress`` from which a run counts as complete."""


def collect(
    sweep_dir: str | Path, *, config_keys: list[str] | None = None, require_complete: bool = True
) -> pd.DataFrame:
    """Returns one row for each run: settings, last metrics, and ``log_path``.

    Args:
        sweep_dir: Folder with a log folder for each run.
        config_keys: Settings to include, nested ones with points; default: all plain values.
        require_complete: Skip runs with ``progress`` below 0.98.

    Raises:
        FileNotFoundError: There is no such folder.
        ConfigurationError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise missing_extra("tables of sweeps", error, "plot") from error
    folder = Path(sweep_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"sweep_dir: got {folder}, which is not a folder")
    rows: list[dict[str, Any]] = []
    for run in sorted(path for path in folder.iterdir() if path.is_dir()):
        logged = read_rows(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else []
        # Evaluations and training log different metrics, so the last value of each is taken.
        metrics: dict[str, Any] = {}
        for row in logged:
            metrics.update(row)
        if not metrics:
            logger.warning("%s is left out: it has no metrics", run.name)
        elif require_complete and metrics.get("progress", 1) < _COMPLETE:
            logger.warning("%s is left out: progress %.2f", run.name, metrics["progress"])
        else:
            path = run / "config.json"
            config = json.loads(path.read_bytes()) if path.is_file() else {}
            numbers = {k: v for k, v in metrics.items() if isinstance(v, (int, float))}
            rows.append({**numbers, **_settings(config, config_keys), "log_path": str(run)})
    return pd.DataFrame(rows)


def _settings(config: Mapping[str, Any], keys: list[str] | None) -> dict[str, Any]:
    if keys is None:
        return {k: v for k, v in config.items() if isinstance(v, (str, int, float, bool))}

    def step(value: Any, name: str) -> Any:
        return value.get(name) if isinstance(value, Mapping) else None

    return {key.rpartition(".")[2]: reduce(step, key.split("."), config) for key in keys}
