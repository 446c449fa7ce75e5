"""Builds the report of the sampling benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.engine.sampling.requests import Request
from benchmarks.harness import Outcome
from benchmarks.report import GIB, good

_COLUMNS = (
    *("case", "variant", "batch"),
    *("tok/s", "time", "first token", "peak", "ceiling", "ratio"),
)


@dataclass
class Measured:
    """Runs of one variant on one case; ``trials`` selected the best ``batches``."""

    runs: list[Outcome] = field(default_factory=list)
    batches: dict[str, Any] | None = None
    trials: list[Outcome] = field(default_factory=list)


Cases = Mapping[str, Sequence[Request]]


def build(
    *,
    settings: dict[str, Any],
    machine: dict[str, Any],
    model_parameters: int,
    cases: Cases,
    measured: Mapping[str, Mapping[str, Measured]],
    greedy: Mapping[str, Outcome],
) -> dict[str, Any]:
    """Returns the JSON object."""
    agreement = _agreement(greedy)
    products = _best_products(measured)
    withheld = None if agreement is None or agreement["agree"] else _disagreement(agreement)
    return {
        "benchmark": "sampling",
        "date": report.now(),
        **machine,
        **settings,
        "model_parameters": model_parameters,
        "products": products,
        "cases": {
            case: _case(requests, measured[case], products, withheld)
            for case, requests in cases.items()
        },
        "agreement": agreement,
        "ratios_withheld": withheld,
    }


def exit_status(result: dict[str, Any]) -> int:
    """Returns 1 if a variant failed, none has a figure, or greedy tokens differ."""
    variants = [v for case in result["cases"].values() for v in case["variants"].values()]
    agree = result["ratios_withheld"] is None
    return report.exit_status(variants, "tokens_per_second", agree)


def one_line(run: Outcome, requests: Sequence[Request]) -> str:
    """Returns a line on a run."""
    useful = sum(request.useful for request in requests)
    return report.outcome_line(
        run, lambda run: f"{useful / run['seconds']:,.1f} tok/s, {run['seconds']:.1f} s"
    )


def batches_text(batches: dict[str, Any] | None) -> str:
    """``32 sorted``."""
    if batches is None:
        return ""
    return f"{batches['batch_size']}{' sorted' if batches['by_length'] else ''}"


def print_table(result: dict[str, Any], console: Console) -> None:
    """Prints cases, variants, ratios and ceilings."""
    rows = []
    for name, case in result["cases"].items():
        for variant, entry in case["variants"].items():
            row = [name, variant, entry["batches_text"], *_cells(entry)]
            if variant == "engine" and case["ratio"] is not None:
                row += [""] * (len(_COLUMNS) - 1 - len(row))
                row.append(f"{case['ratio']['tokens_per_second']['median']:.2f} x")
            rows.append(row)
    title = f"Sampling, {result['model']}, {result['dtype']}, rank {result['rank']}"
    report.print_report(title, _COLUMNS, rows, _lines(result), console, left=3)


def _cells(entry: dict[str, Any]) -> list[str]:
    if entry["tokens_per_second"] is None:
        return [entry["status"]]
    share = entry["ceiling_share"]
    return [
        f"{entry['tokens_per_second']:,.1f}",
        f"{entry['seconds']:.1f} s",
        f"{entry['first_token_seconds'] * 1e3:,.0f} ms",
        f"{entry['peak_bytes'] / GIB:.2f} GiB",
        "" if share is None else f"{share:.0%}",
    ]


def _lines(result: dict[str, Any]) -> list[str]:
    lines = []
    for name, case in result["cases"].items():
        work, ceiling, found = case["workload"], case["ceiling"], case["ratio"]
        lines.append(
            f"{name}: {work['samples']} samples of {work['requests']} prompts, "
            f"{work['useful_tokens']:,} tokens requested, {work['prompt_tokens']:,} of prompts"
        )
        if ceiling is not None:
            lines.append(
                f"  ceiling {ceiling['tokens_per_second']:,.0f} tok/s "
                f"({ceiling['decode_tokens_per_second']:,.0f} without the prompts), from the "
                f"products alone at {ceiling['rows']} rows"
            )
        if found is not None:
            lines.append("  " + report.speed_ratio_line("engine", "generate", found))
        for variant, entry in case["variants"].items():
            if entry["first_step_seconds"] is not None:
                milliseconds = entry["first_step_seconds"] * 1e3
                lines.append(f"  {variant}: {milliseconds:.1f} ms from call to first forward pass")
        lines += [f"  {line}" for line in report.error_lines(case["variants"])]
    if result["products"]:
        speeds = ", ".join(f"{p['rows']}: {p['rows_per_second']:,.0f}" for p in result["products"])
        lines.append(f"products alone, rows/s at rows: {speeds}; {result['threads']} threads")
    return [*lines, *_agreement_lines(result)]


def _agreement_lines(result: dict[str, Any]) -> list[str]:
    agreement = result["agreement"]
    if result["ratios_withheld"] is not None:
        return [f"no ratio: {result['ratios_withheld']}"]
    if agreement is None:
        return ["greedy tokens were not compared"]
    return [
        f"greedy tokens in float32: {agreement['same_prompts']} of {agreement['prompts']} "
        f"prompts identical ({agreement['tokens']} tokens)"
    ]


def _agreement(greedy: Mapping[str, Outcome]) -> dict[str, Any] | None:
    """Returns how far greedy tokens agree; None if they were not compared."""
    if not greedy:
        return None
    failed = {name: run for name, run in greedy.items() if run["status"] != "ok"}
    if failed:
        name, run = next(iter(failed.items()))
        return {"agree": False, "error": f"{name}: {run['status']}: {run['error']}"}
    engine, reference = greedy["engine"]["tokens"], greedy["generate"]["tokens"]
    common = [_common(a, b) for a, b in zip(engine, reference, strict=True)]
    same = sum(a == b for a, b in zip(engine, reference, strict=True))
    return {
        "agree": same == len(reference),
        "error": None,
        "prompts": len(reference),
        "same_prompts": same,
        "tokens": sum(map(len, reference)),
        "tokens_before_first_difference": sum(common),
    }


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    differ = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differ, min(len(first), len(second)))


def _disagreement(agreement: dict[str, Any]) -> str:
    if agreement["error"]:
        return f"the comparison of greedy tokens did not come to an end: {agreement['error']}"
    return (
        f"greedy tokens in float32 are identical for {agreement['same_prompts']} of "
        f"{agreement['prompts']} prompts only, so the variants differ"
    )


def _case(
    requests: Sequence[Request],
    measured: Mapping[str, Measured],
    products: Sequence[dict[str, Any]],
    withheld: str | None,
) -> dict[str, Any]:
    work = {
        "requests": len(requests),
        "samples": sum(request.samples for request in requests),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "useful_tokens": sum(request.useful for request in requests),
        "longest_answer": max(request.tokens for request in requests),
    }
    ceiling = _ceiling(work, products)
    return {
        "workload": work,
        "ceiling": ceiling,
        "variants": {name: _variant(found, work, ceiling) for name, found in measured.items()},
        "ratio": None if withheld else _ratio(measured),
    }


def _ceiling(work: dict[str, Any], products: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Useful tokens/s if only the products took time.

    Each prompt goes through the body once, at the best rate of any number of rows; each answer's
    token through body and head, at the rate of the largest measured number of rows that the case
    has samples for.
    """
    if not products:
        return None
    step = max((p for p in products if p["rows"] <= work["samples"]), key=lambda p: p["rows"])
    prompt = work["prompt_tokens"] * min(p["body_seconds"] / p["rows"] for p in products)
    answers = work["useful_tokens"] / step["rows_per_second"]
    return {
        "rows": step["rows"],
        "tokens_per_second": work["useful_tokens"] / (prompt + answers),
        "decode_tokens_per_second": step["rows_per_second"],
    }


