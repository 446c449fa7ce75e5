"""Builds the report of the sampling benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.engine.flops import ModelSize
from benchmarks.engine.sampling.limits import limit
from benchmarks.engine.sampling.requests import Request
from benchmarks.harness import Outcome
from benchmarks.report import GIB, good

_COLUMNS = (
    *("case", "variant"),
    *("tok/s", "fastest", "of limit", "CPU/token", "prompts", "peak", "engine / it", "CPU / it"),
)


@dataclass
class Table:
    """Runs of all variants in one dtype, and the machine's rates before and after them."""

    dtype: str
    item_bytes: int
    ceilings: list[Outcome] = field(default_factory=list)
    runs: dict[str, list[Outcome]] = field(default_factory=dict)


Cases = Mapping[str, Sequence[Request]]


def build(
    *,
    settings: dict[str, Any],
    machine: dict[str, Any],
    size: ModelSize,
    cases: Cases,
    tables: Sequence[Table],
) -> dict[str, Any]:
    """Returns the JSON object; ``dtypes`` has a table each."""
    return {
        "benchmark": "sampling",
        "date": report.now(),
        **machine,
        **settings,
        "model_parameters": size.total,
        "dtypes": {table.dtype: _table(table, cases, size, settings["rank"]) for table in tables},
    }


def exit_status(result: dict[str, Any]) -> int:
    """Returns 1 if a variant failed, or none has a figure."""
    variants = [v for table in result["dtypes"].values() for v in table["variants"].values()]
    return report.exit_status(variants, "cases")


def one_line(run: Outcome) -> str:
    """Returns a line on a run."""
    return report.outcome_line(
        run,
        lambda run: ", ".join(
            f"{case} {found['tokens_per_second']:,.1f} tok/s"
            for case, found in run["cases"].items()
        ),
    )


def print_tables(result: dict[str, Any], console: Console) -> None:
    """Prints cases, variants, ratios and limits for each dtype."""
    for dtype, table in result["dtypes"].items():
        rows = []
        for case, limits in table["limits"].items():
            for variant, entry in table["variants"].items():
                if entry["cases"] is None:
                    if variant != "llama.cpp" or case.startswith("decode"):
                        rows.append([case, variant, entry["status"]])
                elif case in entry["cases"]:
                    rows.append([case, variant, *_cells(entry["cases"][case])])
            if limits is not None:
                rows.append([case, f"limit: {limits['by']}", f"{limits['tokens_per_second']:,.0f}"])
        title = f"Sampling, {result['model']}, {dtype}, rank {result['rank']}"
        report.print_report(title, _COLUMNS, rows, _lines(table), console, left=2)


def _cells(found: dict[str, Any]) -> list[str]:
    def text(name: str, form: str, scale: float = 1.0) -> str:
        return "" if found[name] is None else form.format(found[name] * scale)

    cells = [
        text("tokens_per_second", "{:,.1f}"),
        text("fastest", "{:,.1f}"),
        text("limit_share", "{:.0%}"),
        text("cpu_seconds", "{:,.1f} ms", 1e3),
        text("prompt_seconds", "{:.2f} s"),
        f"{found['peak_bytes'] / GIB:.2f} GiB",
    ]
    for name in ("engine_speed", "engine_cpu"):
        ratio = found[name]
        cells.append("" if ratio is None else f"{ratio['median']:.2f} x")
    return cells


def _lines(table: dict[str, Any]) -> list[str]:
    lines = []
    for variant, entry in table["variants"].items():
        for case, found in (entry["cases"] or {}).items():
            parts = [] if found["measured"] == "all steps" else [found["measured"]]
            if found["engine_speed"]:
                parts.append(f"engine / it {report.ratio_text(found['engine_speed'])} x tok/s")
            if found["engine_cpu"]:
                parts.append(f"{report.ratio_text(found['engine_cpu'])} x processor time")
            lines += [f"{case}, {variant}: {', '.join(parts)}"] if parts else []
    if table["ceilings"] is not None:
        rates = table["ceilings"]
        lines.append(
            f"the machine: {rates['bandwidth'] / 1e9:,.1f} GB/s, {rates['flops'] / 1e9:,.0f} "
            f"GFLOP/s by {rates['method']}"
        )
    return [*lines, table["busy"], *report.error_lines(table["variants"])]


def _table(table: Table, cases: Cases, size: ModelSize, rank: int) -> dict[str, Any]:
    ceilings = report.best_ceilings(table.ceilings)
    limits = {
        case: None
        if ceilings is None
        else limit(size, rank, of, table.item_bytes, ceilings, not case.startswith("decode"))
        for case, of in cases.items()
    }
    variants = {}
    for name, runs in table.runs.items():
        entry = report.variant_entry(runs, "cases")
        if finished := good(runs):
            engine = [] if name == "engine" else table.runs.get("engine", [])
            pairs = report.pairs(engine, runs)
            entry["cases"] = {
                case: _case([run["cases"][case] for run in finished], limits[case])
                | _ratios([(a["cases"][case], b["cases"][case]) for a, b in pairs])
                for case in finished[0]["cases"]
            }
        variants[name] = entry
    every = [*table.ceilings, *(run for runs in table.runs.values() for run in runs)]
    busy = report.busy_line(every)
    return {"ceilings": ceilings, "limits": limits, "variants": variants, "busy": busy}


def _case(found: Sequence[dict[str, Any]], limits: dict[str, Any] | None) -> dict[str, Any]:
    """Medians over the runs; the best of ``fastest``, the most of the peaks."""

    def middle(name: str) -> float | None:
        return None if found[0][name] is None else median(case[name] for case in found)

    speed = median(case["tokens_per_second"] for case in found)
    return {
        "tokens_per_second": speed,
        "fastest": None if found[0]["fastest"] is None else max(case["fastest"] for case in found),
        "limit_share": None if limits is None else speed / limits["tokens_per_second"],
        "cpu_seconds": middle("cpu_seconds"),
        "prompt_seconds": middle("prompt_seconds"),
        "measured": found[0]["measured"],
        "peak_bytes": max(case["peak_bytes"] for case in found),
    }


def _ratios(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """The engine's speed and processor time by those of the variant, in neighbouring runs."""
    speeds = [a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs]
    timed = [(a["cpu_seconds"], b["cpu_seconds"]) for a, b in pairs]
    known = timed and all(value is not None for pair in timed for value in pair)
    return {
        "engine_speed": report.ratio(speeds) if speeds else None,
        "engine_cpu": report.ratio([a / b for a, b in timed]) if known else None,
    }
