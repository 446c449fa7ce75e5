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
    good,
    now,
    pairs,
    ratio,
    ratio_text,
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
        "ratio": {
            "step_seconds": ratio([_step(ours) / _step(trl) for ours, trl in found]),
            "peak_bytes": ratio([ours["peak_bytes"] / trl["peak_bytes"] for ours, trl in found]),
        }
        if found
        else None,
        "notes": list(notes),
    }


def exit_status(result: dict[str, Any]) -> int:
    """1 if a variant broke or none has figures; want of memory is a result."""
    variants = result["variants"].values()
    broke = any(variant["status"] == "failed" for variant in variants)
    return int(broke or not any(variant["step_seconds"] for variant in variants))


def one_line(run: Run) -> str:
    """A word on a finished run."""
    if run["status"] != "ok":
        return f"{run['status']} ({run['error']})"
    return (
        f"{_step(run):.2f} s a step, peak {run['peak_bytes'] / GIB:.2f} GiB, reward "
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


def _variant(runs: Sequence[Run]) -> dict[str, Any]:
    finished = good(runs)
    entry: dict[str, Any] = {
        "status": runs[-1]["status"],
        "error": runs[-1].get("error"),
        "step_seconds": None,
        "notes": finished[0]["notes"] if finished else [],
        "runs": list(runs),
    }
    if not finished:
        return entry
    return entry | {
        "step_seconds": median(_step(run) for run in finished),
        "part_seconds": {
            name: median(_after_first(run["parts"][name]) for run in finished)
            for name in finished[0]["parts"]
        },
        "peak_bytes": max(run["peak_bytes"] for run in finished),
        "first_reward": mean(run["rewards"][0] for run in finished),
        "last_rewards": mean(mean(run["rewards"][-_LAST:]) for run in finished),
    }


def _step(run: Run) -> float:
    return _after_first(run["seconds"])


def _after_first(values: Sequence[float]) -> float:
    return median(values[1:])
