"""Builds the report of the training benchmark: ratios, table and JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks import report
from benchmarks.engine.config import REFERENCES
from benchmarks.engine.conversations import Conversation
from benchmarks.engine.flops import ModelSize
from benchmarks.harness import Outcome
from benchmarks.report import GIB, good

LOSS_TOLERANCE = 0.01
_COLUMNS = ("variant", "tok/s", "trained tok/s", "step", "peak", "loaded", "of ceiling")


def build(
    *,
    settings: dict[str, Any],
    machine: dict[str, Any],
    size: ModelSize,
    timed: Sequence[Conversation],
    runs: dict[str, list[Outcome]],
    ceilings: Sequence[Outcome],
    notes: Sequence[str],
) -> dict[str, Any]:
    """Returns the JSON object; ``timed`` are the conversations of the timed steps, in order."""
    work = _workload(settings, size, timed)
    ceiling = _ceiling(ceilings, work)
    agreement = _agreement(runs)
    withheld = _why_withheld(agreement, runs)
    return {
        "benchmark": "training",
        "date": report.now(),
        **machine,
        **settings,
        "model_parameters": size.total,
        "workload": work,
        "ceilings": ceiling,
        "variants": {name: _variant(found, work, ceiling) for name, found in runs.items()},
        "agreement": agreement,
        "ratios": None
        if withheld
        else {
            reference: report.speed_ratios(found, lambda run: sum(run["seconds"]))
            for reference in REFERENCES
            if (found := _pairs(runs, reference))
        },
        "ratios_withheld": withheld,
        "notes": list(notes),
        "busy": report.busy_line([*ceilings, *(run for found in runs.values() for run in found)]),
    }


def exit_status(result: dict[str, Any]) -> int:
    """Returns 1 if a variant failed, none has a figure, or the losses differ."""
    agree = result["agreement"]["agree"]
    return report.exit_status(result["variants"].values(), "tokens_per_second", agree)


def one_line(run: Outcome, tokens: int) -> str:
    """Returns a line on a run."""
    return report.outcome_line(run, lambda run: f"{tokens / sum(run['seconds']):,.0f} tok/s")


def print_table(result: dict[str, Any], console: Console) -> None:
    """Prints variants, ratios and ceilings."""
    work, ceilings, lengths = result["workload"], result["ceilings"], result["workload"]["lengths"]
    rows = [[name, *_cells(variant)] for name, variant in result["variants"].items()]
    lines = [
        f"{result['batch_size']} conversations a step of {lengths['min']} to {lengths['max']} "
        f"tokens (median {lengths['median']:g}), {work['trained_tokens'] / work['tokens']:.0%} of "
        f"them trained; {work['padding_share']:.0%} of a padded batch is padding"
    ]
    if ceilings is not None:
        rows.append(["ceiling", f"{ceilings['tokens_per_second']:,.0f}", *[""] * 4, "100%"])
        lines.append(
            f"the machine: {ceilings['flops'] / 1e9:,.0f} GFLOP/s, "
            f"{ceilings['bandwidth'] / 1e9:,.1f} GB/s by {ceilings['method']}; "
            f"{result['threads']} threads"
        )
    if result["ratios"] is None:
        lines.append(f"no ratio: {result['ratios_withheld']}")
    else:
        agreement = result["agreement"]
        for reference, found in result["ratios"].items():
            lines.append(report.speed_ratio_line("engine", reference, found))
        lines.append(
            f"losses: first batch differs by {agreement['first_batch']:.1e}, all steps by at most "
            f"{agreement['all_steps']:.1e} (relative)"
        )
    lines += [*result["notes"], *report.error_lines(result["variants"]), result["busy"]]
    title = f"LoRA training, {result['model']}, {result['dtype']}"
    report.print_report(title, _COLUMNS, rows, lines, console)


def _cells(variant: dict[str, Any]) -> list[str]:
    if variant["tokens_per_second"] is None:
        return [variant["status"]]
    share = variant["ceiling_share"]
    return [
        f"{variant['tokens_per_second']:,.0f}",
        f"{variant['trained_tokens_per_second']:,.0f}",
        f"{variant['step_seconds']:.3g} s",
        f"{variant['peak_bytes'] / GIB:.2f} GiB",
        f"{variant['loaded_bytes'] / GIB:.2f} GiB",
        "" if share is None else f"{share:.0%}",
    ]


def _workload(
    settings: dict[str, Any], size: ModelSize, timed: Sequence[Conversation]
) -> dict[str, Any]:
    lengths = [len(row.tokens) for row in timed]
    step = settings["batch_size"]
    batches = [lengths[start : start + step] for start in range(0, len(lengths), step)]
    trained = sum(int(row.trained.sum()) for row in timed)
    padded = sum(len(batch) * max(batch) for batch in batches)
    return {
        "tokens": sum(lengths),
        "trained_tokens": trained,
        "steps": len(batches),
        "padding_share": 1 - sum(lengths) / padded,
        "model_flops": size.flops(lengths, trained, settings["rank"]),
        "lengths": {
            "min": min(lengths),
            "median": float(np.median(lengths)),
            "mean": sum(lengths) / len(lengths),
            "max": max(lengths),
        },
    }


def _ceiling(measured: Sequence[Outcome], work: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the best measurements; ``tokens_per_second`` is this work at that rate."""
    best = report.best_ceilings(measured)
    if best is None:
        return None
    return best | {"tokens_per_second": work["tokens"] * best["flops"] / work["model_flops"]}


