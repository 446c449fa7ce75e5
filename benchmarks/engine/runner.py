"""Runs the training benchmark: the engine and the references in turn."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.engine import conversations, report, shapes
from benchmarks.engine.config import Config, check_config
from benchmarks.engine.flops import ModelSize
from benchmarks.engine.jobs import (
    create_weights,
    describe_choice,
    read_model,
    run_job,
    settings_of,
)
from benchmarks.harness import Outcome, describe_machine, interleave
from benchmarks.report import deliver
from tinker_cookbook.engine.devices import DeviceChoice, choose_device
from tinker_cookbook.exceptions import ConfigurationError


@dataclass(frozen=True)
class Workload:
    """Model and batches of one benchmark, and their files."""

    folder: Path
    data_file: Path
    size: ModelSize
    rows: list[conversations.Conversation]
    notes: list[str]


def run_benchmark(config: Config) -> int:
    """Measures and prints; returns the exit status.

    It is 0 if every variant has a figure, or ran out of memory, and the variants agree on the loss.
    """
    console = Console(highlight=False)
    result = measure(config, console)
    deliver(result, config.output, console)
    return report.exit_status(result)


def measure(config: Config, console: Console) -> dict[str, Any]:
    """Measures, prints the table and returns the JSON object."""
    check_config(config)
    choice = choose_device(config.device, config.dtype)
    with tempfile.TemporaryDirectory(prefix="tinker-cookbook-bench-") as temporary:
        work = Path(temporary)
        load = _prepare(config, choice, work)
        console.print(describe_choice(config, choice))
        ceilings = [run_job("ceilings", {}, choice, work)]
        runs = _interleaved(config, choice, load, work, console)
        ceilings.append(run_job("ceilings", {}, choice, work))
    result = report.build(
        settings=settings_of(config, choice, "variants", "trl_python"),
        machine=describe_machine(choice.device),
        size=load.size,
        timed=load.rows[config.batch_size * config.warmup :],
        runs=runs,
        ceilings=ceilings,
        notes=load.notes,
    )
    report.print_table(result, console)
    return result


def _prepare(config: Config, choice: DeviceChoice, work: Path) -> Workload:
    """Checks the settings, then creates the files that the workers load."""
    random_data = conversations.is_random(config.data)
    model = read_model(config, work)
    size = model.size
    max_length = min(config.max_length or size.context, size.context)
    if random_data:
        generated = conversations.random_conversations(
            config.data, config.conversations_needed, size.vocab, config.seed
        )
        found = conversations.cut(generated, max_length)
    else:
        found = _from_file(config, model.folder, max_length)
    data_file = work / "data.npz"
    conversations.save(data_file, found.rows)
    create_weights(config, choice, model, work)
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
    names = (
        *("batch_size", "rank", "seed", "warmup", "train_unembed"),
        *("trl_batch_size", "trl_gradient_checkpointing"),
    )
    job = {name: getattr(config, name) for name in names}
    job |= {"folder": str(load.folder), "data": str(load.data_file)}
    timed = load.rows[config.batch_size * config.warmup :]
    tokens = sum(len(row.tokens) for row in timed)
    runs: dict[str, list[Outcome]] = {variant: [] for variant in config.variants}
    interleave(
        runs,
        config.repeats,
        lambda variant: run_job(
            "variant",
            job | {"variant": variant},
            choice,
            work,
            _environment(variant),
            config.trl_python if variant == "trl" else None,
            config.before if variant == "before" else None,
        ),
        lambda outcome: report.one_line(outcome, tokens),
        "repeat",
        console,
    )
    return runs


def _environment(variant: str) -> dict[str, str]:
    """Returns additional variables; the package does not change a variable that is set.

    For "stock" they are the defaults of the C runtime: glibc raises its thresholds to 32 and 64 MiB
    as a program frees large buffers, libgomp spins 300,000 times, and oneDNN keeps 1024 kernels.
    """
    if variant == "trl":  # its Python need not have this package installed
        return {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    if variant != "stock":
        return {}
    return {
        "GOMP_SPINCOUNT": "300000",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024",
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
        "MALLOC_ARENA_MAX": str(8 * (os.cpu_count() or 1)),
    }
