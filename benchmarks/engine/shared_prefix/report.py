"""From runs with and without shared prefixes to ratios, a table and a JSON object."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.engine.summary import GIB, Run, good, now, pairs, ratio, ratio_text

VARIANTS = ("shared", "unshared")
TOLERANCES = {"float32": 3e-4, "bfloat16": 0.5, "float16": 0.1}
"""Largest difference of log-probabilities that rounding explains, far from what a mask that is
wrong gives. In float32 the test suite holds 1e-5 on small models; deep ones round more."""

GRADIENT_TOLERANCE = 0.05


def case(
    runs: dict[str, list[Run]], tokens: int, agreement: dict[str, Any] | None
) -> dict[str, Any]:
    """One case's entry; ``tokens`` are those of all sequences, each counted for itself."""
    found = pairs(runs["shared"], runs["unshared"])
    return {
        "tokens": tokens,
        "variants": {name: _variant(of, tokens) for name, of in runs.items()},
        "ratio": {
            "tokens_per_second": ratio([sum(b["seconds"]) / sum(a["seconds"]) for a, b in found]),
            "peak_bytes": ratio([a["peak_bytes"] / b["peak_bytes"] for a, b in found]),
        }
        if found
        else None,
        "agreement": agreement,
    }


def build(
    *, settings: dict[str, Any], machine: dict[str, Any], cases: dict[str, Any]
) -> dict[str, Any]:
    """The JSON object. Ratios of a case whose variants disagree are taken out."""
    for entry in cases.values():
        agreement = entry["agreement"]
        if agreement is not None:
            agreement["agree"] = (
                agreement["logprobs"] <= TOLERANCES[settings["dtype"]]
                and agreement["grad_norms"] <= GRADIENT_TOLERANCE
            )
            entry["ratio"] = entry["ratio"] if agreement["agree"] else None
    return {"benchmark": "shared_prefix", "date": now(), **machine, **settings, "cases": cases}


def exit_status(result: dict[str, Any]) -> int:
    """1 if a variant broke, none has a number, or the variants disagree."""
    cases = result["cases"].values()
    variants = [variant for entry in cases for variant in entry["variants"].values()]
    broke = any(variant["status"] == "failed" for variant in variants)
    numbers = any(variant["tokens_per_second"] for variant in variants)
    disagree = any(entry["agreement"] and not entry["agreement"]["agree"] for entry in cases)
    return int(broke or not numbers or disagree)


def one_line(run: Run) -> str:
    """A word on a finished run."""
    if run["status"] != "ok":
        return f"{run['status']} ({run['error']})"
    return (
        f"{median(run['seconds']):.2f} s a step, {run['computed_tokens']:,} tokens computed, peak "
        f"{run['peak_bytes'] / GIB:.2f} GiB"
    )


def print_table(result: dict[str, Any], console: Console) -> None:
    """Prints cases, variants and ratios for people."""
    table = Table(title=f"Training on groups, {result['model']}, {result['dtype']}")
    table.add_column("case")
    table.add_column("prefixes")
    for title in ("tok/s", "step", "computed", "peak"):
        table.add_column(title, justify="right")
    for name, entry in result["cases"].items():
        for variant, of in entry["variants"].items():
            table.add_row(name, variant, *_cells(of))
    console.print(table)
    for name, entry in result["cases"].items():
        for line in _lines(name, entry):
            console.print(line, markup=False, soft_wrap=True)


def _cells(variant: dict[str, Any]) -> list[str]:
    if variant["tokens_per_second"] is None:
        return [variant["status"], *[""] * 3]
    return [
        f"{variant['tokens_per_second']:,.0f}",
        f"{variant['step_seconds']:.3g} s",
        f"{variant['computed_tokens']:,}",
        f"{variant['peak_bytes'] / GIB:.2f} GiB",
    ]


def _lines(name: str, entry: dict[str, Any]) -> list[str]:
    found, agreement = entry["ratio"], entry["agreement"]
    lines = [f"{name}: {entry['tokens']:,} tokens a step"]
    if found is not None:
        lines.append(
            f"  shared / unshared: {ratio_text(found['tokens_per_second'])} x tokens/s, "
            f"{found['peak_bytes']['median']:.2f} x peak memory"
        )
    if agreement is not None:
        word = "" if agreement["agree"] else "no ratio: the variants do not compute the same; "
        lines.append(
            f"  {word}differences of log-probabilities {agreement['logprobs']:.1e}; relative: "
            f"gradient norms {agreement['grad_norms']:.1e}, losses {agreement['losses']:.1e}"
        )
    for variant, of in entry["variants"].items():
        if of["error"]:
            lines.append(f"  {variant}: {of['status']}: {of['error']}")
    return lines


def _variant(runs: list[Run], tokens: int) -> dict[str, Any]:
    finished = good(runs)
    entry: dict[str, Any] = {
        "status": runs[-1]["status"],
        "error": runs[-1].get("error"),
        "tokens_per_second": None,
        "runs": runs,
    }
    if not finished:
        return entry
    seconds = median(median(run["seconds"]) for run in finished)
    return entry | {
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds,
        "computed_tokens": finished[0]["computed_tokens"],
        "peak_bytes": max(run["peak_bytes"] for run in finished),
    }
