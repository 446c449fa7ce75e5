"""What the reports of all benchmarks have in common."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

GIB = float(1 << 30)

Run = dict[str, Any]


def now() -> str:
    """UTC time in ISO format."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def good(runs: Sequence[Run]) -> list[Run]:
    """Those that came to an end."""
    return [run for run in runs if run["status"] == "ok"]


def pairs(first: Sequence[Run], second: Sequence[Run]) -> list[tuple[Run, Run]]:
    """(first, second) of each repeat in which both have a result: neighbours in time."""
    together = zip(first, second, strict=False)
    return [pair for pair in together if all(run["status"] == "ok" for run in pair)]


def ratio(values: Sequence[float]) -> dict[str, Any]:
    """The ratio of each pair and their median."""
    return {"pairs": list(values), "median": median(values)}


def ratio_text(found: dict[str, Any]) -> str:
    """``2.35 (2.30, 2.40)``."""
    return f"{found['median']:.2f} ({', '.join(f'{pair:.2f}' for pair in found['pairs'])})"


def deliver(result: dict[str, Any], output: str | None, console: Console) -> None:
    """Prints the JSON object as the last line, and writes it to ``output``."""
    if output is not None:
        text = json.dumps(result, indent=2) + "\n"
        Path(output).expanduser().write_text(text, encoding="utf-8")
    console.file.flush()
    print(json.dumps(result), flush=True)
