"""A task of Inspect AI for ``test_harnesses.py``."""

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, system_message


@task
def sums(n: int = 4) -> Task:
    samples = [Sample(id=i, input=f"What is {i} + 2?", target=str(i + 2)) for i in range(n)]
    return Task(
        dataset=MemoryDataset(samples, name="sums"),
        solver=[system_message("Be brief."), generate()],
        scorer=includes(),
    )
