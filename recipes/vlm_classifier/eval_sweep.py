"""Accuracy of all runs of a folder, as JSON.

    python -m recipes.vlm_classifier.eval_sweep experiment_dir=FOLDER output_file=results.json

Dataset, model and chat format are those of each run. ``early_stopping_checkpoints`` has the step to
evaluate for runs that should not be evaluated at their end.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook.backends import ServiceClient
from tinker_cookbook.checkpoint_utils import (
    CheckpointRecord,
    get_last_checkpoint,
    load_checkpoints_file,
)
from tinker_cookbook.exceptions import CheckpointError
from tinker_cookbook.model_info import resolve_renderer_name
from tinker_cookbook.recipes.vlm_classifier.eval import SamplingOptions, get_evaluator_builder
from tinker_cookbook.run.paths import write_atomically
from tinker_cookbook.run.renderer_names import get_renderer_name_from_checkpoint_async
from tinker_cookbook.sampling_model import SamplingModelSettings
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import print_line

_IN_NAMES = {
    "lora_rank": (r"-(\d+)rank-", int),
    "learning_rate": (r"-([\d.e+-]+)lr-", float),
    "batch_size": (r"-(\d+)batch", int),
    "examples_per_class": (r"-(\d+)shot-", int),
    "subset_seed": (r"-seed(\d+)-", int),
    "date": (r"-(\d{4}-\d{2}-\d{2})$", str),
}
"""Settings in the name of a run's folder."""


@chz.chz
class EvalConfig(SamplingModelSettings, SamplingOptions):
    """Settings of the evaluation of all runs of a folder."""

    experiment_dir: str = chz.field(doc="Folder of the runs' folders")
    output_file: str = chz.field(doc="JSON file to write")
    max_parallel_tasks: int = number(1024, "Answers of a run sampled at the same time", low=1)
    max_parallel_evals: int = number(5, "Runs evaluated at the same time", low=1)
    early_stopping_checkpoints: dict[str, int] | None = chz.field(
        default=None, doc="Run -> step of the checkpoint to evaluate; default: the last one"
    )


def get_checkpoint_at_step(
    log_dir: str, step: int, required_key: str = "sampler_path"
) -> CheckpointRecord | None:
    """Returns the checkpoint of a run at a step, or None if it has none with ``required_key``."""
    records = load_checkpoints_file(log_dir)
    return next((r for r in records if r.batch == step and r.get(required_key)), None)


def parse_hyperparams_from_experiment_name(experiment_name: str) -> dict[str, Any]:
    """Returns the settings in the name of a run's folder; others are missing."""
    found: dict[str, Any] = {"dataset": experiment_name.partition("-")[0]}
    for setting, (pattern, kind) in _IN_NAMES.items():
        if match := re.search(pattern, experiment_name):
            found[setting] = kind(match[1])
    return found


async def evaluate_experiment(
    experiment_name: str, eval_config: EvalConfig, service_client: ServiceClient
) -> dict[str, Any]:
    """Returns the metrics and settings of one run.

    Raises CheckpointError for a run without the checkpoint.
    """
    folder = Path(eval_config.experiment_dir).expanduser() / experiment_name
    step = (eval_config.early_stopping_checkpoints or {}).get(experiment_name)
    if step is None:
        checkpoint = get_last_checkpoint(folder, "sampler_path")
    else:
        checkpoint = get_checkpoint_at_step(str(folder), step)
    if checkpoint is None or checkpoint.sampler_path is None:
        where = "" if step is None else f" of step {step}"
        raise CheckpointError(f"{folder} has no checkpoint{where} to sample from")
    path = checkpoint.sampler_path
    info = await service_client.create_rest_client().get_weights_info_by_tinker_path(path)
    model_name = eval_config.model_name or info.base_model
    recorded = await get_renderer_name_from_checkpoint_async(service_client, path)
    renderer_name, _ = resolve_renderer_name(model_name, eval_config.renderer_name or recorded)
    settings = parse_hyperparams_from_experiment_name(experiment_name)
    # The name of the run has no path, which its record has.
    recorded_config = json.loads((folder / "config.json").read_bytes())
    evaluator = get_evaluator_builder(
        recorded_config["dataset_builder"]["dataset"],
        model_name,
        renderer_name,
        **{name: getattr(eval_config, name) for name in chz.chz_fields(SamplingOptions)},
    )()
    metrics = await evaluator(await service_client.create_sampling_client(model_path=path))
    step = checkpoint.batch
    return {"experiment_name": experiment_name, "checkpoint_step": step, **metrics, **settings}


async def evaluate_sweep(
    eval_config: EvalConfig, experiment_names: list[str]
) -> dict[str, dict[str, Any]]:
    """Returns the results of runs by name."""
    free = asyncio.Semaphore(eval_config.max_parallel_evals)
    with eval_config.connect() as connection:

        async def evaluate(name: str) -> dict[str, Any]:
            async with free:
                return await evaluate_experiment(name, eval_config, connection.service)

        results = await asyncio.gather(*map(evaluate, experiment_names))
    return dict(zip(experiment_names, results, strict=True))


async def main(config: EvalConfig) -> None:
    """Evaluates all runs of a folder, and writes the results."""
    folder, output = Path(config.experiment_dir).expanduser(), Path(config.output_file).expanduser()
    runs = [path.parent.name for path in sorted(folder.glob("*/checkpoints.jsonl"))]
    results = await evaluate_sweep(config, runs)
    text = json.dumps(results, indent=2)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, f"{text}\n".encode())
    print_line(text)


def run_eval_sweep(eval_config: EvalConfig) -> None:
    """Evaluates all runs of a folder, for code without an event loop."""
    asyncio.run(main(eval_config))


if __name__ == "__main__":
    run_entrypoint(main)
