"""Two agents with slow tools that solve a task together: asynchronous against synchronous training.

    python -m recipes.research.two_agents
    python -m recipes.research.two_agents seeds=0 steps=10 log_path=…

The task is a sum of two prices of the shop of ``recipes.tool_use``. The first agent is asked for
one price, looks it up and tells it. The second is asked for the other price, is told the number of
the first, looks up and adds. Both have the same reward: 1 for the right sum. They are two parts of
one model with one adapter. A look-up takes random time, and the second agent waits for the first,
so a synchronous step waits for its slowest pair; an asynchronous one trains on what is done.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook import cli_utils
from tinker_cookbook.grading.numbers import last_number
from tinker_cookbook.recipes.research import study
from tinker_cookbook.recipes.research.runs import reinforce
from tinker_cookbook.recipes.tiny_models.llama import (
    TinyModelSettings,
    make_model_once,
    new_folder,
    train,
)
from tinker_cookbook.recipes.tool_use.shop import Question, Shop, make_questions
from tinker_cookbook.recipes.tool_use.tiny_model import RENDERER, example_episode, make_tokenizer
from tinker_cookbook.renderers import Message, Renderer, get_renderer, get_text_content
from tinker_cookbook.rl.config import AsyncConfig
from tinker_cookbook.rl.envs.message_env import EnvFromMessageEnv
from tinker_cookbook.rl.task import TaskDatasetBuilder
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, Metrics, Trajectory
from tinker_cookbook.run.jsonl import read_rows
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.tool_use import FunctionTool, Tool, ToolEpisode, build_agent_tool_env
from tinker_cookbook.tool_use.agent_tool_message_env import AgentToolMessageEnv
from tinker_cookbook.training.config import number, peak_rate
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

QUESTIONS, PAIRS = 4, 8
"""Questions of a step, and pairs of agents that solve each."""


@dataclass
class Task:
    """A sum of two prices, and what the agents have said."""

    question: Question
    said: dict[int, str] = field(default_factory=dict)
    first_done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def solved(self) -> bool:
        """Whether the second agent said the right sum."""
        return self.said.get(1) == str(self.question.answer())


def ask(question: Question, part: int, told: str = "") -> Message:
    """Returns the message to the first (0) or second (1) agent, which is told a number."""
    text = Question("price", (question.items[part],), question.seed).text
    return Message(role="user", content=f"{text}\n{told}" if part else text)


class PartEnv(EnvFromMessageEnv):
    """The episode of one agent of a pair."""

    task: Task
    part: int

    @property
    def waits_for_members(self) -> bool:  # type: ignore[override]
        """Whether the episode needs another one of its group."""
        return self.part == 1

    async def initial_observation(self) -> Any:
        """Asks; the second agent waits for the number that it is told."""
        if self.part:
            await self.task.first_done.wait()
        agent = self.message_env
        assert isinstance(agent, AgentToolMessageEnv)
        asked = ask(self.task.question, self.part, self.task.said.get(0, ""))
        agent.initial_messages = [*agent.initial_messages, asked]
        return await super().initial_observation()

    def rollout_ended(self, failed: bool) -> None:
        """Lets the second agent go on, also if the first said nothing."""
        if self.part == 0:
            self.task.first_done.set()


async def hear(
    task: Task, part: int, history: list[Message], episode: ToolEpisode
) -> tuple[float, dict[str, float]]:
    """Notes what an agent said at the end; the reward depends on both, so the group gives it."""
    if history[-1]["role"] == "assistant":  # otherwise the turns ended with a call
        task.said[part] = last_number(get_text_content(history[-1])) or ""
    return 0.0, {"solved": float(task.solved)} if part else {}


def slow(look_up: FunctionTool, seconds: float) -> FunctionTool:
    """Returns a tool that takes time, as a search or a program does; ``seconds`` is the mean."""

    async def run(item: str) -> Any:
        if seconds:
            await asyncio.sleep(random.expovariate(1 / seconds))
        return look_up(item)

    return FunctionTool(run, name=look_up.name)


def make_pair(question: Question, renderer: Renderer, seconds: float) -> list[PartEnv]:
    """Returns the episodes of both agents."""
    shop, task, envs = Shop(question.seed), Task(question), list[PartEnv]()
    prefix = renderer.create_conversation_prefix_with_tools([t.to_spec() for t in shop.tools])
    for part in (0, 1):
        tools: list[Tool] = [slow(shop.price, seconds), slow(shop.stock, seconds), shop.add]
        made = build_agent_tool_env(renderer, tools, prefix, partial(hear, task, part), max_turns=4)
        env = PartEnv(renderer, made.message_env, failed_parse_reward=0.0)
        env.task, env.part = task, part
        envs.append(env)
    return envs


def make_first(question: Question, renderer: Renderer) -> Env:
    """Returns an episode, by which the dataset is checked."""
    return make_pair(question, renderer, 0.0)[0]


@dataclass(frozen=True)
class PairsGroup(EnvGroupBuilder):
    """Pairs of agents that solve the same task."""

    question: Question
    renderer: Renderer
    pairs: int
    seconds: float
    second_learns: bool

    async def make_envs(self) -> Sequence[Env]:
        """Returns the episodes."""
        pairs = [make_pair(self.question, self.renderer, self.seconds) for _ in range(self.pairs)]
        return [env for pair in pairs for env in pair]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Returns 1 for both agents of a pair that solved the task.

        An agent that does not learn has the mean reward, so its advantage is 0.
        """
        envs = [env for env in env_group if isinstance(env, PartEnv)]
        solved = [float(env.task.solved) for env in envs]
        mean = sum(solved) / len(solved)
        return [
            (one if self.second_learns or env.part == 0 else mean, {})
            for env, one in zip(envs, solved, strict=True)
        ]


