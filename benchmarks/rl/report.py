"""From both sides' runs to ratios, a table and a JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from rich.console import Console

from benchmarks.engine.summary import (
    GIB,
    Run,
    after_first,
    good,
    now,
    outcome,
    pairs,
    print_sides,
    ratios,
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


def learned(run: Run) -> str:
    """First and last mean reward of a run."""
    return f"reward {run['rewards'][0]:.3f} to {run['rewards'][-1]:.3f}"


def print_table(result: dict[str, Any], console: Console) -> None:
    """Prints both sides and their ratio for people."""
    columns = ("step", "sampling", "training", "peak", "first reward", "last rewards")
    last = min(_LAST, result["steps"])
    line = (
        f"{result['groups_per_batch']} problems x {result['group_size']} samples x "
        f"{result['max_tokens']} tokens, {result['steps']} steps; seconds are the median without "
        f"the first step, last rewards the mean of {last} steps"
    )
    print_sides(result, "RL", columns, _cells, [line], console)


def _cells(variant: dict[str, Any]) -> list[str]:
    parts = [variant["part_seconds"].get(name) for name in ("sampling", "training")]
    return [
        f"{variant['step_seconds']:.2f} s",
        *("" if seconds is None else f"{seconds:.2f} s" for seconds in parts),
        f"{variant['peak_bytes'] / GIB:.2f} GiB",
        f"{variant['first_reward']:.3f}",
        f"{variant['last_rewards']:.3f}",
    ]


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
