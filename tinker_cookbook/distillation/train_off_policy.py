"""Off-policy distillation: towards a teacher's distributions on given texts.

    python -m tinker_cookbook.distillation.train_off_policy model_name=… log_path=… \\
        dataset_configs.0.dataset_builder=module:Class …
    python -m tinker_cookbook.distillation.train_off_policy --help

Each dataset has its teacher. At every trained token of an example the teacher says which
``n_teacher_targets`` tokens it finds most probable there, and these, renormalised, are the targets
of a cross-entropy (``topk_targets``). The texts are fixed: nothing is sampled from the student.
``tinker_cookbook.distillation.train_on_policy`` has the student write the texts instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import chz

from tinker_cookbook import model_info
from tinker_cookbook.distillation.datasets import TeacherConfig
from tinker_cookbook.distillation.soft_objective import OffPolicy, Teachers, numbered
from tinker_cookbook.distillation.teachers import open_teacher
from tinker_cookbook.distillation.topk_targets import check_top_k
from tinker_cookbook.exceptions import ConfigurationError, ModelNotFoundError
from tinker_cookbook.renderers import Message
from tinker_cookbook.supervised.batch_loop import BatchConfig, Objective, train_batches
from tinker_cookbook.supervised.data import trained_batch
from tinker_cookbook.supervised.types import (
    ChatDatasetBuilder,
    ChatDatasetBuilderCommonConfig,
    EmptyBatchError,
    SupervisedDataset,
    SupervisedDatasetBuilder,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.session import TrainingSession
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.vocabulary import check_same_vocabulary

if TYPE_CHECKING:
    import tinker

__all__ = ["Config", "DatasetWithTeacher", "MixtureBuilder", "main"]


def shares(weights: Sequence[float], batch_size: int) -> list[int]:
    """Splits ``batch_size`` among datasets by weight, with at least one example each.

    Each further example comes from the dataset that is furthest below its exact share.
    """
    for i, weight in enumerate(weights):
        if not (weight > 0 and math.isfinite(weight)):
            raise ConfigurationError(
                f"dataset_configs[{i}].weight: got {weight}, expected a positive number; leave out "
                "a dataset that is not wanted"
            )
    if batch_size < len(weights):
        raise ConfigurationError(
            f"batch_size: got {batch_size}, expected at least {len(weights)}, one example for each "
            "dataset"
        )
    # Largest remainder: each further example goes to the dataset furthest below its share.
    exact = [batch_size * weight / math.fsum(weights) for weight in weights]
    counts = [1] * len(weights)
    for _ in range(batch_size - len(weights)):
        counts[max(range(len(counts)), key=lambda i: exact[i] - counts[i])] += 1
    return counts


def with_batch_size(
    builder: SupervisedDatasetBuilder, batch_size: int, where: str
) -> SupervisedDatasetBuilder:
    """Returns the builder with another batch size; raises ConfigurationError if it has none."""
    if isinstance(builder, ChatDatasetBuilder):
        common = chz.replace(builder.common_config, batch_size=batch_size)
        return chz.replace(builder, common_config=common)
    if "batch_size" in chz.chz_fields(builder):
        return chz.replace(builder, batch_size=batch_size)
    raise ConfigurationError(
        f"{where}.dataset_builder: got {type(builder).__name__}, expected a ChatDatasetBuilder or "
        "a builder with a batch_size, so that the batch can be shared out by weight"
    )


class MixedDataset(SupervisedDataset):
    """Batch i has batch i of every dataset, one after the other, numbered by dataset.

    An epoch ends with the dataset that ends first, so that none repeats within it.
    """

    def __init__(self, datasets: Sequence[SupervisedDataset]) -> None:
        if not datasets:
            raise ConfigurationError("dataset_configs: got none, expected at least one dataset")
        self._datasets = list(datasets)

    @property
    def num_dropped(self) -> int:
        """Datums of all datasets left out so far because they have no token to train on."""
        return sum(dataset.num_dropped for dataset in self._datasets)

    def report(self) -> list[str]:
        """Returns lines on the examples that each dataset left out."""
        return [
            f"dataset_configs[{i}]: {line}"
            for i, dataset in enumerate(self._datasets)
            for line in dataset.report()
        ]

    def set_epoch(self, seed: int = 0) -> None:
        """Reorders every dataset."""
        for dataset in self._datasets:
            dataset.set_epoch(seed)

    def get_batch(self, index: int) -> list[tinker.Datum]:
        """Returns the numbered datums of all datasets that have any in this batch.

        Raises EmptyBatchError if none has any.
        """
        data = [
            numbered(datum, number)
            for number, dataset in enumerate(self._datasets)
            for datum in trained_batch(dataset, index)
        ]
        if not data:
            raise EmptyBatchError(
                f"batch {index}: got no token to train on in any of the {len(self._datasets)} "
                "datasets, expected at least one; raise max_length or batch_size"
            )
        return data

    def __len__(self) -> int:
        return min(map(len, self._datasets))


class ConcatenatedDataset(SupervisedDataset):
    """Concatenation of datasets; datums are numbered by the keys."""

    def __init__(self, datasets: Mapping[int, SupervisedDataset]) -> None:
        self._places = [
            (number, dataset, index)
            for number, dataset in datasets.items()
            for index in range(len(dataset))
        ]

    def get_batch(self, index: int) -> list[tinker.Datum]:
        """Returns one batch of one dataset."""
        number, dataset, place = self._places[index]
        return [numbered(datum, number) for datum in dataset.get_batch(place)]

    def __len__(self) -> int:
        return len(self._places)


@chz.chz
class DatasetWithTeacher:
    """A dataset, the teacher of its examples, and its share of each batch."""

    dataset_builder: SupervisedDatasetBuilder = chz.field(doc="Texts to train on")
    teacher_config: TeacherConfig = chz.field(doc="Teacher whose distributions are the targets")
    weight: float = chz.field(default=1.0, doc="Share of each batch, relative to the others")

    @property
    def max_length(self) -> int | None:
        """Tokens after which its examples are cut, where that is known."""
        builder = self.dataset_builder
        chat = isinstance(builder, ChatDatasetBuilder)
        return builder.common_config.max_length if chat else None


@chz.chz
class MixtureBuilder(ChatDatasetBuilder):
    """The datasets of several teachers in one batch, shared out by weight.

    ``common_config.batch_size`` is that of the whole batch; an epoch ends with the dataset that
    ends first.
    """

    parts: list[DatasetWithTeacher] = chz.field(doc="Datasets and their teachers")

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Builds them all; the test data are those of each, one after the other."""
        counts = shares([part.weight for part in self.parts], self.common_config.batch_size)
        built = [
            with_batch_size(part.dataset_builder, count, f"dataset_configs[{i}]")()
            for i, (part, count) in enumerate(zip(self.parts, counts, strict=True))
        ]
        tests = {i: test for i, (_, test) in enumerate(built) if test is not None}
        return (
            MixedDataset([train for train, _ in built]),
            ConcatenatedDataset(tests) if tests else None,
        )

    def held_out_prompts(self, n: int) -> list[list[Message]]:
        """Prompts of the first dataset that has any."""
        for part in self.parts:
            if prompts := part.dataset_builder.held_out_prompts(n):
                return prompts
        return []


