"""Runs the benchmark of images: the engine and plain transformers with peft in turn."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks import report
from benchmarks.engine.config import VisionConfig, check_vision_config
from benchmarks.engine.jobs import describe_choice, run_job, settings_of
from benchmarks.engine.shapes import is_shape, write_vision_shape
from benchmarks.harness import Outcome, describe_machine, interleave
from benchmarks.report import GIB, good, pairs, ratio, ratio_text
from tinker_cookbook.engine.devices import choose_device
from tinker_cookbook.engine.model.resolve import model_config, resolve_model

VARIANTS = ("engine", "plain")
_TIMED = ("new_images", "seen_images", "group", "prompt", "answers")
_TOLERANCE = {"float32": 1e-3}


def run_benchmark(config: VisionConfig) -> int:
    """Measures and prints; returns the exit status: 0 if both variants ran and agree on losses."""
    check_vision_config(config)
    choice = choose_device(config.device, config.dtype)
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="tinker-cookbook-bench-") as temporary:
        work = Path(temporary)
        folder = work / "model"
        if is_shape(config.model):
            write_vision_shape(config.model, folder)
            job = {"folder": str(folder), "seed": config.seed}
            run_job("random_model", job, choice, work)
        else:
            folder = Path(resolve_model(config.model).folder)
        console.print(describe_choice(config, choice))
        settings = settings_of(config, choice)
        vocabulary = int(model_config(folder)["text_config"]["vocab_size"])
        job = settings | {"folder": str(folder), "vocabulary": vocabulary}
        runs: dict[str, list[Outcome]] = {variant: [] for variant in VARIANTS}
        interleave(
            runs,
            config.repeats,
            lambda variant: run_job("vision", job | {"variant": variant}, choice, work),
            _line,
            "images",
            console,
        )
    result = _result(runs, settings) | describe_machine(choice.device)
    _print(result, console)
    report.deliver(result, config.output, console)
    entries = result["variants"].values()
    return report.exit_status(entries, "seconds", result["agree"])


def _result(runs: dict[str, list[Outcome]], settings: dict[str, Any]) -> dict[str, Any]:
    found = pairs(runs["engine"], runs["plain"])
    variants = {name: report.variant_entry(of, "seconds") for name, of in runs.items()}
    for name, of in runs.items():
        if finished := good(of):
            variants[name]["seconds"] = {
                part: float(np.median([run[part] for run in finished])) for part in _TIMED
            }
    losses = [np.subtract(a["losses"], b["losses"]) for a, b in found]
    worst = float(np.abs(losses).max()) if losses else None
    return {
        "benchmark": "vision",
        "date": report.now(),
        **settings,
        "variants": variants,
        "loss_difference": worst,
        "agree": worst is None or worst <= _TOLERANCE.get(settings["dtype"], 0.1),
        "speed": {part: ratio([b[part] / a[part] for a, b in found]) for part in _TIMED}
        if found
        else {},
        "peak_bytes": ratio([a["peak_bytes"] / b["peak_bytes"] for a, b in found])
        if found
        else None,
        # The prompt's part of a group of answers: what is more than the answers alone.
        "prompts_computed": ratio([(a["answers"] - a["again"]) / a["prompt"] for a, _ in found])
        if found
        else None,
    }


def _line(run: Outcome) -> str:
    return report.outcome_line(
        run, lambda run: ", ".join(f"{part} {run[part]:.2f} s" for part in _TIMED)
    )


def _print(result: dict[str, Any], console: Console) -> None:
    rows = []
    for name, entry in result["variants"].items():
        seconds = entry["seconds"]
        cells = [entry["status"]] if seconds is None else [f"{seconds[p]:.2f} s" for p in _TIMED]
        peak = entry["peak_bytes"]
        rows.append([name, *cells, *([] if peak is None else [f"{peak / GIB:.2f} GiB"])])
    lines = []
    if result["speed"]:
        lines += [f"engine / plain, {p}: {ratio_text(r)} x" for p, r in result["speed"].items()]
        lines += [
            f"engine / plain: {ratio_text(result['peak_bytes'])} x peak memory of training",
            f"a group computes its prompt {ratio_text(result['prompts_computed'])} times",
            f"largest difference of losses {result['loss_difference']:.1e}",
        ]
    lines += report.error_lines(result["variants"])
    title = f"Images, {result['model']}, {result['dtype']}"
    report.print_report(title, ("", *_TIMED, "peak"), rows, lines, console)
