"""The report of all benchmarks: ratios of paired runs, a table for people, a JSON object."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness import Outcome

GIB = float(1 << 30)
_BUSY = 0.05


def now() -> str:
    """Returns the UTC time in ISO format."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def good(runs: Sequence[Outcome]) -> list[Outcome]:
    """Returns the runs that finished."""
    return [run for run in runs if run["status"] == "ok"]


def pairs(first: Sequence[Outcome], second: Sequence[Outcome]) -> list[tuple[Outcome, Outcome]]:
    """Returns (first, second) of each repeat in which both finished: neighbours in time."""
    together = zip(first, second, strict=False)
    return [pair for pair in together if all(run["status"] == "ok" for run in pair)]


def ratio(values: Sequence[float]) -> dict[str, Any]:
    """Returns the ratio of each pair and their median."""
    return {"pairs": list(values), "median": median(values)}


def ratio_text(found: dict[str, Any]) -> str:
    """Returns text such as ``2.35 (2.30, 2.40)``."""
    return f"{found['median']:.2f} ({', '.join(f'{pair:.2f}' for pair in found['pairs'])})"


def speed_ratios(
    found: Sequence[tuple[Outcome, Outcome]], seconds: Callable[[Outcome], float]
) -> dict[str, Any] | None:
    """Returns the ratios of tokens/s and of peak memory, first / second, or None without pairs.

    Both sides of a pair process the same tokens, so the ratio of speeds is that of ``seconds``.
    """
    if not found:
        return None
    ratios = {
        "tokens_per_second": ratio([seconds(b) / seconds(a) for a, b in found]),
        "peak_bytes": ratio([a["peak_bytes"] / b["peak_bytes"] for a, b in found]),
    }
    if all(run.get("cpu_seconds") for pair in found for run in pair):
        processor = [sum(a["cpu_seconds"]) / sum(b["cpu_seconds"]) for a, b in found]
        ratios["cpu_seconds"] = ratio(processor)
    return ratios


def speed_ratio_line(first: str, second: str, found: dict[str, Any]) -> str:
    """Returns a line on the result of :func:`speed_ratios`."""
    line = (
        f"{first} / {second}: {ratio_text(found['tokens_per_second'])} x tokens/s, "
        f"{found['peak_bytes']['median']:.2f} x peak memory"
    )
    processor = found.get("cpu_seconds")
    return line if processor is None else f"{line}, {ratio_text(processor)} x processor time"


def best_ceilings(measured: Sequence[Outcome]) -> dict[str, Any] | None:
    """Returns the best of several measurements of the machine's rates."""
    if not (finished := good(measured)):
        return None
    best = {name: max(run[name] for run in finished) for name in ("flops", "bandwidth")}
    return best | {"method": finished[0]["method"]}


def busy_line(runs: Iterable[Outcome]) -> str:
    """Returns a line on what else the machine did during ``runs``, so that readers can judge."""
    seen = [run for run in runs if "others" in run]
    if not seen:
        return "what else the machine did is not known here"
    others, steal = (max(run[name] for run in seen) for name in ("others", "steal"))
    middle = median(run["others"] for run in seen)
    busy = others > _BUSY or steal > _BUSY
    return (
        f"{'THE MACHINE WAS BUSY, so distrust the figures' if busy else 'the machine was idle'}: "
        f"other processes took {middle:.0%} of the processors (median of the parts; at most "
        f"{others:.0%}), a hypervisor at most {steal:.0%}"
    )


def outcome_line(run: Outcome, describe: Callable[[Outcome], str]) -> str:
    """Returns ``describe`` of a run that finished with its peak memory, else why it did not."""
    if run["status"] != "ok":
        return f"{run['status']} ({run['error']})"
    return f"{describe(run)}, peak {run['peak_bytes'] / GIB:.2f} GiB"


def variant_entry(runs: Sequence[Outcome], measure: str) -> dict[str, Any]:
    """Returns the entry of a variant: how its last run ended, and all runs.

    ``measure`` is the figure that is None until a caller sets it, if no run finished.
    """
    finished = good(runs)
    peaks = [run["peak_bytes"] for run in finished]
    return {
        "status": runs[-1]["status"],
        "error": runs[-1].get("error"),
        measure: None,
        "peak_bytes": max(peaks, default=None),
        "notes": finished[0].get("notes", []) if finished else [],
        "runs": list(runs),
    }


def exit_status(variants: Iterable[Mapping[str, Any]], measure: str, agree: bool = True) -> int:
    """Returns 1 if a variant failed, none has a figure, or they disagree, else 0.

    Running out of memory is a result, not a failure.
    """
    entries = list(variants)
    failed = any(entry["status"] == "failed" for entry in entries)
    return int(failed or not any(entry[measure] for entry in entries) or not agree)


def error_lines(variants: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the notes and errors of all variants, one a line."""
    lines = []
    for name, entry in variants.items():
        lines += [f"{name}: {note}" for note in entry.get("notes", [])]
        if entry["error"]:
            lines.append(f"{name}: {entry['status']}: {entry['error']}")
    return lines


def print_report(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    lines: Iterable[str],
    console: Console,
    left: int = 1,
) -> None:
    """Prints a table, whose first ``left`` columns are text, and lines below it.

    A row that is shorter than the columns is filled up.
    """
    table = Table(title=title, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for position, name in enumerate(columns):
        is_text = position < left
        table.add_column(name, justify="left" if is_text else "right", no_wrap=is_text)
    for row in rows:
        table.add_row(*row, *[""] * (len(columns) - len(row)))
    console.print(table)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def deliver(result: dict[str, Any], output: str | None, console: Console) -> None:
    """Prints the JSON object as the last line, and writes it to ``output``."""
    if output is not None:
        text = json.dumps(result, indent=2) + "\n"
        Path(output).expanduser().write_text(text, encoding="utf-8")
    console.file.flush()
    print(json.dumps(result), flush=True)
