"""Runs of the loops as parts of a study: each in a folder of its own, from which it resumes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook.checkpoint_utils import get_last_checkpoint
from tinker_cookbook.eval.statistics import pass_at_k
from tinker_cookbook.recipes.tiny_models.dialogues import RENDERER
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.rl import train as rl_train
from tinker_cookbook.rl.envs.problem_env import ProblemGroupBuilder
from tinker_cookbook.rl.task import TaskDatasetBuilder
from tinker_cookbook.rl.types import (
    Env,
    EnvGroupBuilder,
    Metrics,
    RLDatasetBuilder,
    Trajectory,
)
from tinker_cookbook.run.jsonl import read_rows
from tinker_cookbook.run.paths import write_atomically
from tinker_cookbook.supervised import train as sl_train
from tinker_cookbook.supervised.conversation_file import FromConversationFileBuilder
from tinker_cookbook.supervised.types import (
    ChatDatasetBuilder,
    ChatDatasetBuilderCommonConfig,
)
from tinker_cookbook.utils.command_line.entrypoint import run_to_end


@dataclass(frozen=True)
class PassGroup(ProblemGroupBuilder):
    """Answers to one problem, with ``pass@2`` and so on: whether one of k answers is right."""

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Returns no reward, and pass@k for each k up to the size of the group."""
        right = sum(trajectory.reward == 1 for trajectory in trajectory_group)
        size = len(trajectory_group)
        passes = {f"pass@{k}": pass_at_k(size, right, k) for k in (2, 4, 8) if k <= size}
        return [(0.0, dict(passes)) for _ in trajectory_group]


@chz.chz
class PassBuilder(TaskDatasetBuilder):
    """Problems of a task, evaluated by pass@k."""

    def group(self, renderer: Renderer, size: int, problem: Any) -> EnvGroupBuilder:
        """Returns ``size`` answers to a problem."""
        return PassGroup(self.env_thunk(problem, renderer), size, self.tag(problem))


# Settings of all runs here: a tiny model on a CPU, of which no step but the last is kept.
_COMMON: dict[str, Any] = {
    "backend": "local",
    "dtype": "float32",
    "renderer_name": RENDERER,
    "save_every": 0,
    "record": "off",
}


def imitate(
    folder: Path, model: str, seed: int, dialogues: Sequence[list[Message]], **settings: Any
) -> str:
    """Trains an adapter on conversations; returns the path of its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "conversations.jsonl"
    rows = [json.dumps({"messages": messages}) + "\n" for messages in dialogues]
    write_atomically(file, "".join(rows).encode())
    common = chat_data(model, settings.pop("batch_size", 32))
    data = FromConversationFileBuilder(common_config=common, file_path=str(file))
    return supervise(folder, model, seed, data, **settings)


def chat_data(model: str, batch_size: int = 32) -> ChatDatasetBuilderCommonConfig:
    """Returns the chat format of the tiny models, for data of supervised runs."""
    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name=RENDERER, batch_size=batch_size
    )


def supervise(
    folder: Path, model: str, seed: int, data: ChatDatasetBuilder, **settings: Any
) -> str:
    """Trains an adapter on supervised data; returns the path of its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = sl_train.Config(
        log_path=str(folder),
        model_name=model,
        dataset_builder=data,
        seed=seed,
        eval_every=0,
        show_samples=0,
        num_epochs=1000,
        **_COMMON | settings,
    )
    with _output_in(folder):
        run_to_end(sl_train.main(config))
    return state_of(folder)


def reinforce(
    folder: Path,
    model: str,
    seed: int,
    env: Callable[..., Env],
    problems: Sequence[Any],
    test_problems: Sequence[Any],
    builder: type[TaskDatasetBuilder] = PassBuilder,
    data: Mapping[str, Any] | None = None,
    **settings: Any,
) -> list[dict[str, float]]:
    """Trains an adapter by reinforcement; returns the rows of its metrics that have an evaluation.

    Args:
        env: ``env(problem, renderer=renderer)`` returns the environment of one episode.
        builder: Class of the dataset, and ``data``: its settings.
    """
    sizes = {"batch_size": 8, "group_size": 8, "test_group_size": 8, **(data or {})}
    dataset = builder(
        model_name_for_tokenizer=model,
        renderer_name=RENDERER,
        seed=seed,
        env=env,
        problems=problems,
        test_problems=test_problems,
        **sizes,
    )
    rows = reinforce_on(folder, model, seed, dataset, **settings)
    return [row for row in rows if "test/env/all/reward/total" in row]


def reinforce_on(
    folder: Path, model: str, seed: int, dataset: RLDatasetBuilder, **settings: Any
) -> list[dict[str, float]]:
    """Trains an adapter by reinforcement on a dataset; returns all rows of its metrics."""
    config = rl_train.Config(
        log_path=str(folder),
        model_name=model,
        dataset_builder=dataset,
        seed=seed,
        loss_normalization="tokens",
        **_COMMON | settings,
    )
    folder.mkdir(parents=True, exist_ok=True)
    # Transcripts would take as long to write as a tiny model takes to answer.
    config = chz.replace(config, num_groups_to_log=0, rollout_json_export=False)
    with _output_in(folder):
        run_to_end(rl_train.main(config))
    return list(read_rows(folder / "metrics.jsonl"))


def state_of(folder: Path) -> str:
    """Returns the path of the last weights of a run, to train on from."""
    last = get_last_checkpoint(folder)
    assert last is not None
    return str(last.state_path)


@contextlib.contextmanager
def _output_in(folder: Path) -> Iterator[None]:
    """Appends what a run prints to a file, because a study has many runs."""
    with (
        (folder / "output.log").open("a", encoding="utf-8") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        yield
