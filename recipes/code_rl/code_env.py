"""Environments of programming tasks, and datasets of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal

import chz

from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.recipes.code_rl.deepcoder_tool import (
    DeepcoderReward,
    DeepcoderTask,
    DeepcoderTool,
)
from tinker_cookbook.recipes.code_rl.tasks import (
    HUB_DATASETS,
    ONE_LINE,
    load_tasks,
    one_line_tasks,
)
from tinker_cookbook.recipes.start import check_files, renderer_of
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.rl.envs.problem_dataset import ProblemDataset, ProblemDatasetBuilder
from tinker_cookbook.rl.types import Env, EnvGroupBuilder
from tinker_cookbook.sandbox import SandboxBackend
from tinker_cookbook.tool_use import Tool, build_agent_tool_env
from tinker_cookbook.training.config import number

DATASETS = (ONE_LINE, *HUB_DATASETS)


def load_deepcoder_tasks(
    split: Literal["train", "test"] = "train", seed: int = 0
) -> list[DeepcoderTask]:
    """Returns the tasks of DeepCoder; the training split is shuffled by ``seed``."""
    tasks = load_tasks("deepcoder", split)
    if split == "train":
        random.Random(seed).shuffle(tasks)
    return tasks


@chz.chz
class DeepcoderEnvGroupBuilder(EnvGroupBuilder):
    """Group of episodes on one task.

    With ``max_turns=1`` the model answers immediately; otherwise it may call ``check_solution`` in
    ``max_turns - 1`` answers before.
    """

    task: DeepcoderTask = chz.field(doc="The problem and its tests")
    model_name: str = chz.field(doc="Model of the tokenizer")
    renderer_name: str | None = chz.field(doc="Chat format; default: the model's")
    max_turns: int = chz.field(doc="Maximum answers of an episode")
    group_size: int = chz.field(doc="Episodes per problem")
    sandbox_backend: SandboxBackend | None = chz.field(doc="Where programs run; default: local")
    timeout: int = chz.field(default=6, doc="Seconds of a test")
    format_coef: float = chz.field(default=0.1, doc="Penalty for an answer without a code block")
    max_trajectory_tokens: int = chz.field(default=32 * 1024, doc="Maximum tokens of an episode")
    max_generation_tokens: int | None = chz.field(default=None, doc="Tokens kept for an answer")
    context_overflow_reward: float = chz.field(
        default=-0.1, doc="Reward of an episode that exceeds the tokens"
    )
    partial_credit: bool = chz.field(default=False, doc="Reward the share of tests that passed")
    code_block: bool = chz.field(default=True, doc="Only code in a fenced block counts")

    async def make_envs(self) -> Sequence[Env]:
        """Returns ``group_size`` environments of the task."""
        renderer = renderer_of(self.model_name, self.renderer_name)
        reward = DeepcoderReward(
            self.task,
            self.sandbox_backend,
            self.timeout,
            self.format_coef,
            self.partial_credit,
            self.code_block,
        )
        envs: list[Env] = []
        for _ in range(self.group_size):
            tools: list[Tool] = []
            messages: list[Message] = []
            if self.max_turns > 1:
                checker = DeepcoderTool(self.task, self.sandbox_backend, self.timeout)
                tools = [checker.check_solution]
                specs = [checker.check_solution.to_spec()]
                messages = renderer.create_conversation_prefix_with_tools(tools=specs)
            envs.append(
                build_agent_tool_env(
                    renderer=renderer,
                    tools=tools,
                    initial_messages=[*messages, {"role": "user", "content": self.task.problem}],
                    reward_fn=reward,
                    max_turns=self.max_turns,
                    max_trajectory_tokens=self.max_trajectory_tokens,
                    max_generation_tokens=self.max_generation_tokens,
                    context_overflow_reward=self.context_overflow_reward,
                )
            )
        return envs

    def logging_tags(self) -> list[str]:
        """Returns the name under which metrics are logged."""
        return ["deepcoder"]


class DeepcoderDataset(ProblemDataset[DeepcoderEnvGroupBuilder]):
    """Each task once, in batches of ``batch_size``; the last one may be smaller."""

    def __init__(self, env_group_builders: list[DeepcoderEnvGroupBuilder], batch_size: int) -> None:
        super().__init__(env_group_builders, lambda builder: builder, batch_size)


@chz.chz
class CodeSettings:
    """Which tasks, and how programs are graded; of the dataset and the recipe."""

    dataset: str = chz.field(default="deepcoder", doc=f"One of {', '.join(DATASETS)}")
    dataset_path: str | None = chz.field(
        default=None, doc="Tasks to train on instead of the Hub's: a JSONL file or a folder"
    )
    test_path: str | None = chz.field(
        default=None, doc="Tasks to evaluate on: a JSONL file or a folder"
    )
    num_test: int | None = number(
        None, "Maximum tasks to evaluate on; 0: no evaluation; default: all"
    )
    max_turns: int = number(
        2, "Maximum answers of an episode; from 2 the model has the tool check_solution", low=1
    )
    format_coef: float = chz.field(default=0.1, doc="Penalty for an answer without a code block")
    timeout: int = number(6, "Seconds of a test", low=1)
    partial_credit: bool = chz.field(default=False, doc="Reward the share of tests that passed")
    sandbox_backend: SandboxBackend | None = chz.field(
        default=None, doc="Where programs run: local, sandboxfusion or modal; default: local"
    )


@chz.chz
class DeepcoderDatasetBuilder(CodeSettings, ProblemDatasetBuilder):
    """Programming tasks to train on and to evaluate on."""

    # Optional, as in the official cookbook.
    renderer_name: str | None = chz.field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=None, doc="Chat format; default: the model's"
    )
    max_generation_tokens: int | None = chz.field(default=None, doc="Tokens kept for an answer")
    context_overflow_reward: float = chz.field(
        default=-0.1, doc="Reward of an episode that exceeds the tokens"
    )

    def check(self) -> None:
        """Raises for a setting that cannot work, and for a missing file."""
        if self.dataset not in DATASETS:
            raise ConfigurationError(
                f"dataset: got {self.dataset!r}, expected one of {', '.join(DATASETS)}"
                f"{nearest(self.dataset, DATASETS)}; your own tasks go into dataset_path=FILE"
            )
        check_files(self, "dataset_path", "test_path")

    def load(self) -> tuple[list[DeepcoderTask], list[DeepcoderTask]]:
        """Returns the tasks to train on, shuffled by ``seed``, and those to evaluate on."""
        train, test = self._tasks()
        random.Random(self.seed).shuffle(train)
        return train, test if self.num_test is None else test[: self.num_test]

    def group(self, renderer: Renderer, size: int, problem: DeepcoderTask) -> EnvGroupBuilder:
        """Returns the episodes of a task."""
        # The same settings, except those of the group.
        names = chz.chz_fields(self).keys() & chz.chz_fields(DeepcoderEnvGroupBuilder).keys()
        same: dict[str, Any] = {name: getattr(self, name) for name in names - {"group_size"}}
        return DeepcoderEnvGroupBuilder(
            task=problem,
            model_name=self.model_name_for_tokenizer,
            group_size=size,
            # A small model writes one line without a block.
            code_block=self.dataset != ONE_LINE or self.dataset_path is not None,
            **same,
        )

    def renderer(self) -> Renderer:
        """Returns the renderer, by default the model's."""
        return renderer_of(self.model_name_for_tokenizer, self.renderer_name)

    def _tasks(self) -> tuple[list[DeepcoderTask], list[DeepcoderTask]]:
        """Returns the tasks to train on and to evaluate on."""
        if self.dataset_path is None and self.dataset == ONE_LINE:
            tasks = one_line_tasks()
            return tasks[:80], tasks[80:]
        train = load_tasks(self.dataset, "train", self.dataset_path)
        # A file of the user has no test split.
        if self.num_test == 0 or (self.dataset_path is not None and self.test_path is None):
            return train, []
        return train, load_tasks(self.dataset, "test", self.test_path)
