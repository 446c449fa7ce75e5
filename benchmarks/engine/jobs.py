"""Jobs of the engine's benchmarks, and the model that they load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz

from benchmarks.engine import shapes
from benchmarks.engine.config import Settings
from benchmarks.engine.flops import ModelSize, model_size
from benchmarks.harness import Outcome, dtype_name, run_module
from tinker_cookbook.engine.devices import DeviceChoice
from tinker_cookbook.engine.model.resolve import resolve_model
from tinker_cookbook.exceptions import TrainingError


@dataclass(frozen=True)
class ModelFiles:
    """Folder and size of the model."""

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


def create_weights(config: Settings, choice: DeviceChoice, model: ModelFiles, work: Path) -> None:
    """Creates the weights of a random model; does nothing for a real one."""
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
    python: str | None = None,
    checkout: str | None = None,
) -> Outcome:
    """Runs a job of ``benchmarks.engine.worker`` in a process of its own."""
    job = job | {"kind": kind, "device": str(choice.device), "dtype": dtype_name(choice)}
    module = "benchmarks.engine.worker"
    return run_module(module, job, work, environment, python, checkout)


def settings_of(config: Settings, choice: DeviceChoice, *excluded: str) -> dict[str, Any]:
    """Returns the settings for the JSON object, with the dtype as resolved."""
    excluded = ("work", "device", "output", *excluded)
    settings = {name: value for name, value in chz.asdict(config).items() if name not in excluded}
    return settings | {"dtype": dtype_name(choice)}


def describe_choice(config: Settings, choice: DeviceChoice) -> str:
    """Returns a line on where the benchmark runs and why."""
    return (
        f"{config.model} on {choice.device} ({choice.device_reason}) in "
        f"{dtype_name(choice)} ({choice.dtype_reason})"
    )
