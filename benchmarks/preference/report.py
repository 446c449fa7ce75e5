"""From both sides' runs to ratios, a table and a JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from benchmarks.engine.summary import (
    GIB,
    Run,
    now,
    outcome,
    pairs,
    print_sides,
    ratios,
)


def build(
    settings: dict[str, Any],
    machine: dict[str, Any],
    runs: Mapping[str, list[Run]],
    notes: Sequence[str],
) -> dict[str, Any]:
    """The JSON object. Times are those of the steps after the first; ``loss_difference`` is the
    largest relative difference of the two sides' losses at the same step."""
    found = pairs(runs.get("ours", []), runs.get("trl", []))
    return {
        "benchmark": "dpo",
        "date": now(),
        **machine,
        **settings,
        "variants": {name: outcome(of) for name, of in runs.items()},
        "ratio": ratios(found) if found else None,
        "loss_difference": max((_difference(*pair) for pair in found), default=None),
        "notes": list(notes),
    }


def learned(run: Run) -> str:
    """First and last loss of a run."""
    return f"loss {run['losses'][0]:.4f} to {run['losses'][-1]:.4f}"


def print_table(result: dict[str, Any], console: Console) -> None:
    """Prints both sides and their ratio for people."""
    lines = [
        f"{result['batch_size']} pairs up to {result['max_length']} tokens, {result['steps']} "
        "steps; seconds are the median without the first step"
    ]
    if result["loss_difference"] is not None:
        lines.append(f"losses differ by at most {result['loss_difference']:.2%} at any step")
    columns = ("step", "peak", "first loss", "last loss")
    print_sides(result, "DPO", columns, _cells, lines, console)


def _cells(variant: dict[str, Any]) -> list[str]:
    losses = variant["runs"][0]["losses"]
    return [
        f"{variant['step_seconds']:.2f} s",
        f"{variant['peak_bytes'] / GIB:.2f} GiB",
        f"{losses[0]:.4f}",
        f"{losses[-1]:.4f}",
    ]


def _difference(ours: Run, trl: Run) -> float:
    together = zip(ours["losses"], trl["losses"], strict=True)
    return max(abs(a - b) / abs(b) for a, b in together)
