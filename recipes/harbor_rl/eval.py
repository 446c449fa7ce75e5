"""Evaluates a model on terminal tasks.

python -m recipes.harbor_rl.eval model_name=…
python -m recipes.harbor_rl.eval dataset=FOLDER checkpoint_url=tinker://… model_name=…
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import chz
import numpy as np
from rich.table import Table

from tinker_cookbook.backends.sampler_options import SamplerOptions
from tinker_cookbook.cli_utils import default_log_path
from tinker_cookbook.completers import TinkerTokenCompleter, TokenCompleter
from tinker_cookbook.display import format_trajectory
from tinker_cookbook.recipes.harbor_rl.harbor_env import (
    EXAMPLES,
    HarborEnvGroupBuilder,
    HarborTask,
    SandboxFactory,
    default_sandbox_factory,
    load_harbor_tasks,
)
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.rollouts import do_single_rollout
from tinker_cookbook.rl.rollouts.async_utils import Slots
from tinker_cookbook.run.weights_paths import weights_field
from tinker_cookbook.sampling_model import SamplingModelSettings, open_sampling_model
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.training.config import BackendSettings, number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import get_console

logger = logging.getLogger(__name__)


@chz.chz
class EvalConfig(BackendSettings, SamplerOptions):
    """Settings of the evaluation."""

    model_name: str = chz.field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct", doc="Base model; Hub name or local folder"
    )
    dataset: str = chz.field(
        default=EXAMPLES, doc="Folder of tasks, or a dataset in Harbor's cache"
    )
    output_path: str = chz.field(
        default=default_log_path("harbor_eval"),
        doc="Folder in which each evaluation creates its own folder",
    )
    max_turns: int = number(10, "Maximum answers of the model", low=1)
    max_tokens: int = number(2048, "Maximum tokens of an answer", low=1)
    temperature: float = chz.field(default=0.0, doc="Sampling temperature; 0 is greedy")
    sandbox_timeout: int = chz.field(default=3600, doc="Lifetime of a sandbox in seconds")
    command_timeout: int = chz.field(default=120, doc="Seconds for a command of the model")
    grader_timeout: int = chz.field(default=60, doc="Seconds for the tests")
    max_tasks: int | None = number(
        None, "Number of tasks; the first ones are used; default: all", low=1
    )
    max_concurrent: int = number(4, "Tasks that run concurrently", low=1)
    checkpoint_url: str | None = weights_field(
        "sampler_weights", "Checkpoint; default: the base model"
    )
    renderer_name: str | None = chz.field(
        default=None, doc="Chat format; default: the one of the run, else the model's"
    )
    seed: int = chz.field(default=0, doc="Seed of the samples")


@dataclass
class TaskResult:
    """Result of one task. With an ``error`` it has no reward that counts."""

    task_name: str
    reward: float
    reward_details: Mapping[str, float]
    turns_used: int
    time_seconds: float
    error: str | None = None
    trajectory_str: str | None = None


async def evaluate_task(
    task: HarborTask,
    policy: TokenCompleter,
    renderer: Renderer,
    sandbox_factory: SandboxFactory,
    config: EvalConfig,
    results_dir: Path,
    lock: asyncio.Lock,
    tokenizer: Tokenizer | None = None,
) -> TaskResult:
    """Runs and grades one task, and adds its result to the files of ``results_dir``."""
    started = time.monotonic()
    group = HarborEnvGroupBuilder(
        task,
        config.model_name,
        None,
        config.max_turns,
        1,
        config.sandbox_timeout,
        config.command_timeout,
        config.grader_timeout,
        max_trajectory_tokens=None,
        sandbox_factory=sandbox_factory,
    )
    try:
        trajectory = await do_single_rollout(policy, await group.make_env(0, renderer))
        turns = trajectory.transitions
        result = TaskResult(
            task.task_name,
            trajectory.reward,
            dict(turns[-1].metrics) if turns else {},
            len(turns),
            round(time.monotonic() - started, 1),
            trajectory_str=None if tokenizer is None else format_trajectory(trajectory, tokenizer),
        )
    except Exception as error:
        # One broken task must not end the others; it is reported apart from rewards of 0.
        logger.exception("task %s failed", task.task_name)
        seconds = round(time.monotonic() - started, 1)
        result = TaskResult(task.task_name, 0.0, {}, 0, seconds, error=str(error))
    finally:
        await group.cleanup()
    fields = asdict(result)
    text = fields.pop("trajectory_str")
    async with lock:
        with (results_dir / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")
    if text:
        (results_dir / f"{task.task_name}.txt").write_text(text, encoding="utf-8")
    return result


async def run_eval(
    config: EvalConfig,
    tasks: list[HarborTask],
    sandbox_factory: SandboxFactory = default_sandbox_factory,
) -> list[TaskResult]:
    """Evaluates on tasks and prints a summary; files appear as tasks end."""
    settings = SamplingModelSettings.of(
        config,
        model_path=config.checkpoint_url,
        model_name=config.model_name,
        renderer_name=config.renderer_name,
    )
    settings.check()
    tasks = tasks[: config.max_tasks]
    connection = await asyncio.to_thread(settings.connect)
    model = await open_sampling_model(connection, settings)
    folder = Path(config.output_path) / datetime.now().strftime("%Y%m%d_%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    policy = TinkerTokenCompleter(
        model.client, config.max_tokens, config.temperature, seed=config.seed
    )
    lock, slots = asyncio.Lock(), Slots(config.max_concurrent)

    async def one(index: int) -> TaskResult:
        async with slots.one():
            return await evaluate_task(
                tasks[index],
                policy.derived(index),
                model.renderer,
                sandbox_factory,
                config,
                folder,
                lock,
                model.tokenizer,
            )

    results = list(await asyncio.gather(*map(one, range(len(tasks)))))
    print_summary(model.name, results, folder)
    return results


def print_summary(name: str, results: list[TaskResult], folder: Path) -> None:
    """Prints a line for each task, and the mean reward of those without an error."""
    table = Table("task", "reward", "answers", "seconds", "")
    for result in results:
        reward = "–" if result.error else f"{result.reward:g}"
        row = (str(result.turns_used), f"{result.time_seconds:.1f}", result.error or "")
        table.add_row(result.task_name, reward, *row)
    console = get_console()
    console.print(table)
    rewards = [result.reward for result in results if result.error is None]
    mean = np.mean(rewards or [np.nan])
    console.print(
        f"{name}: mean reward {mean:.3f} of {len(rewards)} tasks, {len(results) - len(rewards)} "
        f"with an error are not counted; {folder}",
        soft_wrap=True,
    )


async def main(config: EvalConfig) -> None:
    """Evaluates a model on the tasks of a dataset."""
    await run_eval(config, load_harbor_tasks(config.dataset))


if __name__ == "__main__":
    run_entrypoint(main)