@chz.chz
class PairsBuilder(TaskDatasetBuilder):
    """Tasks for two agents."""

    seconds: float = chz.field(doc="Mean seconds of a look-up")
    second_learns: bool = chz.field(doc="Whether the second agent is trained")

    def group(self, renderer: Renderer, size: int, problem: Question) -> EnvGroupBuilder:
        """Returns the pairs for a task."""
        return PairsGroup(problem, renderer, size, self.seconds, self.second_learns)


def base_model(quick: bool) -> str:
    """Returns the folder of a model that knows the format of both parts.

    It makes valid calls, half of them with the wrong tool, and adds in half of the cases.
    """
    folder = cli_utils.default_log_path(f"tiny_models/two_agents{'-quick' * quick}")
    settings = TinyModelSettings(output=folder, steps=20 if quick else 400)
    make_model_once(folder, partial(_make_base, settings, 100 if quick else 6000))
    return folder


def _make_base(settings: TinyModelSettings, count: int) -> None:
    with new_folder(settings.output) as folder:
        tokenizer = make_tokenizer(folder)
        rows = asyncio.run(_example_rows(get_renderer(RENDERER, get_tokenizer(str(folder))), count))
        sizes = {"max_position_embeddings": 512, "initializer_range": 0.1}
        train(settings, rows, tokenizer, folder, **sizes)


async def _example_rows(renderer: Renderer, count: int) -> list[tuple[list[int], list[float]]]:
    rng, rows = random.Random(0), list[tuple[list[int], list[float]]]()
    prefix = renderer.create_conversation_prefix_with_tools([t.to_spec() for t in Shop(0).tools])
    for question in make_questions(count, 1, ["total"]):
        if rng.random() < 0.4:
            one = Question("price", question.items[:1], question.seed)
            episode = await example_episode(one, rng)
        else:
            told = str(rng.choice(list(Shop(question.seed).prices.values())))
            episode = await example_episode(question, rng, told=told)
            episode[0] = ask(question, 1, told)
        for tokens, weights in renderer.build_supervised_examples(
            [*prefix, *episode], "all_assistant_messages"
        ):
            rows.append((tokens.to_ints(), weights.tolist()))
    return rows


@chz.chz
class Config(study.StudyConfig):
    """Settings of the study."""

    log_path: str = cli_utils.default_log_path("research/two_agents")
    steps: int = number(20, f"Steps of {QUESTIONS} tasks with {PAIRS} pairs each", low=1)
    seconds: float = number(0.3, "Mean seconds of a look-up", low=0)
    learning_rate: float = peak_rate(3e-3, "Learning rate")


def main(config: Config) -> None:
    """Runs the study."""
    config = config.resolved(steps=2, seconds=0.01)
    run = partial(run_arm, config, base_model(config.quick))
    arms = {
        "asynchronous, 1 update ahead": partial(run, ahead=1),
        "synchronous": run,
        "asynchronous, 4 updates ahead": partial(run, ahead=4),
        "synchronous, second agent frozen": partial(run, second_learns=False),
        "synchronous, random rewards": partial(run, random_rewards=True),
    }
    columns = {
        "solved": "solved",
        "before": "before training",
        "staleness": "age in updates",
        "wall": "seconds a step",
    }
    study.run_study(config, arms, columns, draw)


def run_arm(
    config: Config,
    model: str,
    seed: int,
    *,
    ahead: int | None = None,
    second_learns: bool = True,
    random_rewards: bool = False,
) -> study.Row:
    """Trains the agents; returns the share of solved tasks, and how long a step takes.

    Args:
        ahead: Updates that sampling may run ahead of training; None: synchronous.
    """
    asynchronous = None
    if ahead is not None:
        asynchronous = AsyncConfig(
            max_steps_off_policy=ahead, groups_per_batch=QUESTIONS, loss_fn="ppo"
        )
    folder = Path(config.log_path) / f"{ahead}-{second_learns}-{random_rewards}-{seed}"
    rows = reinforce(
        folder,
        model,
        seed,
        make_first,
        make_questions(config.steps * QUESTIONS, seed, ["total"]),
        make_questions(8 if config.quick else 100, 10**9, ["total"]),
        PairsBuilder,
        {
            "batch_size": QUESTIONS,
            "group_size": PAIRS,
            "test_group_size": 1,
            "seconds": config.seconds,
            "second_learns": second_learns,
        },
        async_config=asynchronous,
        random_rewards=random_rewards,
        learning_rate=config.learning_rate,
        max_tokens=24,
        max_steps=config.steps,
        # Not in between: asynchronous sampling would go on during an evaluation.
        eval_every=config.steps,
    )
    steps = [row for row in read_rows(folder / "metrics.jsonl") if "time/total" in row]
    seconds = [row["time/total"] for row in steps]
    solved = [row["env/all/solved"] for row in steps]
    ages = [row.get("async/staleness_mean", 0.0) for row in steps]
    return {
        "solved": rows[-1]["test/env/all/solved"],
        "before": rows[0]["test/env/all/solved"],
        "staleness": sum(ages) / len(ages),
        "wall": sum(seconds) / len(seconds),
        "episodes": [2 * QUESTIONS * PAIRS * (i + 1) for i in range(len(steps))],
        "curve": study.smoothed(solved),
    }


def draw(figure: Any, of_arm: dict[str, list[study.Row]]) -> None:
    """Draws the share of solved tasks over the episodes."""
    axes = figure.subplots()
    for (name, rows), colour in zip(of_arm.items(), study.COLOURS, strict=False):
        study.draw_curve(axes, rows, "episodes", "curve", name, colour)
    study.finish_axes(axes, "Two agents with tools", "episodes", "tasks solved, mean of 5 steps")


if __name__ == "__main__":
    run_entrypoint(main)
