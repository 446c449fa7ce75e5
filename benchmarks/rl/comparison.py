"""One step of reinforcement learning, compared with TRL's GRPOTrainer."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import mean, median, stdev
from typing import Any

from benchmarks.harness import Outcome
from benchmarks.report import pairs
from benchmarks.rl.config import Config
from benchmarks.trl_comparison import Comparison, after_first, run_comparison
from tinker_cookbook.hyperparam_utils import get_lr

_LAST = 5


def figures(finished: Sequence[Outcome]) -> dict[str, Any]:
    """Returns the times of a step's parts, and the first and the last rewards."""
    return {
        "part_seconds": {
            name: median(after_first(run["parts"][name]) for run in finished)
            for name in finished[0]["parts"]
        },
        "first_reward": mean(run["rewards"][0] for run in finished),
        "last_rewards": mean(mean(run["rewards"][-_LAST:]) for run in finished),
    }


def reward_differences(result: dict[str, Any]) -> dict[str, Any]:
    """Returns the mean over pairs of our reward less TRL's, and its standard error, for parts of
    the run. Before the first update both sides sample from the same weights."""
    sides = [result["variants"].get(name, {"runs": []})["runs"] for name in ("ours", "trl")]
    found = pairs(*sides)
    if len(found) < 2:
        return {"reward_differences": None}
    parts = {
        "first step": slice(1),
        "all steps": slice(None),
        "last third": slice(2 * result["steps"] // 3, None),
    }
    differences = {}
    for name, part in parts.items():
        values = [mean(ours["rewards"][part]) - mean(trl["rewards"][part]) for ours, trl in found]
        error = stdev(values) / sqrt(len(values))
        differences[name] = {"seeds": len(values), "mean": mean(values), "standard_error": error}
    return {"reward_differences": differences}


def _part(entry: dict[str, Any], name: str) -> str:
    seconds = entry["part_seconds"].get(name)
    return "" if seconds is None else f"{seconds:.2f} s"


def _lines(result: dict[str, Any]) -> list[str]:
    lines = [
        f"{result['groups_per_batch']} problems x {result['group_size']} samples x "
        f"{result['max_tokens']} tokens, {result['steps']} steps; seconds are the median without "
        f"the first step, last rewards the mean of {min(_LAST, result['steps'])} steps"
    ]
    if differences := result["reward_differences"]:
        texts = [
            f"{name} {found['mean']:+.3f} (standard error {found['standard_error']:.3f})"
            for name, found in differences.items()
        ]
        seeds = differences["all steps"]["seeds"]
        lines.append(f"reward, ours - TRL, over {seeds} seeds: {', '.join(texts)}")
    return lines


COMPARISON = Comparison(
    name="rl",
    title="RL",
    modules={"ours": "benchmarks.rl.ours", "trl": "benchmarks.rl.trl_side"},
    columns={
        "sampling": lambda entry: _part(entry, "sampling"),
        "training": lambda entry: _part(entry, "training"),
        "first reward": lambda entry: f"{entry['first_reward']:.3f}",
        "last rewards": lambda entry: f"{entry['last_rewards']:.3f}",
    },
    figures=figures,
    describe=lambda run: f"reward {run['rewards'][0]:.3f} to {run['rewards'][-1]:.3f}",
    lines=_lines,
    learning_rate=lambda model: 0.25 * get_lr(model),
    extras=reward_differences,
)


def run_benchmark(config: Config) -> int:
    """Measures and prints; returns the exit status."""
    return run_comparison(config, COMPARISON)
