"""Tokens a second that are aimed at, and how a result compares with them."""

from __future__ import annotations

from typing import Any

GOALS = {"shape:qwen3-0.6b": 50_000, "shape:qwen3-4b": 16_000, "shape:qwen3-8b": 9_000}
"""Of the engine on one H100: LoRA of rank 32, rows of 8,192 tokens."""


def goal_line(result: dict[str, Any]) -> str:
    """Returns a line on a result of ``benchmarks.engine``: speeds, ratio, repeats and the goal."""
    speeds = {
        name: entry["tokens_per_second"]
        for name, entry in result["variants"].items()
        if entry["tokens_per_second"] is not None
    }
    parts = [f"{name} {speed:,.0f} tok/s" for name, speed in speeds.items()]
    for reference, found in (result["ratios"] or {}).items():
        parts.append(f"engine / {reference} {found['tokens_per_second']['median']:.2f}")
    notes = [note for run in result["variants"].get("engine", {}).get("runs", ())
             for note in run.get("notes", ())]  # fmt: skip
    parts += notes[-1:]
    parts.append(_goal(result, speeds.get("engine")))
    return f"{result['model']}: {'; '.join(parts)}"


def _goal(result: dict[str, Any], speed: float | None) -> str:
    goal = GOALS.get(result["model"])
    if goal is None:
        return "no goal for this model"
    if "H100" not in (result["gpu"] or ""):
        return f"goal {goal:,} tok/s is for an H100"
    if speed is None:
        return f"goal {goal:,} tok/s: no figure"
    return f"goal {goal:,} tok/s: {'reached' if speed >= goal else 'missed'}"
