"""A small task of Inspect AI with a model as judge, to copy.

    python -m tinker_cookbook.eval.run_inspect_evals model_path=tinker://… \\
        tasks=tinker_cookbook/eval/custom_inspect_task.py
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from tinker_cookbook.utils.imports import missing_extra

try:
    from inspect_ai import Task, task
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.scorer import model_graded_qa
    from inspect_ai.solver import generate
except ImportError as error:
    raise missing_extra("evaluations of Inspect AI", error, "inspect") from error

QA_DATASET = MemoryDataset(
    name="qa_dataset",
    samples=[
        Sample(input="What is the capital of France?", target="Paris"),
        Sample(input="What is the capital of Italy?", target="Rome"),
    ],
)


@task
def example_lm_as_judge(grader: str | None = None) -> Task:
    """Questions whose answers a model grades.

    Args:
        grader: Name of the judge for Inspect, such as ``tinker-sampling/Qwen/Qwen3.5-9B``; default:
            the model that is evaluated.
    """
    return Task(
        name="llm_as_judge",
        dataset=QA_DATASET,
        solver=generate(),
        scorer=model_graded_qa(
            instructions="The target text is the only right answer. End with 'GRADE: C' if the "
            "submission agrees with it, otherwise with 'GRADE: I'.",
            partial_credit=False,
            model=grader,
        ),
    )
