"""Parts of a benchmark: each runs in a process of its own and comes back as a dictionary."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine import shapes
from benchmarks.engine.config import Settings
from benchmarks.engine.flops import ModelSize, model_size
from tinker_cookbook.engine.devices import DeviceChoice
from tinker_cookbook.engine.model.resolve import resolve_model
from tinker_cookbook.exceptions import TrainingError

_WORKER = "benchmarks.engine.worker"
_STDERR_LINES = 15

Outcome = dict[str, Any]
"""What became of a process: ``status`` ("ok", "failed", "killed" or "out of memory"), ``error``
where it is not ok, and the figures where it is."""


@dataclass(frozen=True)
class ModelFiles:
    """Where the workers find the model, and its size."""

    folder: Path
    size: ModelSize


def read_model(config: Settings, work: Path) -> ModelFiles:
    """Finds the model, or writes the configuration of a random one into ``work``."""
    if shapes.is_shape(config.model):
        folder = work / "model"
        shapes.shape_config(config.model).save_pretrained(folder)
    else:
        folder = Path(resolve_model(config.model).folder)
    return ModelFiles(folder, model_size(folder))


def draw_weights(config: Settings, choice: DeviceChoice, model: ModelFiles, work: Path) -> None:
    """Makes the weights of a random model; nothing to do for a real one."""
    if not shapes.is_shape(config.model):
        return
    job = {"folder": str(model.folder), "seed": config.seed}
    outcome = run_job("random_model", job, choice, work)
    if outcome["status"] != "ok":
        raise TrainingError(
            f"model: random weights for {config.model} could not be made on {choice.device}: "
            f"{outcome['status']}, {outcome['error']}; choose a smaller shape or another dtype"
        )


def run_job(
    kind: str,
    job: dict[str, Any],
    choice: DeviceChoice,
    work: Path,
    environment: dict[str, str] | None = None,
) -> Outcome:
    """Runs a job of the worker (see ``worker``) and waits for it."""
    job = job | {"kind": kind, "device": str(choice.device), "dtype": dtype_name(choice)}
    job_file, result_file = work / "job.json", work / "result.json"
    job_file.write_text(json.dumps(job), encoding="utf-8")
    command = [sys.executable, "-m", _WORKER, str(job_file), str(result_file)]
    return run_process(command, result_file, work / "log", environment)


def run_process(
    command: list[str], result_file: Path, log_file: Path, environment: dict[str, str] | None = None
) -> Outcome:
    """Runs a command that writes its result as JSON; a failure's last lines go to stderr."""
    result_file.unlink(missing_ok=True)
    with log_file.open("wb") as log:
        done = subprocess.run(
            command, stdout=log, stderr=log, env={**os.environ, **(environment or {})}, check=False
        )
    if result_file.is_file():
        outcome = json.loads(result_file.read_text(encoding="utf-8"))
    elif done.returncode == -signal.SIGKILL:
        outcome = {"status": "killed", "error": "killed by the system, most likely out of memory"}
    elif done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        outcome = {"status": "killed", "error": f"ended by signal {name}"}
    else:
        outcome = {"status": "failed", "error": f"exit status {done.returncode}"}
    if outcome["status"] == "failed":
        last = log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join(last[-_STDERR_LINES:]), file=sys.stderr)
    return outcome


def dtype_name(choice: DeviceChoice) -> str:
    """torch's name of the type, without its prefix."""
    return str(choice.dtype).removeprefix("torch.")


def describe_choice(config: Settings, choice: DeviceChoice) -> str:
    """One line on where the benchmark runs and why."""
    return (
        f"{config.model} on {choice.device} ({choice.device_reason}) in "
        f"{dtype_name(choice)} ({choice.dtype_reason})"
    )
