"""Runs a comparison with TRL: each side in a process of its own, in turn."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz
from rich.console import Console

from benchmarks.engine import summary
from benchmarks.engine.checks import check_choices, check_least, check_output
from benchmarks.engine.jobs import Outcome, dtype_name, run_process
from benchmarks.engine.machine import describe_machine
from tinker_cookbook.engine.devices import choose_device
from tinker_cookbook.engine.model.resolve import models_dir
from tinker_cookbook.exceptions import ConfigurationError

VARIANTS = ("ours", "trl")
_HOME = Path(__file__).resolve().parents[2]


@chz.chz
class SidesConfig:
    """Settings that every comparison with TRL has."""

    model_name: str = chz.field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct", doc="Hub name or local folder of the model"
    )
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")
    dtype: str = chz.field(default="float32", doc="float32, bfloat16 or auto")
    device: str = chz.field(default="auto", doc="auto, cuda, cuda:N, mps or cpu")
    steps: int = chz.field(default=6, doc="Steps of a run; the first is not timed")
    repeats: int = chz.field(default=1, doc="Times each variant runs, in turn: A B A B")
    variants: tuple[str, ...] = chz.field(default=VARIANTS, doc="Which run, in this order")
    lora_rank: int = chz.field(default=32, doc="Rank of the LoRA adapter, on the linear layers")
    train_unembed: bool = chz.field(
        default=False, doc="Ours also adapts the unembedding layer, as recipes do; TRL cannot"
    )
    learning_rate: float | None = chz.field(default=None, doc="Default: the recipe's")
    seed: int = chz.field(default=0, doc="Seed of adapter, data and sampling")
    trl_python: str = chz.field(
        default=sys.executable, doc="A Python that has trl and what this package needs"
    )
    trl_gradient_checkpointing: bool = chz.field(
        default=False, doc="TRL's own default is true: slower, with less memory"
    )
    output: str | None = chz.field(default=None, doc="Also write the JSON object to this file")

    def check(self) -> None:
        """Raises ``ConfigurationError`` for what can be told without loading anything."""
        check_least(self, {"repeats": 1, "lora_rank": 1, "steps": 2})
        check_choices("variants", self.variants, VARIANTS)
        check_output(self.output)
        if shutil.which(self.trl_python) is None:
            raise ConfigurationError(
                f"trl_python: {self.trl_python} is no program; give the path of a Python that has "
                "trl"
            )


@dataclass(frozen=True)
class Comparison:
    """What differs from one comparison to the next.

    ``modules`` are run with the job's file and the result's; ``build`` makes the JSON object of
    settings, machine, runs and notes; ``learned`` says what came of a run; ``learning_rate`` is the
    recipe's, of a model; ``check`` raises for a job that TRL's side could not do, before ours runs.
    """

    modules: Mapping[str, str]
    build: Callable[
        [dict[str, Any], dict[str, Any], Mapping[str, list[Outcome]], Sequence[str]],
        dict[str, Any],
    ]
    learned: Callable[[Outcome], str]
    print_table: Callable[[dict[str, Any], Console], None]
    learning_rate: Callable[[str], float]
    check: Callable[[dict[str, Any]], object] = lambda job: None


def run_comparison(config: SidesConfig, comparison: Comparison) -> int:
    """Measures and prints; returns the exit status: 0 if every variant that is installed has its
    figures."""
    config.check()
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
    learning_rate = config.learning_rate
    if learning_rate is None:
        learning_rate = comparison.learning_rate(config.model_name)
    settings = {
        **{k: v for k, v in chz.asdict(config).items() if k not in ("output", "variants")},
        "device": str(choice.device),
        "dtype": dtype_name(choice),
        "learning_rate": learning_rate,
    }
    if "trl" in variants:
        comparison.check(settings)
    runs: dict[str, list[Outcome]] = {variant: [] for variant in variants}
    with tempfile.TemporaryDirectory(prefix="tinker-cookbook-bench-") as temporary:
        for repeat in range(1, config.repeats + 1):
            for variant, found in runs.items():
                if found and found[-1]["status"] != "ok":
                    continue
                python = config.trl_python if variant == "trl" else sys.executable
                module = comparison.modules[variant]
                found.append(run_side(python, module, settings, Path(temporary)))
                word = summary.one_line(found[-1], comparison.learned)
                line = f"{variant} {repeat}/{config.repeats}: {word}"
                console.print(line, markup=False, soft_wrap=True)
    result = comparison.build(settings, describe_machine(choice.device), runs, notes)
    comparison.print_table(result, console)
    summary.deliver(result, config.output, console)
    return summary.exit_status(result)


def has_trl(python: str) -> bool:
    """Whether that Python finds trl, without importing it."""
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('trl') is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def run_side(python: str, module: str, job: dict[str, Any], work: Path) -> Outcome:
    """Runs one side on ``job`` and gives what it found."""
    job_file, result_file = work / "job.json", work / "result.json"
    job_file.write_text(json.dumps(job), encoding="utf-8")
    command = [python, "-m", module, str(job_file), str(result_file)]
    environment = {
        "PYTHONPATH": str(_HOME),  # TRL's Python need not have this package installed
        "TINKER_COOKBOOK_HOME": str(work / "home"),  # the run's weights go with it
        "TINKER_COOKBOOK_MODELS": str(models_dir()),
    }
    return run_process(command, result_file, work / "log", environment)
