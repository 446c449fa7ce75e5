"""Runs the parts of the benchmark in turn, each in a process of its own, and prints the report."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.engine import conversations, report, shapes, summary
from benchmarks.engine.config import Config, check_config
from benchmarks.engine.flops import ModelSize
from benchmarks.engine.jobs import (
    Outcome,
    describe_choice,
    draw_weights,
    dtype_name,
    read_model,
    run_job,
)
from benchmarks.engine.machine import describe_machine
from tinker_cookbook.engine.devices import DeviceChoice, choose_device
from tinker_cookbook.exceptions import ConfigurationError


@dataclass(frozen=True)
class Workload:
    """Model and batches of one benchmark, and where the workers find them."""

    folder: Path
    data_file: Path
    size: ModelSize
    rows: list[conversations.Conversation]
    notes: list[str]


def run_benchmark(config: Config) -> int:
    """Measures and prints; returns the exit status: 0 if every variant asked for has its number,
    or lacks it for want of memory, and the variants agree on the loss."""
    check_config(config)
    choice = choose_device(config.device, config.dtype)
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="tinker-cookbook-bench-") as temporary:
        work = Path(temporary)
        load = _prepare(config, choice, work)
        console.print(describe_choice(config, choice))
        ceilings = [_ceilings(choice, load, work)]
        runs = _interleaved(config, choice, load, work, console)
        ceilings.append(_ceilings(choice, load, work))
    result = report.build(
        settings=_settings(config, choice),
        machine=describe_machine(choice.device),
        size=load.size,
        timed=load.rows[config.batch_size * config.warmup :],
        runs=runs,
        ceilings=ceilings,
        notes=load.notes,
    )
    report.print_table(result, console)
    summary.deliver(result, config.output, console)
    return report.exit_status(result)


def _settings(config: Config, choice: DeviceChoice) -> dict[str, Any]:
    """The settings as JSON, with the dtype as resolved."""
    names = ("model", "data", "batch_size", "steps", "warmup", "repeats", "rank", "max_length")
    settings = {name: getattr(config, name) for name in names}
    return settings | {"seed": config.seed, "dtype": dtype_name(choice)}


def _prepare(config: Config, choice: DeviceChoice, work: Path) -> Workload:
    """Checks everything that can be checked, then makes what the workers load."""
    random_data = conversations.is_random(config.data)
    model = read_model(config, work)
    size = model.size
    max_length = min(config.max_length or size.context, size.context)
    if random_data:
        drawn = conversations.random_conversations(
            config.data, config.conversations_needed, size.vocab, config.seed
        )
        found = conversations.cut(drawn, max_length)
    else:
        found = _from_file(config, model.folder, max_length)
    data_file = work / "data.npz"
    conversations.save(data_file, found.rows)
    draw_weights(config, choice, model, work)
    return Workload(model.folder, data_file, size, found.rows, found.notes)


def _from_file(config: Config, folder: Path, max_length: int) -> conversations.Conversations:
    from transformers import AutoTokenizer

    path = Path(config.data).expanduser()
    if shapes.is_shape(config.model):
        raise ConfigurationError(
            f"data: got a file, but {config.model} has no tokenizer to read it with; set "
            "data=random:40-400, or model= to a real model"
        )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return conversations.read_conversations(
        path, tokenizer, config.conversations_needed, config.seed, max_length
    )


def _interleaved(
    config: Config, choice: DeviceChoice, load: Workload, work: Path, console: Console
) -> dict[str, list[Outcome]]:
    """A B A B; a variant that failed is not tried again."""
    runs: dict[str, list[Outcome]] = {variant: [] for variant in config.variants}
    for repeat in range(1, config.repeats + 1):
        for variant in config.variants:
            if runs[variant] and runs[variant][-1]["status"] != "ok":
                continue
            job = {
                "variant": variant,
                "folder": str(load.folder),
                "data": str(load.data_file),
                "batch_size": config.batch_size,
                "rank": config.rank,
                "seed": config.seed,
                "warmup": config.warmup,
            }
            outcome = run_job("variant", job, choice, work, _environment(variant))
            runs[variant].append(outcome)
            timed = load.rows[config.batch_size * config.warmup :]
            word = report.one_line(outcome, sum(len(row.tokens) for row in timed))
            console.print(f"repeat {repeat}/{config.repeats} {variant}: {word}", markup=False)
    return runs


def _ceilings(choice: DeviceChoice, load: Workload, work: Path) -> Outcome:
    tokens = min(4096, max(16, sum(len(row.tokens) for row in load.rows)))
    job = {"shape": (tokens, load.size.hidden, load.size.inner)}
    return run_job("ceilings", job, choice, work)


def _environment(variant: str) -> dict[str, str]:
    """Variables beside the inherited ones; a variable that is set keeps the package's hands off.

    For "stock" they are what a C runtime without settings comes to: glibc raises its thresholds
    to 32 and 64 MiB by itself as a program frees large buffers, libgomp spins 300,000 times, and
    oneDNN keeps 1024 kernels.
    """
    if variant != "stock":
        return {}
    return {
        "GOMP_SPINCOUNT": "300000",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024",
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
        "MALLOC_ARENA_MAX": str(8 * (os.cpu_count() or 1)),
    }
