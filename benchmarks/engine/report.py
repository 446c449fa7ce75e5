"""From measurements to ratios, a table for people and an object for machines."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.engine.config import REFERENCES
from benchmarks.engine.conversations import Conversation
from benchmarks.engine.flops import ModelSize
from benchmarks.engine.summary import GIB, Run, good, now, pairs, ratio, ratio_text

LOSS_TOLERANCE = 0.01


def build(
    *,
    settings: dict[str, Any],
    machine: dict[str, Any],
    size: ModelSize,
    timed: Sequence[Conversation],
    runs: dict[str, list[Run]],
    ceilings: Sequence[Run],
    notes: Sequence[str],
) -> dict[str, Any]:
    """The JSON object. ``timed`` are the conversations of the timed steps, in order."""
    work = _workload(settings, size, timed)
    ceiling = _ceiling(ceilings, work)
    agreement = _agreement(runs)
    withheld = _why_withheld(agreement, runs)
    return {
        "benchmark": "training",
        "date": now(),
        **machine,
        **settings,
        "model_parameters": size.total,
        "workload": work,
        "ceilings": ceiling,
        "variants": {name: _variant(found, work, ceiling) for name, found in runs.items()},
        "agreement": agreement,
        "ratios": None if withheld else _ratios(runs),
        "ratios_withheld": withheld,
        "notes": list(notes),
    }


def exit_status(result: dict[str, Any]) -> int:
    """1 if a variant broke, none has a number, or the losses differ; want of memory is a result."""
    variants = result["variants"].values()
    broke = any(variant["status"] == "failed" for variant in variants)
    numbers = any(variant["tokens_per_second"] for variant in variants)
    return int(broke or not numbers or not result["agreement"]["agree"])


def one_line(run: Run, tokens: int) -> str:
    """A word on a finished run."""
    if run["status"] != "ok":
        return f"{run['status']} ({run['error']})"
    speed = tokens / sum(run["seconds"])
    return f"{speed:,.0f} tok/s, peak {run['peak_bytes'] / GIB:.2f} GiB"


def print_table(result: dict[str, Any], console: Console) -> None:
    """Prints variants, ratios and ceilings for people."""
    work, ceilings = result["workload"], result["ceilings"]
    table = Table(title=f"LoRA training, {result['model']}, {result['dtype']}")
    table.add_column("variant")
    for title in ("tok/s", "trained tok/s", "step", "peak", "loaded", "of ceiling"):
        table.add_column(title, justify="right")
    for name, variant in result["variants"].items():
        table.add_row(name, *_cells(variant))
    if ceilings is not None:
        table.add_row("ceiling", f"{ceilings['tokens_per_second']:,.0f}", *[""] * 4, "100%")
    console.print(table)
    lengths = work["lengths"]
    lines = [
        f"{result['batch_size']} conversations a step of {lengths['min']} to {lengths['max']} "
        f"tokens (median {lengths['median']:g}), {work['trained_tokens'] / work['tokens']:.0%} of "
        f"them trained; {work['padding_share']:.0%} of a padded batch is padding"
    ]
    if ceilings is not None:
        lines.append(
            f"the machine: {ceilings['matmul_flops'] / 1e9:,.0f} GFLOP/s in a product like the "
            f"model's, {ceilings['matmul_square_flops'] / 1e9:,.0f} in a square one, "
            f"{ceilings['bandwidth'] / 1e9:,.1f} GB/s; {result['threads']} threads"
        )
    lines += _ratio_lines(result) + result["notes"]
    for variant, entry in result["variants"].items():
        lines += [f"{variant}: {note}" for note in entry["notes"]]
        if entry["error"]:
            lines.append(f"{variant}: {entry['status']}: {entry['error']}")
    for line in lines:
        console.print(line, markup=False)


def _cells(variant: dict[str, Any]) -> list[str]:
    if variant["tokens_per_second"] is None:
        return [variant["status"], *[""] * 5]
    share = variant["ceiling_share"]
    return [
        f"{variant['tokens_per_second']:,.0f}",
        f"{variant['trained_tokens_per_second']:,.0f}",
        f"{variant['step_seconds']:.3g} s",
        f"{variant['peak_bytes'] / GIB:.2f} GiB",
        f"{variant['loaded_bytes'] / GIB:.2f} GiB",
        "" if share is None else f"{share:.0%}",
    ]


def _ratio_lines(result: dict[str, Any]) -> list[str]:
    ratios, agreement = result["ratios"], result["agreement"]
    if ratios is None:
        return [f"no ratio: {result['ratios_withheld']}"]
    lines = []
    for reference, found in ratios.items():
        lines.append(
            f"engine / {reference}: {ratio_text(found['tokens_per_second'])} x tokens/s, "
            f"{found['peak_bytes']['median']:.2f} x peak memory"
        )
    return [
        *lines,
        f"losses: first batch differs by {agreement['first_batch']:.1e}, all steps by at most "
        f"{agreement['all_steps']:.1e} (relative)",
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


def _ceiling(measured: Sequence[Run], work: dict[str, Any]) -> dict[str, Any] | None:
    """The best of all measurements; ``tokens_per_second`` is this work at the full matmul rate."""
    finished = good(measured)
    if not finished:
        return None
    names = ("matmul_flops", "matmul_square_flops", "bandwidth")
    best = {name: max(run[name] for run in finished) for name in names}
    flops = max(best["matmul_flops"], best["matmul_square_flops"])
    speed = work["tokens"] * flops / work["model_flops"]
    return best | {"shape": finished[0]["shape"], "tokens_per_second": speed}


def _variant(
    found: Sequence[Run], work: dict[str, Any], ceiling: dict[str, Any] | None
) -> dict[str, Any]:
    finished = good(found)
    last = found[-1]
    entry: dict[str, Any] = {
        "status": last["status"],
        "error": last.get("error"),
        "tokens_per_second": None,
        "notes": finished[0]["notes"] if finished else [],
        "runs": list(found),
    }
    if not finished:
        return entry
    seconds = median(sum(run["seconds"]) for run in finished)
    speed = work["tokens"] / seconds
    return entry | {
        "tokens_per_second": speed,
        "trained_tokens_per_second": work["trained_tokens"] / seconds,
        "step_seconds": seconds / work["steps"],
        "peak_bytes": max(run["peak_bytes"] for run in finished),
        "loaded_bytes": max(run["loaded_bytes"] for run in finished),
        "adapter_parameters": finished[0]["adapter_parameters"],
        "ceiling_share": None if ceiling is None else speed / ceiling["tokens_per_second"],
    }


def _pairs(runs: dict[str, list[Run]], reference: str) -> list[tuple[Run, Run]]:
    """(engine, reference) of each repeat in which both have a result."""
    return pairs(runs.get("engine", []), runs.get(reference, []))


def _agreement(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Largest relative differences of losses, and whether both variants did the same work."""
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


def _why_withheld(agreement: dict[str, Any], runs: dict[str, list[Run]]) -> str | None:
    if not agreement["same_adapter_size"]:
        return "the variants trained adapters of different sizes"
    if not agreement["agree"]:
        return (
            f"losses of the first batch differ by {agreement['first_batch']:.1%}, more than "
            f"{LOSS_TOLERANCE:.0%}, so the variants do not compute the same"
        )
    if "engine" not in runs or len(runs) < 2:
        return "it takes the engine and a reference, which were not both asked for"
    if any(_pairs(runs, name) for name in REFERENCES):
        return None
    return "no repeat has a result of both the engine and a reference"


def _ratios(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """engine / reference, pair by pair: neighbours in time saw the same machine."""
    return {
        reference: {
            "tokens_per_second": ratio(
                [sum(other["seconds"]) / sum(engine["seconds"]) for engine, other in found]
            ),
            "peak_bytes": ratio(
                [engine["peak_bytes"] / other["peak_bytes"] for engine, other in found]
            ),
        }
        for reference in REFERENCES
        if (found := _pairs(runs, reference))
    }
