"""From both sides' runs to ratios, a table and a JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from tinker_cookbook.engine.bench.summary import (
    GIB,
    Run,
    after_first,
    closing_lines,
    good,
    now,
    outcome,
    pairs,
    ratios,
    step_seconds,
)

_LAST = 5


def build(
    settings: dict[str, Any],
    machine: dict[str, Any],
    runs: Mapping[str, list[Run]],
    notes: Sequence[str],
) -> dict[str, Any]:
    """The JSON object. Times are those of the steps after the first."""
    found = pairs(runs.get("ours", []), runs.get("trl", []))
    return {
        "benchmark": "rl",
        "date": now(),
        **machine,
        **settings,
        "variants": {name: _variant(of) for name, of in runs.items()},
        "ratio": ratios(found) if found else None,
        "notes": list(notes),
    }


def one_line(run: Run) -> str:
    """A word on a finished run."""
    if run["status"] != "ok":
        return f"{run['status']} ({run['error']})"
    return (
        f"{step_seconds(run):.2f} s a step, peak {run['peak_bytes'] / GIB:.2f} GiB, reward "
        f"{run['rewards'][0]:.3f} to {run['rewards'][-1]:.3f}"
    )


def print_table(result: dict[str, Any], console: Console) -> None:
    """Prints both sides and their ratio for people."""
    title = f"RL, {result['model_name']}, {result['dtype']}"
    table = Table(title=title)
    table.add_column("variant")
    for name in ("step", "sampling", "training", "peak", "first reward", "last rewards"):
        table.add_column(name, justify="right")
    for name, variant in result["variants"].items():
        table.add_row(name, *_cells(variant))
    console.print(table)
    for line in _lines(result):
        console.print(line, markup=False, soft_wrap=True)


def _cells(variant: dict[str, Any]) -> list[str]:
    if variant["step_seconds"] is None:
        return [variant["status"], *[""] * 5]
    parts = [variant["part_seconds"].get(name) for name in ("sampling", "training")]
    return [
        f"{variant['step_seconds']:.2f} s",
        *("" if seconds is None else f"{seconds:.2f} s" for seconds in parts),
        f"{variant['peak_bytes'] / GIB:.2f} GiB",
        f"{variant['first_reward']:.3f}",
        f"{variant['last_rewards']:.3f}",
    ]


def _lines(result: dict[str, Any]) -> list[str]:
    last = min(_LAST, result["steps"])
    lines = [
        f"{result['groups_per_batch']} problems x {result['group_size']} samples x "
        f"{result['max_tokens']} tokens, {result['steps']} steps; seconds are the median without "
        f"the first step, last rewards the mean of {last} steps"
    ]
    return lines + closing_lines(result)


def _variant(runs: Sequence[Run]) -> dict[str, Any]:
    finished, entry = good(runs), outcome(runs)
    if not finished:
        return entry
    return entry | {
        "part_seconds": {
            name: median(after_first(run["parts"][name]) for run in finished)
            for name in finished[0]["parts"]
        },
        "first_reward": mean(run["rewards"][0] for run in finished),
        "last_rewards": mean(mean(run["rewards"][-_LAST:]) for run in finished),
    }
