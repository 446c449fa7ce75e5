"""Runs the comparison: each side in a process of its own, in turn."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import chz
from rich.console import Console

from tinker_cookbook.engine.bench import summary
from tinker_cookbook.engine.bench.jobs import Outcome, dtype_name, run_process
from tinker_cookbook.engine.bench.machine import describe_machine
from tinker_cookbook.engine.devices import choose_device
from tinker_cookbook.engine.resolve import models_dir
from tinker_cookbook.rl.bench import report
from tinker_cookbook.rl.bench.config import Config, check_config

_MODULES = {"ours": "tinker_cookbook.rl.bench.ours", "trl": "tinker_cookbook.rl.bench.trl_side"}
_HOME = Path(__file__).resolve().parents[3]


def run_benchmark(config: Config) -> int:
    """Measures and prints; returns the exit status: 0 if every variant that is installed has its
    figures."""
    check_config(config)
    choice = choose_device(config.device, config.dtype)
    console = Console(highlight=False)
    variants, notes = list(config.variants), []
    if "trl" in variants and not has_trl(config.trl_python):
        variants.remove("trl")
        notes.append(
            f"TRL is not compared: {config.trl_python} has no trl; install it there, or set "
            "trl_python= to a Python that has it"
        )
        console.print(notes[0], markup=False, soft_wrap=True)
    settings = {
        **{k: v for k, v in chz.asdict(config).items() if k not in ("output", "variants")},
        "device": str(choice.device),
        "dtype": dtype_name(choice),
        "learning_rate": _learning_rate(config),
    }
    runs: dict[str, list[Outcome]] = {variant: [] for variant in variants}
    with tempfile.TemporaryDirectory(prefix="tinker-cookbook-bench-") as temporary:
        for repeat in range(1, config.repeats + 1):
            for variant, found in runs.items():
                if found and found[-1]["status"] != "ok":
                    continue
                found.append(_run(variant, settings, config, Path(temporary)))
                word = f"{variant} {repeat}/{config.repeats}: {report.one_line(found[-1])}"
                console.print(word, markup=False, soft_wrap=True)
    result = report.build(settings, describe_machine(choice.device), runs, notes)
    report.print_table(result, console)
    summary.deliver(result, config.output, console)
    return report.exit_status(result)


def has_trl(python: str) -> bool:
    """Whether that Python finds trl, without importing it."""
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('trl') is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def _learning_rate(config: Config) -> float:
    if config.learning_rate is not None:
        return config.learning_rate
    from recipes.rl_settings import rl_learning_rate

    return rl_learning_rate(config.model_name)


def _run(variant: str, job: dict[str, Any], config: Config, work: Path) -> Outcome:
    job_file, result_file = work / "job.json", work / "result.json"
    job_file.write_text(json.dumps(job), encoding="utf-8")
    python = config.trl_python if variant == "trl" else sys.executable
    command = [python, "-m", _MODULES[variant], str(job_file), str(result_file)]
    environment = {
        "PYTHONPATH": str(_HOME),  # TRL's Python need not have this package installed
        "TINKER_COOKBOOK_HOME": str(work / "home"),  # the run's weights go with it
        "TINKER_COOKBOOK_MODELS": str(models_dir()),
    }
    return run_process(command, result_file, work / "log", environment)
