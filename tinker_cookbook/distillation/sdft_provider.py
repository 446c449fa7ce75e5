"""Self-distillation on questions that user code provides as environments, batch by batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.distillation.mixture import number_of, numbered
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.report.trajectory_metrics import compute_trajectory_metrics
from tinker_cookbook.rl.rollouts.group import do_group_rollout
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset
from tinker_cookbook.supervised.common import datum_from_tokens_weights
from tinker_cookbook.supervised.types import SupervisedDataset

if TYPE_CHECKING:
    import tinker

Texts = tuple[list["tinker.Datum"], list["tinker.ModelInput"], dict[str, float]]
"""Answers as datums with a ``mask``, what the teacher reads before each, and metrics."""


@runtime_checkable
class SDFTBatchProvider(Protocol):
    """Questions with a golden answer each, in batches."""

    def get_batch(self, index: int) -> tuple[Sequence[EnvGroupBuilder], list[str], list[str]]:
        """Environments in which the student answers, questions and golden answers of a batch: one
        of each for every problem."""
        ...

    def __len__(self) -> int:
        """Number of batches."""
        ...


class ProvidedBatches(SupervisedDataset):
    """The numbers of a provider's batches, for the loop over batches; see ``ProvidedTexts``."""

    def __init__(self, provider: SDFTBatchProvider) -> None:
        self._provider = provider

    def __len__(self) -> int:
        return len(self._provider)

    def get_batch(self, index: int) -> list[tinker.Datum]:
        """One datum that holds nothing but the number of the batch."""
        return [numbered(datum_from_tokens_weights([0, 0], [0.0, 1.0]), index)]


class ProvidedEnvironments(RLDataset):
    """The environments of a provider, or of a dataset of environments, to evaluate in."""

    def __init__(self, dataset: SDFTBatchProvider | RLDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """The builders of a batch, without questions and golden answers."""
        batch: Any = self._dataset.get_batch(index)
        return batch[0] if isinstance(batch, tuple) else batch


class ProvidedTexts:
    """Has the student answer the questions of a provider's batch in their environments.

    Args:
        provider: Where the questions come from.
        teacher_prompt: Of a question and its golden answer.
    """

    def __init__(
        self,
        provider: SDFTBatchProvider,
        teacher_prompt: Callable[[str, str], tinker.ModelInput],
    ) -> None:
        self._provider, self._teacher_prompt = provider, teacher_prompt

    async def texts(
        self, step: int, data: Sequence[tinker.Datum], policy: Callable[[], TokenCompleter]
    ) -> Texts:
        """The answers of all groups, those without a token left out; and the groups' metrics.

        Raises:
            DataValidationError: The provider's lists differ in length.
        """
        builders_P, questions_P, golden_P = await asyncio.to_thread(
            self._provider.get_batch, number_of(data[0])
        )
        lengths = {len(builders_P), len(questions_P), len(golden_P)}
        if len(lengths) > 1:
            raise DataValidationError(
                f"sdft_dataset: batch {number_of(data[0])} has {len(builders_P)} environments, "
                f"{len(questions_P)} questions and {len(golden_P)} golden answers, expected one of "
                "each for every problem"
            )
        student = policy()
        groups_P = await asyncio.gather(
            *(
                do_group_rollout(builder, student.derived(step, place))
                for place, builder in enumerate(builders_P)
            )
        )
        answers: list[tinker.Datum] = []
        prompts: list[tinker.ModelInput] = []
        for group, question, golden in zip(groups_P, questions_P, golden_P, strict=True):
            prompt = self._teacher_prompt(question, golden)
            made = [
                datum
                for trajectory in group.trajectories_G
                for datum in trajectory_to_data(trajectory, 0.0)
            ]
            answers += made
            prompts += [prompt] * len(made)
        tags_P = [builder.logging_tags() for builder in builders_P]
        return answers, prompts, compute_trajectory_metrics(list(groups_P), tags_P)