def _variant(
    found: Sequence[Outcome], work: dict[str, Any], ceiling: dict[str, Any] | None
) -> dict[str, Any]:
    entry, finished = report.variant_entry(found, "tokens_per_second"), good(found)
    if not finished:
        return entry
    seconds = median(sum(run["seconds"]) for run in finished)
    speed = work["tokens"] / seconds
    return entry | {
        "tokens_per_second": speed,
        "trained_tokens_per_second": work["trained_tokens"] / seconds,
        "step_seconds": seconds / work["steps"],
        "loaded_bytes": max(run["loaded_bytes"] for run in finished),
        "adapter_parameters": finished[0]["adapter_parameters"],
        "ceiling_share": None if ceiling is None else speed / ceiling["tokens_per_second"],
    }


def _pairs(runs: dict[str, list[Outcome]], reference: str) -> list[tuple[Outcome, Outcome]]:
    """Returns (engine, reference) of each repeat in which both finished."""
    return report.pairs(runs.get("engine", []), runs.get(reference, []))


def _agreement(runs: dict[str, list[Outcome]]) -> dict[str, Any]:
    """Returns the largest relative differences of losses, and whether the variants agree."""
    first, every, same_size = [0.0], [0.0], True
    for engine, plain in (pair for name in REFERENCES for pair in _pairs(runs, name)):
        first.append(_relative(engine["first_loss"], plain["first_loss"]))
        every += map(_relative, engine["losses"], plain["losses"])
        same_size = same_size and engine["adapter_parameters"] == plain["adapter_parameters"]
    agree = same_size and max(first) <= LOSS_TOLERANCE
    return {
        "agree": agree,
        "same_adapter_size": same_size,
        "first_batch": max(first),
        "all_steps": max(max(every), max(first)),
    }


def _relative(value: float, reference: float) -> float:
    difference = abs(value - reference) / max(abs(reference), 1e-12)
    return difference if np.isfinite(difference) else float("inf")


def _why_withheld(agreement: dict[str, Any], runs: dict[str, list[Outcome]]) -> str | None:
    if not agreement["same_adapter_size"]:
        return "the variants trained adapters of different sizes"
    if not agreement["agree"]:
        return (
            f"losses of the first batch differ by {agreement['first_batch']:.1%}, more than "
            f"{LOSS_TOLERANCE:.0%}, so the variants do not compute the same"
        )
    if "engine" not in runs or len(runs) < 2:
        return "a ratio needs the engine and a reference in variants="
    if any(_pairs(runs, name) for name in REFERENCES):
        return None
    return "no repeat has a result of both the engine and a reference"
