"""Runs the sampling benchmark: the samplers in turn."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import chz
from rich.console import Console

from benchmarks.engine import shapes
from benchmarks.engine.config import SamplingConfig, check_sampling_config
from benchmarks.engine.jobs import (
    ModelFiles,
    create_weights,
    describe_choice,
    read_model,
    run_job,
    settings_of,
)
from benchmarks.engine.sampling import report
from benchmarks.engine.sampling.requests import (
    Request,
    check_context,
    draw_cases,
    to_json,
)
from benchmarks.harness import Outcome, describe_machine, interleave
from benchmarks.report import deliver
from tinker_cookbook.engine.devices import DeviceChoice, choose_device
from tinker_cookbook.exceptions import TrainingError

_WIDTH = 112  # of the table, also where no terminal has a width


@dataclass(frozen=True)
class _Bench:
    """Settings and files of all runs of one benchmark."""

    config: SamplingConfig
    model: ModelFiles
    work: Path
    console: Console

    def job(self, variant: str) -> dict[str, Any]:
        return {
            "variant": variant,
            "folder": str(self.model.folder),
            "adapter": str(self.work / "adapter"),
            "rank": self.config.rank,
            "seconds": self.config.seconds,
            "batch_size": self.config.batch_size,
        }


def run_benchmark(config: SamplingConfig) -> int:
    """Measures and prints; returns the exit status.

    It is 0 if every variant has figures, ran out of memory or is not installed.
    """
    check_sampling_config(config)
    choices = [choose_device(config.device, dtype) for dtype in config.dtype.split(",")]
    console = Console(highlight=False, width=_WIDTH)
    with tempfile.TemporaryDirectory(prefix="tinker-cookbook-bench-") as temporary:
        work = Path(temporary)
        model = read_model(config, work)
        cases = draw_cases(config, model.size.vocab)
        for requests in cases.values():
            check_context(requests, model.size.context)
        create_weights(config, choices[0], model, work)
        bench = _Bench(config, model, work, console)
        _write_adapter(bench, choices[0])
        tables = [_measure(bench, choice, cases) for choice in choices]
    settings = settings_of(config, choices[0], "cases", "variants", "before")
    result = report.build(
        settings=settings | {"dtype": config.dtype},
        machine=describe_machine(choices[0].device),
        size=model.size,
        cases=cases,
        tables=tables,
    )
    report.print_tables(result, console)
    deliver(result, config.output, console)
    return report.exit_status(result)


def _write_adapter(bench: _Bench, choice: DeviceChoice) -> None:
    job = bench.job("adapter") | {"seed": bench.config.seed}
    outcome = run_job("adapter", job, choice, bench.work)
    if outcome["status"] != "ok":
        raise TrainingError(
            f"rank: an adapter of rank {bench.config.rank} could not be made for "
            f"{bench.config.model}: {outcome['status']}, {outcome['error']}"
        )


def _measure(bench: _Bench, choice: DeviceChoice, cases: dict[str, list[Request]]) -> report.Table:
    """Measures all variants in turn in one dtype; the machine's rates before and after them."""
    table = report.Table(str(choice.dtype).removeprefix("torch."), choice.dtype.itemsize)
    bench.console.print(describe_choice(chz.replace(bench.config, dtype=table.dtype), choice))
    table.ceilings.append(run_job("ceilings", {}, choice, bench.work))
    table.runs |= {variant: [] for variant in bench.config.variants}
    interleave(
        table.runs,
        bench.config.repeats,
        lambda variant: _sample(bench, variant, choice, cases),
        report.one_line,
        table.dtype,
        bench.console,
    )
    table.ceilings.append(run_job("ceilings", {}, choice, bench.work))
    return table


def _sample(
    bench: _Bench, variant: str, choice: DeviceChoice, cases: dict[str, list[Request]]
) -> Outcome:
    if variant == "llama.cpp":
        cases = {case: of for case, of in cases.items() if case.startswith("decode")}
        if absent := _why_not_llama_cpp(bench, choice, cases):
            return {"status": absent[0], "error": absent[1]}
        written = run_job("gguf", bench.job(variant), choice, bench.work)
        if written["status"] != "ok":
            return written
    job = bench.job(variant) | {"cases": {case: to_json(of) for case, of in cases.items()}}
    checkout = bench.config.before if variant == "before" else None
    return run_job("sample", job, choice, bench.work, checkout=checkout)


def _why_not_llama_cpp(
    bench: _Bench, choice: DeviceChoice, cases: dict[str, list[Request]]
) -> tuple[str, str] | None:
    """Returns a status and its reason where llama.cpp is not measured."""
    if find_spec("xllamacpp") is None:
        return "not installed", "pip install -e '.[llama-cpp]' to measure it too"
    if not cases:
        return "skipped", "it is measured in the case decode only"
    if choice.device.type != "cpu" or shapes.is_shape(bench.config.model):
        return "skipped", "it is measured on a CPU, with a model that has a tokenizer"
    return None
