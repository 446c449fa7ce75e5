"""Runs the benchmark of shared prefixes: shared and unshared in turn, each a process of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import chz
import numpy as np
from rich.console import Console

from benchmarks.engine import summary
from benchmarks.engine.config import SharedPrefixConfig, check_shared_prefix_config
from benchmarks.engine.jobs import (
    Outcome,
    describe_choice,
    draw_weights,
    dtype_name,
    read_model,
    run_job,
)
from benchmarks.engine.machine import describe_machine
from benchmarks.engine.shared_prefix import report
from tinker_cookbook.engine.devices import DeviceChoice, choose_device
from tinker_cookbook.exceptions import ConfigurationError


def run_benchmark(config: SharedPrefixConfig) -> int:
    """Measures and prints; returns the exit status: 0 if both variants have their numbers, or lack
    them for want of memory, and agree on log-probabilities and losses."""
    check_shared_prefix_config(config)
    choice = choose_device(config.device, config.dtype)
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="tinker-cookbook-bench-") as temporary:
        work = Path(temporary)
        model = read_model(config, work)
        length = config.prompt_tokens + config.answer_tokens
        if length - 1 > model.size.context:
            raise ConfigurationError(
                f"prompt_tokens, answer_tokens: come to {length}, but the model's context is "
                f"{model.size.context}; lower them or choose another model"
            )
        console.print(describe_choice(config, choice))
        draw_weights(config, choice, model, work)
        cases = {}
        for case in config.cases:
            job = _settings(config, choice) | {"folder": str(model.folder), "case": case}
            runs = _interleaved(job, choice, work, console)
            sequences = config.groups * config.group_size if case == "shared" else config.distinct
            cases[case] = report.case(runs, sequences * (length - 1), _agreement(runs, work, case))
    result = report.build(
        settings=_settings(config, choice), machine=describe_machine(choice.device), cases=cases
    ) | {"model_parameters": model.size.total}
    report.print_table(result, console)
    summary.deliver(result, config.output, console)
    return report.exit_status(result)


def _settings(config: SharedPrefixConfig, choice: DeviceChoice) -> dict[str, Any]:
    """The settings as JSON, with the dtype as resolved."""
    left_out = ("work", "device", "output", "cases")
    settings = {name: value for name, value in chz.asdict(config).items() if name not in left_out}
    return settings | {"dtype": dtype_name(choice)}


def _interleaved(
    job: dict[str, Any], choice: DeviceChoice, work: Path, console: Console
) -> dict[str, list[Outcome]]:
    """A B A B; a variant that failed is not tried again."""
    runs: dict[str, list[Outcome]] = {variant: [] for variant in report.VARIANTS}
    for repeat in range(1, job["repeats"] + 1):
        for variant in report.VARIANTS:
            if runs[variant] and runs[variant][-1]["status"] != "ok":
                continue
            file = _logprobs_file(work, job["case"], variant)
            own = {"share": variant == "shared", "logprobs": str(file)}
            outcome = run_job("shared_prefix", job | own, choice, work)
            runs[variant].append(outcome)
            where = f"{job['case']} {repeat}/{job['repeats']} {variant}"
            console.print(f"{where}: {report.one_line(outcome)}", markup=False)
    return runs


def _agreement(runs: dict[str, list[Outcome]], work: Path, case: str) -> dict[str, Any] | None:
    """Largest differences: of log-probabilities before training, of the steps' losses and gradient
    norms (relative)."""
    found = summary.pairs(runs["shared"], runs["unshared"])
    if not found:
        return None
    values = [np.load(_logprobs_file(work, case, variant)) for variant in report.VARIANTS]
    return {
        "logprobs": float(np.abs(values[0] - values[1]).max()),  # NaN stays NaN
        "losses": _relative(found, "losses"),
        "grad_norms": _relative(found, "grad_norms"),
    }


def _relative(found: list[tuple[Outcome, Outcome]], name: str) -> float:
    shared, unshared = (np.array([run[name] for run in side]) for side in zip(*found, strict=True))
    return float((np.abs(shared - unshared) / np.maximum(np.abs(unshared), 1e-12)).max())


def _logprobs_file(work: Path, case: str, variant: str) -> Path:
    return work / f"logprobs-{case}-{variant}.npy"
