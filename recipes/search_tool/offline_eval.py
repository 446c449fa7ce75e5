"""Evaluates a checkpoint on questions with the search tool, and shows the score while it runs.

    python -m recipes.search_tool.offline_eval model_path=tinker://RUN/sampler_weights/NAME
    python -m recipes.search_tool.offline_eval model_path=… dataset=my.jsonl corpus=my_documents
    python -m recipes.search_tool.offline_eval model_name=MODEL     # a base model alone

Prints the accuracy of each source of questions with its 95% interval. Every episode is stored when
it is done, so the same command continues after Ctrl-C. Stored episodes are reused only for the same
weights, prompt, sampling settings and documents.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

import chz

from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.eval.benchmarks import BenchmarkBuilder, BenchmarkConfig, BenchmarkResult
from tinker_cookbook.eval.benchmarks._runner import evaluate
from tinker_cookbook.eval.benchmarks._sources import RendererSource, identify
from tinker_cookbook.eval.report import EvalProgress, result_table
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.model_info import resolve_max_length
from tinker_cookbook.recipes.search_tool.questions import (
    DATASETS,
    EXAMPLE,
    SEARCH_R1,
    SearchR1Datum,
    read_questions,
)
from tinker_cookbook.recipes.search_tool.retrieval import METHODS, Method
from tinker_cookbook.recipes.search_tool.search_env import (
    SEARCH_TASK_INSTRUCTIONS,
    SearchR1DatasetBuilder,
    initial_messages,
    tool_renderer_name,
)
from tinker_cookbook.recipes.search_tool.tools import (
    EmbeddingConfig,
    RetrievalConfig,
    SearchTool,
    TextAnswerReward,
)
from tinker_cookbook.recipes.start import check_dataset_name
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.rollouts.episode import do_single_rollout
from tinker_cookbook.rl.types import Env, Trajectory
from tinker_cookbook.run.paths import ensure_writable_dir
from tinker_cookbook.sampling_model import SamplingModelSettings, open_sampling_model
from tinker_cookbook.tool_use import build_agent_tool_env
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import get_console

_ROOT = "/tmp/tinker-examples/search_eval"


@chz.chz
class CLIConfig(SamplingModelSettings):
    """Settings of the evaluation."""

    max_eval_samples: int = chz.field(default=100, doc="Maximum number of questions of each source")
    seed: int = chz.field(default=42, doc="Seed of the choice of questions and of the samples")
    split: Literal["train", "test"] = chz.field(default="test", doc="Questions to evaluate on")
    dataset: str = chz.field(
        default=EXAMPLE, doc=f"{', '.join(DATASETS)}, a file, or a folder; as for training"
    )
    corpus: str | None = chz.field(default=None, doc="Documents; default: those of dataset")
    index_path: str | None = chz.field(default=None, doc="Folder of an index, instead of a corpus")
    method: Method = chz.field(default="bm25", doc=f"One of {', '.join(METHODS)}")
    n_results: int = chz.field(default=3, doc="Documents for each query")
    max_words: int = chz.field(default=250, doc="Longer documents are split; 0: never")
    max_turns: int = chz.field(
        default=5, doc="Maximum answers in an episode, including the last one"
    )
    max_tokens: int = chz.field(default=1024, doc="Maximum tokens of one answer")
    max_trajectory_tokens: int = chz.field(default=32 * 1024, doc="Tokens of an episode")
    temperature: float = chz.field(default=1.0, doc="Sampling temperature; 0: greedy")
    instructions: str = chz.field(default=SEARCH_TASK_INSTRUCTIONS, doc="System prompt")
    chroma_host: str | None = chz.field(default=None, doc="Host of a Chroma server; default: none")
    chroma_port: int = chz.field(default=8000, doc="Port of the Chroma server")
    chroma_collection_name: str = chz.field(
        default="wiki_embeddings", doc="Collection of the Chroma server"
    )
    embedding_model_name: str = chz.field(
        default="gemini-embedding-001", doc="Chroma: embeddings of the queries"
    )
    concurrency: int = chz.field(default=64, doc="Concurrent episodes")
    out: str | None = chz.field(default=None, doc=f"Folder of results; default: {_ROOT}/MODEL")


class EvaluationResult(TypedDict):
    """One episode and its score."""

    question: str
    correct_score: float
    trajectory: Trajectory


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
        self.name = name
        self.questions, self.search_tool = list(questions), search_tool
        self.instructions, self.max_turns = instructions, max_turns

    def make_envs(self, renderer: Renderer, config: BenchmarkConfig) -> list[Env]:
        """Returns an environment for each question."""
        envs: list[Env] = []
        for datum in self.questions:
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
            envs.append(env)
        return envs


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
    benchmark = SearchBenchmark("search", [item], chroma_tool)
    (env,) = benchmark.make_envs(
        renderer, BenchmarkConfig(max_trajectory_tokens=max_trajectory_tokens)
    )
    trajectory = await do_single_rollout(policy, env)
    return EvaluationResult(
        question=item["question"], correct_score=trajectory.reward, trajectory=trajectory
    )


async def evaluate_one_dataset(data: list[SearchR1Datum], config: CLIConfig) -> dict[str, float]:
    """Opens model and search, and evaluates on questions.

    Returns ``total_samples``, ``total_correct`` and ``accuracy``, the share of those without error.
    """
    search_tool = await _dataset_builder(config).search_tool()
    source = await _open(config, search_tool)
    result = await _evaluate(data, config, search_tool, source)
    return {
        "total_samples": result.num_examples - result.num_errors,
        "total_correct": result.num_correct,
        "accuracy": result.score,
    }


async def _evaluate(
    data: list[SearchR1Datum],
    config: CLIConfig,
    search_tool: SearchTool,
    source: RendererSource,
    progress: EvalProgress | None = None,
) -> BenchmarkResult:
    builder = SearchBenchmark(
        re.sub(r"[^\w.-]+", "_", data[0]["data_source"]),
        data,
        search_tool,
        config.instructions,
        config.max_turns,
    )
    return await evaluate(builder, source, source.config, progress)


def _dataset_builder(config: CLIConfig) -> SearchR1DatasetBuilder:
    """Returns the builder that checks and opens what is searched."""
    same = (
        "dataset corpus index_path max_words max_turns seed chroma_host chroma_port "
        "chroma_collection_name"
    )
    return SearchR1DatasetBuilder(
        model_name_for_tokenizer=config.model_name or "",
        batch_size=1,
        group_size=1,
        retrieval_config=RetrievalConfig(
            n_results=config.n_results,
            method=config.method,
            embedding_config=EmbeddingConfig(model_name=config.embedding_model_name),
        ),
        **{name: getattr(config, name) for name in same.split()},
    )


async def _open(config: CLIConfig, search_tool: SearchTool) -> RendererSource:
    """Opens the model with a chat format that declares tools."""
    connection = config.connect()
    model = await open_sampling_model(connection, config)
    renderer_name = tool_renderer_name(model.model_name, None, None)
    if config.renderer_name is None and model.renderer_reason != "recorded by the run":
        config = chz.replace(config, renderer_name=renderer_name)
        model = await open_sampling_model(connection, config)
    console = get_console()
    console.print(
        f"model: {model.name}\nrenderer: {model.renderer_name}", markup=False, soft_wrap=True
    )
    folder = ensure_writable_dir(_folder(config, model.name), "out")
    # Documents are part of what is evaluated: stored episodes of others must not be reused.
    weights = model.name if config.model_path else await identify(model.client)
    found = json.dumps([_described(search_tool), config.max_turns])
    context = resolve_max_length(model.model_name, None)
    settings = BenchmarkConfig(
        concurrency=config.concurrency,
        agent_concurrency=config.concurrency,
        max_trajectory_tokens=min(
            config.max_trajectory_tokens, context or config.max_trajectory_tokens
        ),
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        seed=config.seed,
        system_prompt=config.instructions,
        context_window=context,
        save_dir=str(folder),
        model_id=f"{weights} {hashlib.sha256(found.encode()).hexdigest()}",
    )
    return await RendererSource.open(model.client, model.renderer, settings)


def _described(search_tool: SearchTool) -> list[str]:
    """Returns what decides about the results of a search."""
    index = getattr(search_tool, "index", None)
    config = getattr(search_tool, "retrieval_config", None)
    texts = [document.text for document in index.documents] if index is not None else []
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    return [digest, repr(config)]


def _folder(config: CLIConfig, name: str) -> Path:
    if config.out is not None:
        return Path(config.out).expanduser()
    return Path(_ROOT) / re.sub(r"[^\w.-]+", "_", name.removeprefix("tinker://"))


async def main(config: CLIConfig) -> None:
    """Evaluates on each source of questions and prints the table."""
    check_dataset_name(config.dataset, DATASETS)
    if config.max_eval_samples < 1:
        raise ConfigurationError(
            f"max_eval_samples: got {config.max_eval_samples}, expected at least 1"
        )
    config.check()
    builder = _dataset_builder(config)
    builder.check()
    search_tool = await builder.search_tool()
    data = await asyncio.to_thread(_questions, config)
    sampled = sample_k_from_each_source(
        split_data_by_source(data), config.max_eval_samples, config.seed
    )
    source = await _open(config, search_tool)
    results: dict[str, BenchmarkResult] = {}
    with EvalProgress() as progress:
        for name, questions in sampled.items():
            results[name] = await _evaluate(questions, config, search_tool, source, progress)
    console = get_console()
    console.print(result_table(results))
    total = sum(result.num_examples for result in results.values())
    correct = sum(result.num_correct for result in results.values())
    console.print(
        f"overall: {correct} of {total} right ({correct / max(1, total):.3f})\n"
        f"episodes: {source.config.save_dir}/SOURCE/trajectories.jsonl",
        markup=False,
        soft_wrap=True,
    )


def _questions(config: CLIConfig) -> list[SearchR1Datum]:
    has_splits = (
        config.dataset in (EXAMPLE, SEARCH_R1) or Path(config.dataset).expanduser().is_dir()
    )
    return read_questions(config.dataset, config.split if has_splits else "train")


cli_main = main


if __name__ == "__main__":
    run_entrypoint(main)
