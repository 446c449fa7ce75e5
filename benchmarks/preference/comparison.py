"""One step of direct preference optimisation, compared with TRL's DPOTrainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness import Outcome
from benchmarks.preference.config import Config
from benchmarks.preference.trl_side import read_pairs
from benchmarks.report import pairs
from benchmarks.trl_comparison import Comparison, run_comparison
from tinker_cookbook.hyperparam_utils import get_lr


def _loss_difference(result: dict[str, Any]) -> dict[str, float | None]:
    # The largest relative difference of both sides' losses at the same step.
    sides = [result["variants"].get(name, {"runs": []})["runs"] for name in ("ours", "trl")]
    differences = [
        abs(a - b) / abs(b)
        for ours, trl in pairs(*sides)
        for a, b in zip(ours["losses"], trl["losses"], strict=True)
    ]
    return {"loss_difference": max(differences, default=None)}


def _figures(finished: Sequence[Outcome]) -> dict[str, Any]:
    losses = finished[0]["losses"]
    return {"first_loss": losses[0], "last_loss": losses[-1]}


def _lines(result: dict[str, Any]) -> list[str]:
    lines = [
        f"{result['batch_size']} pairs up to {result['max_length']} tokens, {result['steps']} "
        "steps; seconds are the median without the first step"
    ]
    if result["loss_difference"] is not None:
        lines.append(f"losses differ by at most {result['loss_difference']:.2%} at any step")
    return lines


COMPARISON = Comparison(
    name="dpo",
    title="DPO",
    modules={"ours": "benchmarks.preference.ours", "trl": "benchmarks.preference.trl_side"},
    columns={
        "first loss": lambda entry: f"{entry['first_loss']:.4f}",
        "last loss": lambda entry: f"{entry['last_loss']:.4f}",
    },
    figures=_figures,
    describe=lambda run: f"loss {run['losses'][0]:.4f} to {run['losses'][-1]:.4f}",
    lines=_lines,
    learning_rate=lambda model: 0.1 * get_lr(model),
    check=read_pairs,
    extras=_loss_difference,
)


def run_benchmark(config: Config) -> int:
    """Measures and prints; returns the exit status."""
    return run_comparison(config, COMPARISON)
