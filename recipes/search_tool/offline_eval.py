"""Evaluates a checkpoint on questions with the search tool.

    python -m recipes.search_tool.offline_eval model_path=tinker://RUN/sampler_weights/NAME
    python -m recipes.search_tool.offline_eval model_path=… dataset=my.jsonl corpus=my_documents
    python -m recipes.search_tool.offline_eval model_name=MODEL     # a base model alone

Prints the share of right answers for each source of questions.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Literal, TypedDict

import chz

from tinker_cookbook.completers import TinkerTokenCompleter, TokenCompleter
from tinker_cookbook.recipes.search_tool.questions import (
    DATASETS,
    SearchR1Datum,
    has_splits,
    read_questions,
)
from tinker_cookbook.recipes.search_tool.search_env import (
    SEARCH_TASK_INSTRUCTIONS,
    SearchKeys,
    initial_messages,
)
from tinker_cookbook.recipes.search_tool.tools import SearchTool, TextAnswerReward
from tinker_cookbook.recipes.start import check_dataset_name
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.rollouts.episode import do_single_rollout
from tinker_cookbook.rl.types import Trajectory
from tinker_cookbook.sampling_model import SamplingModelSettings, open_sampling_model
from tinker_cookbook.tool_use import build_agent_tool_env
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import print_line


@chz.chz
class CLIConfig(SearchKeys, SamplingModelSettings):
    """Settings of the evaluation."""

    max_eval_samples: int = number(100, "Maximum number of questions of each source", low=1)
    seed: int = chz.field(default=42, doc="Seed of the choice of questions and of the samples")
    split: Literal["train", "test"] = chz.field(default="test", doc="Questions to evaluate on")
    max_tokens: int = number(1024, "Maximum tokens of one answer", low=1)
    temperature: float = chz.field(default=1.0, doc="Sampling temperature; 0: greedy")


class EvaluationResult(TypedDict):
    """One episode and its score."""

    question: str
    correct_score: float
    trajectory: Trajectory


def split_data_by_source(data: list[SearchR1Datum]) -> dict[str, list[SearchR1Datum]]:
    """Returns the questions by ``data_source``, in the order in which sources occur."""
    by_source: dict[str, list[SearchR1Datum]] = defaultdict(list)
    for datum in data:
        by_source[datum["data_source"]].append(datum)
    return dict(by_source)


def sample_k_from_each_source(
    data_by_source: dict[str, list[SearchR1Datum]], k: int, seed: int = 42
) -> dict[str, list[SearchR1Datum]]:
    """Returns ``k`` random questions of each source, or all if there are fewer."""
    rng = random.Random(seed)
    return {
        source: data if len(data) <= k else rng.sample(data, k)
        for source, data in data_by_source.items()
    }


async def evaluate_single_item(
    item: SearchR1Datum,
    chroma_tool: SearchTool,
    policy: TokenCompleter,
    renderer: Renderer,
    max_trajectory_tokens: int | None = None,
    max_turns: int = 5,
    instructions: str = SEARCH_TASK_INSTRUCTIONS,
) -> EvaluationResult:
    """Runs one episode of a policy; ``correct_score`` is 1 or 0."""
    env = build_agent_tool_env(
        renderer,
        [chroma_tool.search],
        initial_messages(item["question"], renderer, chroma_tool, instructions),
        # Without a penalty for the format the reward is the accuracy.
        TextAnswerReward(item["answer"], format_coef=0.0),
        max_turns=max_turns,
        failed_parse_reward=0.0,
        max_trajectory_tokens=max_trajectory_tokens,
        context_overflow_reward=0.0,
    )
    trajectory = await do_single_rollout(policy, env)
    return EvaluationResult(
        question=item["question"], correct_score=trajectory.reward, trajectory=trajectory
    )


async def evaluate_one_dataset(data: list[SearchR1Datum], config: CLIConfig) -> dict[str, float]:
    """Opens model and search, and evaluates on questions.

    Returns ``total_samples``, ``total_correct`` and ``accuracy``.
    """
    tool = await asyncio.to_thread(config.search_tool, config.retrieval)
    with config.connect() as connection:
        model = await open_sampling_model(connection, config)
        policy = TinkerTokenCompleter(
            model.client, config.max_tokens, config.temperature, seed=config.seed
        )
        more = config.max_trajectory_tokens, config.max_turns, config.instructions
        results = await asyncio.gather(
            *(
                evaluate_single_item(item, tool, policy.derived(i), model.renderer, *more)
                for i, item in enumerate(data)
            )
        )
    correct = sum(result["correct_score"] for result in results)
    return {
        "total_samples": len(results),
        "total_correct": correct,
        "accuracy": correct / max(1, len(results)),
    }


async def main(config: CLIConfig) -> None:
    """Evaluates on each source of questions."""
    check_dataset_name(config.dataset, DATASETS)
    config.check_search()
    config.check()
    split = config.split if has_splits(config.dataset) else "train"
    sources = split_data_by_source(read_questions(config.dataset, split))
    chosen = sample_k_from_each_source(sources, config.max_eval_samples, config.seed)
    for name, data in chosen.items():
        found = await evaluate_one_dataset(data, config)
        print_line(
            f"{name}: accuracy {found['accuracy']:.3f} ({found['total_correct']:.0f} of "
            f"{found['total_samples']})"
        )


cli_main = main


if __name__ == "__main__":
    run_entrypoint(main)
