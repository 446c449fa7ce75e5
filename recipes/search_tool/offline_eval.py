"""Evaluates a checkpoint on questions with the search tool, as ``python -m tinker_cookbook.eval``.

    python -m recipes.search_tool.offline_eval model_path=tinker://RUN/sampler_weights/NAME
    python -m recipes.search_tool.offline_eval model_path=… dataset=my.jsonl corpus=my_documents
    python -m recipes.search_tool.offline_eval model_name=MODEL     # a base model alone

Each source of questions is a benchmark, whose score is the share of right answers. As with all
benchmarks, episodes are stored, and the same command continues after Ctrl-C.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal, TypedDict

import chz

from tinker_cookbook.completers import TinkerTokenCompleter, TokenCompleter
from tinker_cookbook.eval import __main__ as evaluation
from tinker_cookbook.eval.benchmarks import BenchmarkBuilder, BenchmarkConfig
from tinker_cookbook.exceptions import ConfigurationError
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
from tinker_cookbook.recipes.search_tool.tools import (
    LocalSearchTool,
    SearchTool,
    TextAnswerReward,
)
from tinker_cookbook.recipes.start import check_dataset_name
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.rollouts.episode import do_single_rollout
from tinker_cookbook.rl.types import Env, Trajectory
from tinker_cookbook.sampling_model import open_sampling_model
from tinker_cookbook.tool_use import build_agent_tool_env
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


class SearchBenchmark(BenchmarkBuilder):
    """Questions of one source as a benchmark; the score is the share of right answers."""

    multi_turn = True

    def __init__(
        self,
        name: str,
        questions: Sequence[SearchR1Datum],
        search_tool: SearchTool,
        instructions: str = SEARCH_TASK_INSTRUCTIONS,
        max_turns: int = 5,
    ) -> None:
        self.name, self.questions, self.search_tool = name, questions, search_tool
        self.instructions, self.max_turns = instructions, max_turns
        # Stored episodes are reused only for the same documents and limits.
        parts = [instructions, str(max_turns), repr(getattr(search_tool, "retrieval_config", ""))]
        if isinstance(search_tool, LocalSearchTool):
            parts += [document.text for document in search_tool.index.documents]
        self.grader_version = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]

    def make_envs(self, renderer: Renderer, config: BenchmarkConfig) -> list[Env]:
        """Returns an environment for each question."""
        return [self._env(datum, renderer, config) for datum in self.questions]

    def _env(self, datum: SearchR1Datum, renderer: Renderer, config: BenchmarkConfig) -> Env:
        env = build_agent_tool_env(
            renderer,
            [self.search_tool.search],
            initial_messages(datum["question"], renderer, self.search_tool, self.instructions),
            # Without a penalty for the format the score is the accuracy.
            TextAnswerReward(datum["answer"], format_coef=0.0),
            max_turns=self.max_turns,
            failed_parse_reward=0.0,
            max_trajectory_tokens=config.max_trajectory_tokens,
            context_overflow_reward=0.0,
        )
        env.example_id = hashlib.md5(datum["question"].encode()).hexdigest()[:12]  # type: ignore[attr-defined]
        return env


@chz.chz
class CLIConfig(SearchKeys, evaluation.Config):
    """Settings of the evaluation, in addition to those of ``tinker_cookbook.eval``."""

    tasks: str = chz.field(default="search", doc="Has no effect: the tasks are those of dataset")
    max_eval_samples: int = chz.field(default=100, doc="Maximum number of questions of each source")
    seed: int | None = chz.field(
        default=42, doc="Seed of the choice of questions and of the samples"
    )
    split: Literal["train", "test"] = chz.field(default="test", doc="Questions to evaluate on")
    max_tokens: int | None = chz.field(default=1024, doc="Maximum tokens of one answer")
    temperature: float = chz.field(default=1.0, doc="Sampling temperature; 0: greedy")

    def check(self) -> None:
        """Raises for settings that cannot work; opens no model."""
        check_dataset_name(self.dataset, DATASETS)
        if self.max_eval_samples < 1:
            raise ConfigurationError(
                f"max_eval_samples: got {self.max_eval_samples}, expected at least 1"
            )
        self.check_search()
        super().check()

    @property
    def builders(self) -> list[BenchmarkBuilder]:
        """One benchmark for each source of questions."""
        split = self.split if has_splits(self.dataset) else "train"
        sources = sample_k_from_each_source(
            split_data_by_source(read_questions(self.dataset, split)),
            self.max_eval_samples,
            self.seed or 0,
        )
        return [self.benchmark(name, data) for name, data in sources.items()]

    def benchmark(self, name: str, data: Sequence[SearchR1Datum]) -> SearchBenchmark:
        """Returns questions as a benchmark over the documents of the settings."""
        tool = self.search_tool(self.retrieval)
        return SearchBenchmark(name, data, tool, self.instructions, self.max_turns)

    def benchmark_config(self, **more: Any) -> BenchmarkConfig:
        """Returns the settings of the benchmarks, with the limit of an episode."""
        limits = (self.max_trajectory_tokens, more.get("context_window"))
        tokens = min((limit for limit in limits if limit is not None), default=None)
        return super().benchmark_config(max_trajectory_tokens=tokens, **more)


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
) -> EvaluationResult:
    """Runs one episode of a policy; ``correct_score`` is 1 or 0."""
    config = BenchmarkConfig(max_trajectory_tokens=max_trajectory_tokens)
    (env,) = SearchBenchmark("search", [item], chroma_tool).make_envs(renderer, config)
    trajectory = await do_single_rollout(policy, env)
    return EvaluationResult(
        question=item["question"], correct_score=trajectory.reward, trajectory=trajectory
    )


async def evaluate_one_dataset(data: list[SearchR1Datum], config: CLIConfig) -> dict[str, float]:
    """Opens model and search, and evaluates on questions.

    Returns ``total_samples``, ``total_correct`` and ``accuracy``.
    """
    model = await open_sampling_model(config.connect(), config)
    policy = TinkerTokenCompleter(
        model.client, config.max_tokens or 1024, config.temperature, seed=config.seed
    )
    tool, limit = config.search_tool(config.retrieval), config.max_trajectory_tokens
    results = await asyncio.gather(
        *(
            evaluate_single_item(item, tool, policy.derived(i), model.renderer, limit)
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
    """Evaluates on each source of questions and prints the table."""
    await evaluation.main(config)


cli_main = main


if __name__ == "__main__":
    run_entrypoint(main)
