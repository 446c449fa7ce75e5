"""The benchmarks of this package as a task of Inspect AI: same prompts, same graders.

    inspect eval tinker_cookbook/benchmark -T name=gsm8k --model …
    python -m tinker_cookbook.eval.run_inspect_evals tasks=tinker_cookbook/benchmark \\
        task_args='{"name": "gsm8k", "data_path": "…"}' model_path=tinker://…
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinker_cookbook.utils.imports import missing_extra

try:
    from inspect_ai import Task, task
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.model import (
        ChatMessage,
        ChatMessageAssistant,
        ChatMessageSystem,
        ChatMessageUser,
    )
    from inspect_ai.scorer import Score, Scorer, Target, accuracy, scorer, stderr
    from inspect_ai.solver import TaskState, generate
except ImportError as error:
    raise missing_extra("evaluations of Inspect AI", error, "inspect") from error

from tinker_cookbook.eval.benchmarks import BenchmarkConfig
from tinker_cookbook.eval.benchmarks.registry import find_benchmark
from tinker_cookbook.eval.run.examples import Example, ExampleBenchmark, grade_response
from tinker_cookbook.eval.run.runner import check_requirements
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, ensure_text


@task
def benchmark(name: str, data_path: str | None = None, system_prompt: str | None = None) -> Task:
    """A benchmark of single questions.

    Args:
        name: Name of the benchmark, such as ``gsm8k``.
        data_path: Local folder or file with the data; default: the Hub.
        system_prompt: Replaces the benchmark's system prompt.

    Raises:
        BenchmarkNotFoundError: there is no benchmark with this name.
        ConfigurationError: the benchmark has several turns, or needs a judge or a sandbox.
    """
    found = find_benchmark(name)
    config = BenchmarkConfig(data_path=data_path, system_prompt=system_prompt)
    check_requirements(found, config)
    if not isinstance(found, ExampleBenchmark):
        raise ConfigurationError(
            f"name: {name} is not a benchmark of single questions; run it with "
            f"python -m tinker_cookbook.eval tasks={name}"
        )
    examples = found.examples(config)
    samples = [
        Sample(
            id=example.example_id,
            input=_chat_messages(found.prompt_messages(example, config)),
            target=str(example.expected),
            metadata=dict(example.logs),
        )
        for example in examples
    ]
    return Task(
        dataset=MemoryDataset(samples, name=name),
        solver=generate(),
        scorer=benchmark_grader(found, examples, config),
        name=name,
        version=str(found.grader_version),
    )


def _chat_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    kinds = {"system": ChatMessageSystem, "user": ChatMessageUser}
    return [
        kinds.get(message["role"], ChatMessageAssistant)(content=ensure_text(message["content"]))
        for message in messages
    ]


@scorer(metrics=[accuracy(), stderr()])
def benchmark_grader(
    benchmark: ExampleBenchmark, examples: Sequence[Example], config: BenchmarkConfig
) -> Scorer:
    """Scores a response with the grader of its benchmark: 1 is right, 0 is wrong."""
    by_id = {example.example_id: example for example in examples}

    async def score(state: TaskState, target: Target) -> Score:
        example = by_id[str(state.sample_id)]
        grade = await grade_response(benchmark, state.output.completion, example, config)
        extracted: Any = grade.logs.get("extracted")
        return Score(
            value=grade.reward,
            answer=None if extracted is None else str(extracted),
            explanation=state.output.completion,
            metadata={**grade.metrics, **grade.logs},
        )

    return score