def _best_products(measured: Mapping[str, Mapping[str, Measured]]) -> list[dict[str, Any]]:
    """The least times of all runs; other work on the machine only slows a run down."""
    runs = [run for case in measured.values() for found in case.values() for run in found.runs]
    by_rows: dict[int, list[dict[str, Any]]] = {}
    for run in good(runs):
        for products in run["products"] or []:
            by_rows.setdefault(products["rows"], []).append(products)
    out = []
    for rows, found in sorted(by_rows.items()):
        body = min(products["body_seconds"] for products in found)
        head = min(products["head_seconds"] for products in found)
        speed = rows / (body + head)
        out.append(
            {"rows": rows, "body_seconds": body, "head_seconds": head, "rows_per_second": speed}
        )
    return out


def _variant(
    found: Measured, work: dict[str, Any], ceiling: dict[str, Any] | None
) -> dict[str, Any]:
    finished = good(found.runs)
    entry = report.variant_entry(found.runs, "tokens_per_second") | {
        "batches": found.batches,
        "batches_text": batches_text(found.batches),
        "first_step_seconds": None,
        "trials": found.trials,
    }
    if not finished:
        return entry
    seconds = median(run["seconds"] for run in finished)
    speed = work["useful_tokens"] / seconds
    steps = [run["first_step_seconds"] for run in finished]
    return entry | {
        "tokens_per_second": speed,
        "seconds": seconds,
        "first_token_seconds": median(run["first_token_seconds"] for run in finished),
        "first_step_seconds": None if None in steps else median(steps),
        "loaded_bytes": max(run["loaded_bytes"] for run in finished),
        "ceiling_share": None if ceiling is None else speed / ceiling["tokens_per_second"],
        "decode_ceiling_share": None
        if ceiling is None
        else speed / ceiling["decode_tokens_per_second"],
    }


def _ratio(measured: Mapping[str, Measured]) -> dict[str, Any] | None:
    """Returns the ratios engine / generate; None if no repeat has both."""
    if not {"engine", "generate"} <= set(measured):
        return None
    found = report.pairs(measured["engine"].runs, measured["generate"].runs)
    return report.speed_ratios(found, lambda run: run["seconds"])
