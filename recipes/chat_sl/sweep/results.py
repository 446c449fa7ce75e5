"""Reads the runs of a sweep into a pandas table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_cookbook.run.jsonl import read_rows
from tinker_cookbook.utils.imports import missing_extra

if TYPE_CHECKING:
    import pandas as pd


def collect(
    sweep_dir: str | Path, *, config_keys: list[str] | None = None, require_complete: bool = True
) -> pd.DataFrame:
    """Returns one row for each run that has metrics: settings, last metrics, and ``log_path``.

    Args:
        sweep_dir: Folder with a log folder for each run.
        config_keys: Settings to include, nested ones with points; default: all plain values.
        require_complete: Skip runs whose metric ``progress`` is below 0.98.

    Raises:
        ConfigurationError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise missing_extra("tables of sweeps", error, "plot") from error
    rows: list[dict[str, Any]] = []
    for file in sorted(Path(sweep_dir).glob("*/metrics.jsonl")):
        # Evaluations and training log different metrics, so the last value of each is taken.
        metrics: dict[str, Any] = {}
        for row in read_rows(file):
            metrics.update(row)
        if require_complete and metrics.get("progress", 1) < 0.98:
            continue
        config = json.loads(file.with_name("config.json").read_bytes())
        if config_keys is None:
            kept = {k: v for k, v in config.items() if isinstance(v, (str, int, float, bool))}
        else:
            flat = pd.json_normalize(config).to_dict("records")[0]
            kept = {key.rpartition(".")[2]: flat.get(key) for key in config_keys}
        numbers = {k: v for k, v in metrics.items() if isinstance(v, (int, float))}
        rows.append({**numbers, **kept, "log_path": str(file.parent)})
    return pd.DataFrame(rows)
