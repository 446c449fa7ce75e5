"""Off-policy distillation: trains towards a teacher's distributions on fixed texts.

    python -m tinker_cookbook.distillation.train_off_policy model_name=… log_path=… \\
        dataset_configs.0.dataset_builder=module:Class …
    python -m tinker_cookbook.distillation.train_off_policy --help

Each dataset has its teacher. At every trained token of an example, the targets of a cross-entropy
are the teacher's ``n_teacher_targets`` most probable tokens, renormalised
(``topk_distributions``). The texts are fixed, without samples of the student.
In ``tinker_cookbook.distillation.train_on_policy``, the student writes the texts.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import chz

from tinker_cookbook import model_info
from tinker_cookbook.backends import Future, SamplingClient, TrainingClient
from tinker_cookbook.distillation.datasets import TeacherConfig, open_teacher
from tinker_cookbook.distillation.topk_distributions import (
    SoftDatum,
    check_top_k,
    distance_metrics,
    number_of,
    numbered,
    soft_targets,
    without_number,
)
from tinker_cookbook.eval.evaluators import (
    Evaluator,
    TrainingClientEvaluator,
    forward_logprobs,
)
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message
from tinker_cookbook.supervised.batch_loop import Batch, BatchConfig, Objective, train_batches
from tinker_cookbook.supervised.data import trained_batch
from tinker_cookbook.supervised.nll_evaluator import NLLEvaluator, all_data
from tinker_cookbook.supervised.types import (
    ChatDatasetBuilder,
    ChatDatasetBuilderCommonConfig,
    EmptyBatchError,
    SupervisedDataset,
    SupervisedDatasetBuilder,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import number, prepared, setting
from tinker_cookbook.training.server_needs import Need
from tinker_cookbook.training.session import Metrics, TrainingSession
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.imports import tinker
from tinker_cookbook.vocabulary import check_same_vocabulary


def shares(weights: Sequence[float], batch_size: int) -> list[int]:
    """Splits ``batch_size`` among datasets by weight, at least one example each."""
    for i, weight in enumerate(weights):
        if not (weight > 0 and math.isfinite(weight)):
            raise ConfigurationError(
                f"dataset_configs[{i}].weight: got {weight}, expected a positive number; remove "
                "unwanted datasets"
            )
    if batch_size < len(weights):
        raise ConfigurationError(
            f"batch_size: got {batch_size}, expected at least {len(weights)}, one example for each "
            "dataset"
        )
    # Largest remainder method: the next example goes to the dataset furthest below its share.
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
        "a builder with a batch_size, so that the batch can be split by weight"
    )


class MixedDataset(SupervisedDataset):
    """Concatenates batch i of every dataset, with datums numbered by dataset."""

    def __init__(self, datasets: Sequence[SupervisedDataset]) -> None:
        self._datasets = list(datasets)

    @property
    def num_dropped(self) -> int:
        """Number of datums skipped so far because they have no token to train on."""
        return sum(dataset.num_dropped for dataset in self._datasets)

    def report(self) -> list[str]:
        """Returns lines about the examples that each dataset skipped."""
        return [
            f"dataset_configs[{i}]: {line}"
            for i, dataset in enumerate(self._datasets)
            for line in dataset.report()
        ]

    def set_epoch(self, seed: int = 0) -> None:
        """Reorders every dataset."""
        for dataset in self._datasets:
            dataset.set_epoch(seed)

    def data_sources(self) -> dict[str, Any]:
        """Returns the datasets."""
        return {f"dataset_configs[{i}]": part for i, part in enumerate(self._datasets)}

    def get_batch(self, index: int) -> list[tinker.Datum]:
        """Returns the numbered datums; raises EmptyBatchError if no dataset has any."""
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
        # An epoch ends with the shortest dataset, so that no dataset repeats within it.
        return min(map(len, self._datasets))


class HeldOutDatasets(SupervisedDataset):
    """Concatenates the batches of all datasets; ``None`` has no batches."""

    def __init__(self, datasets: Sequence[SupervisedDataset | None]) -> None:
        self._batches = [
            (number, dataset, index)
            for number, dataset in enumerate(datasets)
            if dataset is not None
            for index in range(len(dataset))
        ]

    def get_batch(self, index: int) -> list[tinker.Datum]:
        """Returns one batch of one dataset, numbered by dataset."""
        number, dataset, position = self._batches[index]
        return [numbered(datum, number) for datum in dataset.get_batch(position)]

    def __len__(self) -> int:
        return len(self._batches)


@chz.chz
class DatasetWithTeacher:
    """A dataset, the teacher of its examples, and its share of each batch."""

    dataset_builder: SupervisedDatasetBuilder = chz.field(doc="Texts to train on")
    teacher_config: TeacherConfig = chz.field(doc="Teacher that provides the targets")
    weight: float = setting(1.0, "Share of each batch, relative to the other datasets")

    def check(self, model_name: str, where: str) -> None:
        """Raises ``ConfigurationError`` for a teacher with other tokens or too short a context."""
        longest = None
        if isinstance(self.dataset_builder, ChatDatasetBuilder):
            self.dataset_builder.common_config.check()
            longest = self.dataset_builder.common_config.max_length
        teacher = self.teacher_config
        teacher.check(f"{where}.teacher_config")
        # The targets of position i must be predictions of the example's token i + 1.
        if teacher.has_own_prompt or teacher.renderer_name is not None:
            raise ConfigurationError(
                f"{where}.teacher_config: got a separate chat format or prompt for the teacher, "
                "expected none: the teacher reads the example's tokens; train_on_policy supports "
                "teachers with other prompts"
            )
        check_same_vocabulary(model_name, teacher.base_model, f"{where}.teacher_config.base_model")
        # The API scores a prompt only while sampling, so the context needs one more token.
        context = model_info.resolve_max_length(teacher.base_model, None)
        if context is not None and longest is not None and longest >= context:
            raise ConfigurationError(
                f"{where}: max_length is {longest}, expected less than {context}, the context of "
                f"the teacher {teacher.base_model}: it needs one more token than the example"
            )


@chz.chz
class MixtureBuilder(ChatDatasetBuilder):
    """Mixes the datasets of several teachers in batches of ``common_config.batch_size``."""

    parts: list[DatasetWithTeacher] = chz.field(doc="Datasets and their teachers")

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Builds all datasets; the test data are concatenated."""
        counts = shares([part.weight for part in self.parts], self.common_config.batch_size)
        built = [
            with_batch_size(part.dataset_builder, count, f"dataset_configs[{i}]")()
            for i, (part, count) in enumerate(zip(self.parts, counts, strict=True))
        ]
        held_out = HeldOutDatasets([test for _, test in built])
        return MixedDataset([train for train, _ in built]), held_out if len(held_out) else None

    def held_out_prompts(self, n: int) -> list[list[Message]]:
        """Returns prompts of the first dataset that has any."""
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
    n_teacher_targets: int = setting(20, "Targets per position: the teacher's most probable tokens")
    teacher_concurrency: int = number(64, "Examples that teachers score concurrently", low=1)
    batch_size: int = setting(64, "Examples per step, over all datasets")
    save_every: int = number(10, "Steps between checkpoints; 0: never")
    eval_every: int = number(20, "Steps between evaluations; 0: never")
    dataset_builder: SupervisedDatasetBuilder = chz.field(
        default=None,  # type: ignore[arg-type]
        munger=chz.mungers.if_none(_mixture),
        doc="Derived from dataset_configs; do not set it",
    )

    def resolved(self) -> Config:
        """Returns the config with all values that follow from others."""
        return self._filled(Config, "dataset_configs")

    def check(self) -> None:
        """Raises ``ConfigurationError`` for the first invalid setting; loads no model."""
        super().check()
        if not self.dataset_configs:
            raise ConfigurationError("dataset_configs: got none, expected at least one dataset")
        shares([part.weight for part in self.dataset_configs], self.batch_size)
        vocab_size = len(get_tokenizer(self.model_name))
        check_top_k("n_teacher_targets", self.n_teacher_targets, vocab_size)
        for i, part in enumerate(self.dataset_configs):
            part.check(self.model_name, f"dataset_configs[{i}]")

    def server_needs(self) -> list[Need]:
        """Returns the required server features: top-K distributions as targets."""
        setting = f"n_teacher_targets={self.n_teacher_targets}"
        features = ("topk_targets", "topk_prompt_logprobs")
        return [*super().server_needs(), *(Need(feature, setting) for feature in features)]


