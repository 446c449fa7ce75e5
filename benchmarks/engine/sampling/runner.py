"""Runs the sampling benchmark: the two samplers in turn."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

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
    draw_greedy,
    to_json,
)
from benchmarks.harness import Outcome, describe_machine, interleave
from benchmarks.report import deliver, good
from tinker_cookbook.engine.devices import DeviceChoice, choose_device
from tinker_cookbook.exceptions import TrainingError

Batches = dict[str, Any]
"""``batch_size`` and ``by_length`` of ``sides.StaticBatches``."""


@dataclass(frozen=True)
class _Bench:
    """Settings and files of all runs of one benchmark."""

    config: SamplingConfig
    choice: DeviceChoice
    model: ModelFiles
    work: Path
    console: Console

    @property
    def adapter(self) -> Path:
        return self.work / "adapter"

    def job(self, variant: str, requests: Sequence[Request]) -> dict[str, Any]:
        return {
            "variant": variant,
            "folder": str(self.model.folder),
            "adapter": str(self.adapter),
            "rank": self.config.rank,
            "requests": to_json(requests),
        }


def run_benchmark(config: SamplingConfig) -> int:
    """Measures and prints; returns the exit status.

    It is 0 if every variant has figures, or ran out of memory, and greedy tokens are equal.
    """
    check_sampling_config(config)
    choice = choose_device(config.device, config.dtype)
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="tinker-cookbook-bench-") as temporary:
        work = Path(temporary)
        model = read_model(config, work)
        cases = draw_cases(config, model.size.vocab)
        greedy_requests = draw_greedy(config, model.size.vocab)
        for requests in (*cases.values(), greedy_requests):
            check_context(requests, model.size.context)
        console.print(describe_choice(config, choice))
        create_weights(config, choice, model, work)
        bench = _Bench(config, choice, model, work, console)
        _write_adapter(bench)
        greedy = _compare_greedy(bench, greedy_requests)
        measured = {case: _measure_case(bench, case, cases[case]) for case in cases}
    result = report.build(
        settings=settings_of(config, choice, "cases", "variants"),
        machine=describe_machine(choice.device),
        model_parameters=model.size.total,
        cases=cases,
        measured=measured,
        greedy=greedy,
    )
    report.print_table(result, console)
    deliver(result, config.output, console)
    return report.exit_status(result)


def _write_adapter(bench: _Bench) -> None:
    job = bench.job("adapter", []) | {"seed": bench.config.seed}
    outcome = run_job("adapter", job, bench.choice, bench.work)
    if outcome["status"] != "ok":
        raise TrainingError(
            f"rank: an adapter of rank {bench.config.rank} could not be made for "
            f"{bench.config.model}: {outcome['status']}, {outcome['error']}"
        )


def _compare_greedy(bench: _Bench, requests: Sequence[Request]) -> dict[str, Outcome]:
    """Returns the greedy tokens of both sides in float32; nothing if only one side runs."""
    if not requests or len(bench.config.variants) < 2:
        return {}
    choice = dataclasses.replace(bench.choice, dtype=torch.float32)
    return {
        variant: run_job("greedy", bench.job(variant, requests), choice, bench.work)
        for variant in bench.config.variants
    }


def _measure_case(
    bench: _Bench, case: str, requests: Sequence[Request]
) -> dict[str, report.Measured]:
    """Samples in turn, after a trial of each kind of batch for ``generate``."""
    measured = {variant: report.Measured() for variant in bench.config.variants}
    if "generate" in measured:
        measured["generate"] = _best_batches(bench, case, requests)
    interleave(
        {variant: found.runs for variant, found in measured.items()},
        bench.config.repeats,
        lambda variant: _sample(bench, variant, requests, measured[variant].batches),
        lambda outcome: report.one_line(outcome, requests),
        case,
        bench.console,
    )
    return measured


def _best_batches(bench: _Bench, case: str, requests: Sequence[Request]) -> report.Measured:
    """Returns the fastest kind of batch; if there is only one, it is not tried."""
    ways = static_batches(bench.config, requests)
    if len(ways) == 1:
        return report.Measured(batches=ways[0])
    trials = []
    for batches in ways:
        outcome = _sample(bench, "generate", requests, batches)
        trials.append(outcome | {"batches": batches})
        name = report.batches_text(batches)
        line = report.one_line(outcome, requests)
        bench.console.print(f"{case} trial generate {name}: {line}", markup=False)
    finished = good(trials)
    if not finished:
        return report.Measured(batches=ways[0], runs=trials[-1:], trials=trials)
    best = min(finished, key=lambda trial: trial["seconds"])
    return report.Measured(batches=best["batches"], trials=trials)


def static_batches(config: SamplingConfig, requests: Sequence[Request]) -> list[Batches]:
    """Returns all batch sizes up to the number of samples, sorted too if lengths differ."""
    samples = sum(request.samples for request in requests)
    sizes = sorted({min(size, samples) for size in config.batch_sizes})
    lengths = {(len(request.prompt), request.tokens) for request in requests}
    return [
        {"batch_size": size, "by_length": by_length}
        for size in sizes
        # One batch of everything is the same batch in any order.
        for by_length in ((False, True) if len(lengths) > 1 and size < samples else (False,))
    ]


def _sample(
    bench: _Bench, variant: str, requests: Sequence[Request], batches: Batches | None
) -> Outcome:
    job = bench.job(variant, requests) | {"batches": batches}
    return run_job("sample", job, bench.choice, bench.work)
