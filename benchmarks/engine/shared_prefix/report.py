"""Builds the report of the benchmark of shared prefixes."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.harness import Outcome
from benchmarks.report import GIB, good

VARIANTS = ("shared", "unshared")
TOLERANCES = {"float32": 3e-4, "bfloat16": 0.5, "float16": 0.1}
"""Largest difference of log-probabilities from rounding, far below that of a wrong mask. In float32
the tests allow 1e-5 on small models; deep ones round more."""

GRADIENT_TOLERANCE = 0.05
_COLUMNS = ("case", "prefixes", "tok/s", "step", "computed", "peak")


def case(
    runs: dict[str, list[Outcome]], tokens: int, agreement: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns the entry of a case; ``tokens`` counts the tokens of every sequence."""
    found = report.pairs(runs["shared"], runs["unshared"])
    return {
        "tokens": tokens,
        "variants": {name: _variant(of, tokens) for name, of in runs.items()},
        "ratio": report.speed_ratios(found, lambda run: sum(run["seconds"])),
        "agreement": agreement,
    }


def build(
    *, settings: dict[str, Any], machine: dict[str, Any], cases: dict[str, Any]
) -> dict[str, Any]:
    """Returns the JSON object, without ratios of cases whose variants disagree."""
    for entry in cases.values():
        agreement = entry["agreement"]
        if agreement is not None:
            agreement["agree"] = (
                agreement["logprobs"] <= TOLERANCES[settings["dtype"]]
                and agreement["grad_norms"] <= GRADIENT_TOLERANCE
            )
            entry["ratio"] = entry["ratio"] if agreement["agree"] else None
    return {
        "benchmark": "shared_prefix",
        "date": report.now(),
        **machine,
        **settings,
        "cases": cases,
    }


def exit_status(result: dict[str, Any]) -> int:
    """Returns 1 if a variant failed, none has a figure, or the variants disagree."""
    cases = result["cases"].values()
    variants = [variant for entry in cases for variant in entry["variants"].values()]
    agree = all(not entry["agreement"] or entry["agreement"]["agree"] for entry in cases)
    return report.exit_status(variants, "tokens_per_second", agree)


def one_line(run: Outcome) -> str:
    """Returns a line on a run."""
    return report.outcome_line(
        run,
        lambda run: (
            f"{median(run['seconds']):.2f} s a step, {run['computed_tokens']:,} tokens computed"
        ),
    )


def print_table(result: dict[str, Any], console: Console) -> None:
    """Prints cases, variants and ratios."""
    cases = result["cases"]
    rows = [
        [name, variant, *_cells(of)]
        for name, entry in cases.items()
        for variant, of in entry["variants"].items()
    ]
    lines = [line for name, entry in cases.items() for line in _lines(name, entry)]
    title = f"Training on groups, {result['model']}, {result['dtype']}"
    report.print_report(title, _COLUMNS, rows, lines, console, left=2)


def _cells(variant: dict[str, Any]) -> list[str]:
    if variant["tokens_per_second"] is None:
        return [variant["status"]]
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
        lines.append("  " + report.speed_ratio_line("shared", "unshared", found))
    if agreement is not None:
        prefix = "" if agreement["agree"] else "no ratio: the variants do not compute the same; "
        lines.append(
            f"  {prefix}differences of log-probabilities {agreement['logprobs']:.1e}; relative: "
            f"gradient norms {agreement['grad_norms']:.1e}, losses {agreement['losses']:.1e}"
        )
    return [*lines, *(f"  {line}" for line in report.error_lines(entry["variants"]))]


def _variant(runs: list[Outcome], tokens: int) -> dict[str, Any]:
    entry, finished = report.variant_entry(runs, "tokens_per_second"), good(runs)
    if not finished:
        return entry
    seconds = median(median(run["seconds"]) for run in finished)
    return entry | {
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds,
        "computed_tokens": finished[0]["computed_tokens"],
    }
