"""Runs the benchmark of shared prefixes: shared and unshared in turn."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.engine.config import SharedPrefixConfig, check_shared_prefix_config
from benchmarks.engine.jobs import (
    create_weights,
    describe_choice,
    read_model,
    run_job,
    settings_of,
)
from benchmarks.engine.shared_prefix import report
from benchmarks.harness import Outcome, describe_machine, interleave
from benchmarks.report import deliver, pairs
from tinker_cookbook.engine.devices import DeviceChoice, choose_device
from tinker_cookbook.exceptions import ConfigurationError


def run_benchmark(config: SharedPrefixConfig) -> int:
    """Measures and prints; returns the exit status.

    It is 0 if both variants have figures, or ran out of memory, and agree on log-probabilities and
    losses.
    """
    check_shared_prefix_config(config)
    choice = choose_device(config.device, config.dtype)
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="tinker-cookbook-bench-") as temporary:
        work = Path(temporary)
        model = read_model(config, work)
        length = config.prompt_tokens + config.answer_tokens
        if length - 1 > model.size.context:
            raise ConfigurationError(
                f"prompt_tokens, answer_tokens: add up to {length}, but the model's context is "
                f"{model.size.context}; lower them or choose another model"
            )
        console.print(describe_choice(config, choice))
        create_weights(config, choice, model, work)
        cases = {}
        for case in config.cases:
            job = settings_of(config, choice, "cases") | {"folder": str(model.folder), "case": case}
            runs = _interleaved(job, choice, work, console)
            sequences = config.groups * config.group_size if case == "shared" else config.distinct
            cases[case] = report.case(runs, sequences * (length - 1), _agreement(runs, work, case))
    result = report.build(
        settings=settings_of(config, choice, "cases"),
        machine=describe_machine(choice.device),
        cases=cases,
    ) | {"model_parameters": model.size.total}
    report.print_table(result, console)
    deliver(result, config.output, console)
    return report.exit_status(result)


def _interleaved(
    job: dict[str, Any], choice: DeviceChoice, work: Path, console: Console
) -> dict[str, list[Outcome]]:
    def run(variant: str) -> Outcome:
        file = _logprobs_file(work, job["case"], variant)
        own = {"share": variant == "shared", "logprobs": str(file)}
        return run_job("shared_prefix", job | own, choice, work)

    runs: dict[str, list[Outcome]] = {variant: [] for variant in report.VARIANTS}
    interleave(runs, job["repeats"], run, report.one_line, job["case"], console)
    return runs


def _agreement(runs: dict[str, list[Outcome]], work: Path, case: str) -> dict[str, Any] | None:
    """Returns the largest differences of log-probabilities before training, and the largest
    relative differences of the steps' losses and gradient norms."""
    found = pairs(runs["shared"], runs["unshared"])
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