def _mixture(config: Config) -> MixtureBuilder:
    name = config.renderer_name or model_info.resolve_renderer_name(config.model_name, None)[0]
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=config.model_name, renderer_name=name, batch_size=config.batch_size
    )
    return MixtureBuilder(common_config=common, parts=config.dataset_configs)


@chz.chz
class Config(BatchConfig):
    """Settings of a run of off-policy distillation."""

    dataset_configs: list[DatasetWithTeacher] = chz.field(doc="Datasets and their teachers")
    n_teacher_targets: int = chz.field(
        default=20, doc="Most probable tokens of the teacher at a position that are targets"
    )
    teacher_concurrency: int = chz.field(default=64, doc="Examples that teachers score at a time")
    batch_size: int = chz.field(default=64, doc="Examples a step, of all datasets together")
    dataset_builder: SupervisedDatasetBuilder = chz.field(
        default=None,  # type: ignore[arg-type]
        munger=chz.mungers.if_none(_mixture),
        doc="Follows from dataset_configs; leave it out",
    )

    def check(self) -> None:
        """Raises ``ConfigurationError`` for the first setting that cannot work.

        Reads tokenizers to see that each teacher's tokens are the student's, but loads no model.
        """
        super().check()
        if not self.dataset_configs:
            raise ConfigurationError("dataset_configs: got none, expected at least one dataset")
        if self.teacher_concurrency < 1:
            raise ConfigurationError(
                f"teacher_concurrency: got {self.teacher_concurrency}, expected at least 1"
            )
        shares([part.weight for part in self.dataset_configs], self.batch_size)
        vocab_size = len(get_tokenizer(self.model_name))
        check_top_k("n_teacher_targets", self.n_teacher_targets, vocab_size)
        for i, part in enumerate(self.dataset_configs):
            _check_part(self.model_name, part, i)


def _where(i: int) -> str:
    return f"dataset_configs[{i}].teacher_config"


def _check_part(model_name: str, part: DatasetWithTeacher, i: int) -> None:
    """The teacher is there, knows the student's tokens and can read the longest example."""
    if isinstance(part.dataset_builder, ChatDatasetBuilder):
        part.dataset_builder.common_config.check()
    part.teacher_config.check(_where(i))
    if part.teacher_config.has_own_prompt or part.teacher_config.renderer_name is not None:
        raise ConfigurationError(
            f"{_where(i)}: got a chat format or prompt of the teacher's own, expected none: here "
            "it reads the very tokens of the example; train_on_policy has teachers with their own"
        )
    teacher = part.teacher_config.base_model
    setting = f"{_where(i)}.base_model"
    try:
        check_same_vocabulary(model_name, teacher, setting)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{setting}: {error}") from error
    context = model_info.resolve_max_length(teacher, None)
    if None not in (context, part.max_length) and part.max_length >= context:  # type: ignore[operator]
        raise ConfigurationError(
            f"dataset_configs[{i}]: max_length is {part.max_length}, expected less than {context}, "
            f"the context of the teacher {teacher}: it reads the example and adds a token"
        )


async def main(config: Config) -> None:
    """Trains, or continues the run in ``config.log_path``."""

    async def objective(session: TrainingSession) -> Objective:
        tokenizer = get_tokenizer(config.model_name)
        clients = [
            await open_teacher(session, config, part.teacher_config, _where(i))
            for i, part in enumerate(config.dataset_configs)
        ]
        teachers = Teachers(
            clients, config.n_teacher_targets, len(tokenizer), config.teacher_concurrency
        )
        return OffPolicy(teachers, [part.max_length for part in config.dataset_configs], tokenizer)

    await train_batches(config, objective)


if __name__ == "__main__":
    run_entrypoint(main)
