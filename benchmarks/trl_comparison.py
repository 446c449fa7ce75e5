"""Comparisons with TRL: settings, both sides in turn, the report, and TRL's arguments."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import chz
from rich.console import Console

from benchmarks import report
from benchmarks.harness import (
    Outcome,
    check_choices,
    check_least,
    check_output,
    describe_machine,
    dtype_name,
    interleave,
    run_module,
)
from benchmarks.report import GIB
from tinker_cookbook.engine.devices import choose_device
from tinker_cookbook.engine.model.resolve import models_dir
from tinker_cookbook.exceptions import ConfigurationError

VARIANTS = ("ours", "trl")
_CHECKOUT = Path(__file__).resolve().parents[1]


@chz.chz
class SidesConfig:
    """Settings of every comparison with TRL."""

    model_name: str = chz.field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct", doc="Hub name or local folder of the model"
    )
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")
    dtype: str = chz.field(default="float32", doc="float32, bfloat16 or auto")
    device: str = chz.field(default="auto", doc="auto, cuda, cuda:N, mps or cpu")
    steps: int = chz.field(default=6, doc="Steps of a run; the first is not timed")
    repeats: int = chz.field(
        default=1, doc="Pairs of runs, in the order A B A B; the seed of the n-th is seed + n - 1"
    )
    variants: tuple[str, ...] = chz.field(default=VARIANTS, doc="Variants to run, in this order")
    lora_rank: int = chz.field(default=32, doc="Rank of the LoRA adapter, on the linear layers")
    train_unembed: bool = chz.field(
        default=False, doc="Ours also adapts the unembedding layer, as recipes do; TRL cannot"
    )
    learning_rate: float | None = chz.field(default=None, doc="Default: the recipe's")
    seed: int = chz.field(default=0, doc="Seed of adapter, data and sampling, of the first pair")
    trl_python: str = chz.field(
        default=sys.executable, doc="A Python with trl and the dependencies of this package"
    )
    trl_gradient_checkpointing: bool = chz.field(
        default=False, doc="TRL's own default is true: slower, with less memory"
    )
    output: str | None = chz.field(default=None, doc="Also write the JSON object to this file")

    def check(self) -> None:
        """Raises ``ConfigurationError`` for settings that are wrong whatever the model is."""
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
    """What differs between comparisons.

    Attributes:
        name: Value of ``benchmark`` in the JSON object.
        title: Title of the table.
        modules: The process of each side.
        columns: Names of the table's columns after step and peak, with the text of a cell for an
            entry of ``variants``.
        figures: Further figures of a variant, from its runs that finished.
        describe: Describes what a run learned.
        lines: Lines on the settings and the result.
        learning_rate: The recipe's default for a model.
        check: Raises for a job that TRL's side cannot do, before ours runs.
        extras: Further keys of the JSON object, from the object.
    """

    name: str
    title: str
    modules: Mapping[str, str]
    columns: Mapping[str, Callable[[dict[str, Any]], str]]
    figures: Callable[[Sequence[Outcome]], dict[str, Any]]
    describe: Callable[[Outcome], str]
    lines: Callable[[dict[str, Any]], list[str]]
    learning_rate: Callable[[str], float]
    check: Callable[[dict[str, Any]], object] = lambda job: None
    extras: Callable[[dict[str, Any]], dict[str, Any]] = lambda result: {}


def run_comparison(config: SidesConfig, comparison: Comparison) -> int:
    """Measures and prints; returns the exit status: 0 if every installed variant has figures."""
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
        interleave(
            runs,
            config.repeats,
            lambda variant: run_side(
                config.trl_python if variant == "trl" else sys.executable,
                comparison.modules[variant],
                settings | {"seed": config.seed + len(runs[variant])},
                Path(temporary),
            ),
            lambda run: report.outcome_line(
                run, lambda run: f"{_step_seconds(run):.2f} s a step, {comparison.describe(run)}"
            ),
            "repeat",
            console,
        )
    result = build(comparison, settings, describe_machine(choice.device), runs, notes)
    print_table(comparison, result, console)
    report.deliver(result, config.output, console)
    return exit_status(result)


def has_trl(python: str) -> bool:
    """Returns whether that Python finds trl, without importing it."""
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('trl') is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def run_side(python: str, module: str, job: dict[str, Any], work: Path) -> Outcome:
    """Runs one side on ``job`` and returns its result."""
    environment = {
        "PYTHONPATH": str(_CHECKOUT),  # TRL's Python need not have this package installed
        "TINKER_COOKBOOK_HOME": str(work / "home"),  # the run's weights are temporary
        "TINKER_COOKBOOK_MODELS": str(models_dir()),
    }
    return run_module(module, job, work, environment, python)


def build(
    comparison: Comparison,
    settings: dict[str, Any],
    machine: dict[str, Any],
    runs: Mapping[str, list[Outcome]],
    notes: Sequence[str],
) -> dict[str, Any]:
    """Returns the JSON object. Times are medians without the first step."""
    variants = {}
    for name, of in runs.items():
        variants[name] = report.variant_entry(of, "step_seconds")
        if finished := report.good(of):
            seconds = median(map(_step_seconds, finished))
            variants[name] |= {"step_seconds": seconds, **comparison.figures(finished)}
    found = report.pairs(runs.get("ours", []), runs.get("trl", []))
    ratio = None
    if found:
        ratio = {
            "step_seconds": report.ratio([_step_seconds(a) / _step_seconds(b) for a, b in found]),
            "peak_bytes": report.ratio([a["peak_bytes"] / b["peak_bytes"] for a, b in found]),
        }
    result = {
        "benchmark": comparison.name,
        "date": report.now(),
        **machine,
        **settings,
        "variants": variants,
        "ratio": ratio,
        "notes": list(notes),
    }
    return result | comparison.extras(result)


def print_table(comparison: Comparison, result: dict[str, Any], console: Console) -> None:
    """Prints both sides and their ratio."""
    rows = []
    for name, entry in result["variants"].items():
        if entry["step_seconds"] is None:
            rows.append([name, entry["status"]])
            continue
        step, peak = f"{entry['step_seconds']:.2f} s", f"{entry['peak_bytes'] / GIB:.2f} GiB"
        rows.append([name, step, peak, *(cell(entry) for cell in comparison.columns.values())])
    lines = comparison.lines(result)
    if result["ratio"] is not None:
        seconds, memory = result["ratio"]["step_seconds"], result["ratio"]["peak_bytes"]
        lines.append(
            f"ours / TRL: {report.ratio_text(seconds)} x the time of a step, "
            f"{report.ratio_text(memory)} x the peak memory"
        )
    lines += [*report.error_lines(result["variants"]), *result["notes"]]
    title = f"{comparison.title}, {result['model_name']}, {result['dtype']}"
    columns = ("variant", "step", "peak", *comparison.columns)
    report.print_report(title, columns, rows, lines, console)


def exit_status(result: dict[str, Any]) -> int:
    """Returns 1 if a variant failed or none has figures."""
    return report.exit_status(result["variants"].values(), "step_seconds")


def after_first(values: Sequence[float]) -> float:
    """Returns the median without the first step, which warms up."""
    return median(values[1:])


def _step_seconds(run: Outcome) -> float:
    return after_first(run["seconds"])


# --- the process of TRL's side -----------------------------------------------------------------


def make_clock() -> Any:
    """Returns a callback with ``seconds``, the times between the ends of successive steps."""
    import transformers  # takes seconds

    class Clock(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self._last = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self._last = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = time.perf_counter()
            self.seconds.append(now - self._last)
            self._last = now

    return Clock()


def lora_config(model: Any, rank: int) -> Any:
    """Returns LoRA with alpha 32 on all linear layers except the unembedding, which TRL refuses."""
    from peft import LoraConfig
    from torch import nn

    head = model.get_output_embeddings()
    linears = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear))
    names = {name.rsplit(".", 1)[-1] for name, layer in linears if layer is not head}
    return LoraConfig(r=rank, lora_alpha=32, target_modules=sorted(names), task_type="CAUSAL_LM")


def training_arguments(
    job: dict[str, Any], config: Any, folder: str, choice: Any
) -> dict[str, Any]:
    """Returns the arguments common to all TRL configs, with our optimizer and precision.

    ``config`` has our learning rate and Adam settings, ``choice`` is the device and dtype.
    """
    return {
        "output_dir": folder,
        "max_steps": job["steps"],
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "adam_beta1": config.adam_beta1,
        "adam_beta2": config.adam_beta2,
        "adam_epsilon": config.adam_eps,
        "weight_decay": config.weight_decay,
        "max_grad_norm": 0.0,
        "bf16": str(choice.dtype) == "torch.bfloat16",
        "use_cpu": choice.device.type == "cpu",
        "gradient_checkpointing": job["trl_gradient_checkpointing"],
        "seed": job["seed"],
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