class OffPolicy(Objective):
    """Cross-entropy to the distributions of the teachers ``clients`` on fixed texts.

    Metrics: those of :func:`distance_metrics`; with several datasets,
    ``teacher/forward_kl/dataset_I``.
    """

    shown = "teacher/cross_entropy"

    def __init__(self, config: Config, clients: Sequence[SamplingClient]) -> None:
        self._config, self._clients = config, clients
        self._tokenizer = get_tokenizer(config.model_name)

    async def score(self, data: Sequence[tinker.Datum]) -> list[SoftDatum]:
        """Returns each numbered datum with the targets of its dataset's teacher."""
        limit = asyncio.Semaphore(self._config.teacher_concurrency)
        # A teacher may have a larger vocabulary than the student.
        k, vocab_size = self._config.n_teacher_targets, len(self._tokenizer)

        async def one(datum: tinker.Datum) -> SoftDatum:
            async with limit:
                return await soft_targets(datum, self._clients[number_of(datum)], k, vocab_size)

        return list(await asyncio.gather(*map(one, data)))

    async def prepare(self, step: int, data: list[tinker.Datum]) -> Batch:
        """Scores every example with its teacher."""
        soft = await self.score(data)
        return Batch([each.datum for each in soft], (soft, [number_of(datum) for datum in data]))

    def submit(self, client: TrainingClient, batch: Batch) -> Future[tinker.ForwardBackwardOutput]:
        """Queues a pass with the backend's cross-entropy with targets [T, K]."""
        return client.forward_backward(batch.data, "cross_entropy")

    def metrics(self, batch: Batch, output: tinker.ForwardBackwardOutput) -> Metrics:
        """Returns metrics over all examples, and per dataset if there are several."""
        soft: list[SoftDatum]
        numbers: list[int]
        soft, numbers = batch.prepared
        logprobs = [record["logprobs"] for record in output.loss_fn_outputs]
        metrics: Metrics = dict(distance_metrics(soft, logprobs))
        for dataset in sorted(set(numbers)) if len(self._clients) > 1 else ():
            own = [i for i, other in enumerate(numbers) if other == dataset]
            part = distance_metrics([soft[i] for i in own], [logprobs[i] for i in own])
            metrics[f"teacher/forward_kl/dataset_{dataset}"] = part["teacher/forward_kl"]
        return metrics

    def evaluators(self, test_set: SupervisedDataset) -> list[Evaluator]:
        """Returns evaluators of the held-out texts: NLL and distance to the teachers."""
        data = all_data(test_set)
        # Remove the number, because backends do not know the field.
        plain = [without_number(datum) for datum in data]
        nll = NLLEvaluator(plain, "test", self._tokenizer)
        return [nll, TeacherDistanceEvaluator(self, data)]


class TeacherDistanceEvaluator(TrainingClientEvaluator):
    """The metrics of :func:`distance_metrics` on held-out texts, under ``test/``."""

    def __init__(self, objective: OffPolicy, data: Sequence[tinker.Datum]) -> None:
        self._objective, self._data = objective, data
        self._soft: list[SoftDatum] | None = None

    async def __call__(self, training_client: TrainingClient) -> dict[str, float]:
        """Scores all texts with the student."""
        # Teachers are frozen, so score the texts once per process.
        if self._soft is None:
            self._soft = await self._objective.score(self._data)
        data = [soft.datum for soft in self._soft]
        return distance_metrics(self._soft, await forward_logprobs(training_client, data), "test")


async def main(config: Config) -> None:
    """Trains, or resumes the run in ``config.log_path``."""

    async def objective(session: TrainingSession) -> Objective:
        clients = [
            await open_teacher(
                session, config, part.teacher_config, f"dataset_configs[{i}].teacher_config"
            )
            for i, part in enumerate(config.dataset_configs)
        ]
        return OffPolicy(config, clients)

    async with prepared(config) as config:
        await train_batches(config, objective)


if __name__ == "__main__":
    run_entrypoint(main)
