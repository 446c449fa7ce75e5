"""What the reports of all benchmarks have in common."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

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


def ratios(found: Sequence[tuple[Run, Run]]) -> dict[str, Any]:
    """Of the time of a step and the peak of memory, for pairs of runs."""
    return {
        "step_seconds": ratio([step_seconds(a) / step_seconds(b) for a, b in found]),
        "peak_bytes": ratio([a["peak_bytes"] / b["peak_bytes"] for a, b in found]),
    }


def step_seconds(run: Run) -> float:
    """Median time of a step."""
    return after_first(run["seconds"])


def after_first(values: Sequence[float]) -> float:
    """Median of all but the first, in which things are warming up."""
    return median(values[1:])


def outcome(runs: Sequence[Run]) -> dict[str, Any]:
    """How a variant's runs ended, and what they took if they did."""
    finished = good(runs)
    return {
        "status": runs[-1]["status"],
        "error": runs[-1].get("error"),
        "step_seconds": median(map(step_seconds, finished)) if finished else None,
        "peak_bytes": max((run["peak_bytes"] for run in finished), default=None),
        "notes": finished[0]["notes"] if finished else [],
        "runs": list(runs),
    }


def exit_status(result: dict[str, Any]) -> int:
    """1 if a variant broke or none has figures; want of memory is a result."""
    variants = result["variants"].values()
    broke = any(variant["status"] == "failed" for variant in variants)
    return int(broke or not any(variant["step_seconds"] for variant in variants))


def one_line(run: Run, learned: Callable[[Run], str]) -> str:
    """A word on a finished run: what it took, and what was ``learned`` if it came to an end."""
    if run["status"] != "ok":
        return f"{run['status']} ({run['error']})"
    took = f"{step_seconds(run):.2f} s a step, peak {run['peak_bytes'] / GIB:.2f} GiB"
    return f"{took}, {learned(run)}"


def print_sides(
    result: dict[str, Any],
    title: str,
    columns: Sequence[str],
    cells: Callable[[dict[str, Any]], list[str]],
    lines: Sequence[str],
    console: Console,
) -> None:
    """Prints a row for each variant, ``cells`` of those that have figures, and ``lines`` below."""
    table = Table(title=f"{title}, {result['model_name']}, {result['dtype']}")
    table.add_column("variant")
    for name in columns:
        table.add_column(name, justify="right")
    for name, variant in result["variants"].items():
        lost = variant["step_seconds"] is None
        empty = [variant["status"], *[""] * (len(columns) - 1)]
        table.add_row(name, *(empty if lost else cells(variant)))
    console.print(table)
    for line in [*lines, *closing_lines(result)]:
        console.print(line, markup=False, soft_wrap=True)


def closing_lines(result: dict[str, Any]) -> list[str]:
    """The ratio of both sides, and what is to be known of each."""
    lines = []
    if result["ratio"] is not None:
        seconds, memory = result["ratio"]["step_seconds"], result["ratio"]["peak_bytes"]
        lines.append(
            f"ours / TRL: {ratio_text(seconds)} x the time of a step, {ratio_text(memory)} x the "
            "peak memory"
        )
    for name, variant in result["variants"].items():
        lines += [f"{name}: {note}" for note in variant["notes"]]
        if variant["error"]:
            lines.append(f"{name}: {variant['status']}: {variant['error']}")
    return lines + result["notes"]


def deliver(result: dict[str, Any], output: str | None, console: Console) -> None:
    """Prints the JSON object as the last line, and writes it to ``output``."""
    if output is not None:
        text = json.dumps(result, indent=2) + "\n"
        Path(output).expanduser().write_text(text, encoding="utf-8")
    console.file.flush()
    print(json.dumps(result), flush=True)
