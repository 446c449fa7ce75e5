"""The best published tokens/s, which are the goals, and how a result compares with them."""

from __future__ import annotations

from typing import Any

RANK, ROW_TOKENS = 16, 2048
PUBLISHED = {
    "shape:qwen3-0.6b": 62_000,
    "shape:qwen3-1.7b": 37_500,
    "shape:qwen3-4b": 17_500,
    "shape:qwen3-8b": 11_600,
    "shape:qwen3-14b": 6_800,
}
"""Surogate in BF16 on an H100 SXM: LoRA of ``RANK`` on seven matrices of a layer, rows packed to
``ROW_TOKENS``, 2 x 4 rows a step. Its repository (invergent-ai/surogate) has the table in
``docs/docs/reference/benchmarks.md`` at a9b33fdc, 2026-02-13; its table of 2026-05-15 is lower."""


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
    goal = PUBLISHED.get(result["model"])
    if goal is None:
        return "no published figure for this model"
    published = f"Surogate has published {goal:,} tok/s"
    same = (result["rank"], result["data"]) == (RANK, f"random:{ROW_TOKENS}-{ROW_TOKENS}")
    if not same or result["dtype"] != "bfloat16":
        return f"{published} for rank={RANK} row_tokens={ROW_TOKENS} dtype=bfloat16"
    if "H100" not in (result["gpu"] or ""):
        return f"{published} for an H100"
    if speed is None:
        return f"{published}: no figure"
    return f"{published}: {'reached' if speed >= goal else 'missed'}"
