"""Evaluates a model or checkpoint on an environment of the verifiers library.

python -m recipes.verifiers_rl.evaluate vf_env_id=my-taskset model_path=tinker://…
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any, TypedDict

import chz
import numpy as np
from rich.table import Table

from tinker_cookbook.recipes.verifiers_rl.train import VerifiersSettings, dataset_builder
from tinker_cookbook.rl.test_evaluator import RLTestSetEvaluator
from tinker_cookbook.rl.types import PARSE_ERROR_MASKED_METRIC_KEY, TrajectoryGroup
from tinker_cookbook.sampling_model import (
    SamplingModel,
    SamplingModelSettings,
    open_sampling_model,
)
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import get_console


class Results(TypedDict):
    """Rewards and metrics of all rollouts, ordered by task."""

    reward: list[float]
    metrics: dict[str, list[float]]
    completion: list[str]
    """Text that the model sampled in each rollout, without the environment's."""


@chz.chz
class CLIConfig(VerifiersSettings, SamplingModelSettings):
    """Settings of the evaluation."""

    num_examples: int = number(5, "Number of tasks; the first ones are used", low=1)
    rollouts_per_example: int = number(3, "Rollouts of each task", low=1)
    max_concurrent: int = number(32, "Rollouts that run concurrently", low=1)
    max_tokens: int = chz.field(default=1024, doc="Maximum tokens of a response")
    temperature: float = chz.field(default=1.0, doc="Sampling temperature; 0 is greedy")
    seed: int = chz.field(default=0, doc="Seed of the samples")


async def evaluate(
    vf_env_id: str,
    vf_env_args: dict,
    model_name: str | None,
    num_examples: int,
    rollouts_per_example: int,
    max_concurrent: int,
    max_tokens: int,
    temperature: float,
    model_path: str | None = None,
    **others: Any,
) -> Results:
    """Evaluates a model and prints the results; ``others`` are additional fields of
    ``CLIConfig``."""
    return await cli_main(
        CLIConfig(
            vf_env_id=vf_env_id,
            vf_env_args=json.dumps(vf_env_args),
            model_name=model_name,
            num_examples=num_examples,
            rollouts_per_example=rollouts_per_example,
            max_concurrent=max_concurrent,
            max_tokens=max_tokens,
            temperature=temperature,
            model_path=model_path,
            **others,
        )
    )


async def cli_main(config: CLIConfig) -> Results:
    """Runs the evaluation, prints its results and returns them."""
    config.check()
    started = time.monotonic()
    connection = await asyncio.to_thread(config.connect)
    model = await open_sampling_model(connection, config)
    size = config.rollouts_per_example
    # Request no more tasks than needed: a taskset may generate them endlessly.
    limited = chz.replace(config, dataset_n=config.num_examples)
    builder = dataset_builder(
        limited, model.model_name, model.renderer_name,
        group_size=size, groups_per_batch=config.num_examples,
    )  # fmt: skip
    dataset, _ = await builder()
    evaluator = RLTestSetEvaluator(
        dataset,
        config.max_tokens,
        num_groups_to_log=config.num_examples,
        temperature=config.temperature,
        seed=config.seed,
        # Whole groups wait for their turn, so that no more rollouts than allowed are open.
        max_groups_in_flight=max(1, config.max_concurrent // size),
    )
    await evaluator(model.client)
    results = _results(evaluator.last_groups, model)
    seconds, count = time.monotonic() - started, len(evaluator.last_groups)
    log_results(results, config.vf_env_id, model.name, count, size, seconds)
    return results


def _results(groups: Sequence[TrajectoryGroup], model: SamplingModel) -> Results:
    rewards: list[float] = []
    completions: list[str] = []
    metrics: dict[str, list[float]] = {}
    for group in groups:
        rewards += group.get_total_rewards()
        for trajectory, of_group in zip(group.trajectories_G, group.metrics_G, strict=True):
            turns = trajectory.transitions
            # Turns of agents that are not trained, such as a simulated user, are left out.
            own_turns = [
                turn for turn in turns if not turn.metrics.get(PARSE_ERROR_MASKED_METRIC_KEY)
            ]
            texts = [str(model.tokenizer.decode(turn.ac.tokens)) for turn in own_turns]
            completions.append("\n".join(texts))
            # The last turn has the metrics of the episode.
            own = turns[-1].metrics if turns else {}
            for name, value in {**own, **of_group}.items():
                if name == PARSE_ERROR_MASKED_METRIC_KEY:
                    continue
                metrics.setdefault(name, []).append(float(value))
    return {"reward": rewards, "metrics": metrics, "completion": completions}


def log_results(
    results: Results,
    vf_env_id: str,
    model_name: str,
    num_examples: int,
    rollouts_per_example: int,
    time_s: float,
) -> None:
    """Prints mean, standard error and range of the reward and of each metric, and one answer."""
    console = get_console()
    sizes = f"{num_examples} tasks, {rollouts_per_example} rollouts each"
    console.print(f"{vf_env_id}: {sizes}, {model_name}, {time_s:.1f} s", soft_wrap=True)
    table = Table("", "mean", "± standard error", "least", "most")
    for name, values in (("reward", results["reward"]), *sorted(results["metrics"].items())):
        # Rollouts of one task are correlated, so the standard error is computed from the tasks'
        # means.
        tasks = [
            float(np.mean(values[i : i + rollouts_per_example]))
            for i in range(0, len(values), rollouts_per_example)
        ]
        error = np.std(tasks, ddof=1) / np.sqrt(len(tasks)) if len(tasks) > 1 else float("nan")
        row = (np.mean(values), error, min(values), max(values))
        table.add_row(name, *(f"{value:.3f}" for value in row))
    console.print(table)
    best = int(np.argmax(results["reward"]))
    console.print(f"the answer with the highest reward ({results['reward'][best]:.3f}):")
    console.print(results["completion"][best], markup=False, soft_wrap=True)


async def main(config: CLIConfig) -> None:
    """Evaluates a model on the environment."""
    await cli_main(config)


if __name__ == "__main__":
    run_entrypoint(main)
