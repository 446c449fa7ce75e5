"""Training towards soft targets, as an objective of the shared loop over batches.

The datums of several datasets stand in one batch. Each carries a number, of its dataset or of its
row, which says which teacher or demonstration belongs to it. The number is removed before the loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tinker_cookbook.distillation.topk_targets import SoftDatum, distance_metrics, soft_targets
from tinker_cookbook.eval.evaluators import Evaluator, TrainingClientEvaluator
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.supervised.batch_loop import Batch, Objective
from tinker_cookbook.supervised.nll_evaluator import NLLEvaluator, all_data
from tinker_cookbook.supervised.types import SupervisedDataset
from tinker_cookbook.training.session import Metrics
from tinker_cookbook.utils.imports import lazy_module

if TYPE_CHECKING:
    import tinker
    from tinker import types

    from tinker_cookbook.backends import Future, SamplingClient, TrainingClient
    from tinker_cookbook.tokenizer_utils import Tokenizer
else:
    tinker = lazy_module("tinker")

_NUMBER = "number"


def numbered(datum: tinker.Datum, number: int) -> tinker.Datum:
    """Returns the datum with ``number`` as one more field."""
    field = tinker.TensorData.from_numpy(np.array([number], dtype=np.int64))
    return tinker.Datum(
        model_input=datum.model_input, loss_fn_inputs={**datum.loss_fn_inputs, _NUMBER: field}
    )


def number_of(datum: tinker.Datum) -> int:
    """Returns the number that :func:`numbered` attached."""
    if _NUMBER not in datum.loss_fn_inputs:
        raise DataValidationError(
            "datum: got one without a number, expected it from a dataset whose examples are "
            "numbered, since the number says which teacher or demonstration belongs to it"
        )
    return int(datum.loss_fn_inputs[_NUMBER].to_numpy()[0])


def without_number(datum: tinker.Datum) -> tinker.Datum:
    """Returns the datum without its number."""
    fields = {name: value for name, value in datum.loss_fn_inputs.items() if name != _NUMBER}
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs=fields)


class SoftObjective(Objective):
    """Cross-entropy to a teacher's distributions. ``Batch.prepared`` is the list of ``SoftDatum``.

    A subclass says in ``prepare`` where they come from; :func:`distance_metrics` documents the
    metrics, whose names begin with ``prefix``.
    """

    prefix = "teacher"
    shown = "teacher/cross_entropy"

    def submit(self, client: TrainingClient, batch: Batch) -> Future[types.ForwardBackwardOutput]:
        """Queues a pass with the backend's cross-entropy, which takes targets [T, K]."""
        return client.forward_backward(batch.data, "cross_entropy")

    def metrics(self, batch: Batch, output: types.ForwardBackwardOutput) -> Metrics:
        """Returns the distance metrics of the batch."""
        logprobs = [record["logprobs"] for record in output.loss_fn_outputs]
        return dict(distance_metrics(batch.prepared, logprobs, self.prefix))


@dataclass(frozen=True)
class Teachers:
    """Teachers of several datasets; example ``number`` gets the top ``k`` of ``clients[number]``.

    ``vocab_size`` is the student's: a teacher may have more tokens.
    """

    clients: Sequence[SamplingClient]
    k: int
    vocab_size: int
    concurrency: int

    async def score(self, data: Sequence[tinker.Datum]) -> list[SoftDatum]:
        """Returns each numbered datum with the targets of its teacher."""
        limit = asyncio.Semaphore(self.concurrency)

        async def one(datum: tinker.Datum) -> SoftDatum:
            teacher = self.clients[number_of(datum)]
            async with limit:
                return await soft_targets(datum, teacher, self.k, self.vocab_size)

        return list(await asyncio.gather(*map(one, data)))


class OffPolicy(SoftObjective):
    """Objective towards the teachers' distributions on given texts.

    Beside the metrics of :func:`distance_metrics`: with several datasets
    ``teacher/forward_kl/dataset_I`` for each, and ``num_cut``, the examples that fill their
    dataset's ``max_length``, so that the end of their text may be missing.
    """

    def __init__(
        self,
        teachers: Teachers,
        max_lengths: Sequence[int | None],
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._teachers, self._max_lengths = teachers, max_lengths
        self._tokenizer = tokenizer

    async def prepare(self, step: int, data: list[tinker.Datum]) -> Batch:
        """Scores every example with its teacher."""
        soft = await self._teachers.score(data)
        return Batch([each.datum for each in soft], _Targets(soft, [number_of(d) for d in data]))

    def metrics(self, batch: Batch, output: types.ForwardBackwardOutput) -> Metrics:
        """Returns metrics over all examples, and for each dataset if there are several."""
        targets: _Targets = batch.prepared
        logprobs = [record["logprobs"] for record in output.loss_fn_outputs]
        metrics: Metrics = dict(distance_metrics(targets.soft, logprobs, self.prefix))
        metrics["num_cut"] = sum(
            datum.model_input.length + 1 == self._max_lengths[number]
            for datum, number in zip(batch.data, targets.numbers, strict=True)
        )
        name = f"{self.prefix}/forward_kl"
        for number in sorted(set(targets.numbers)) if len(self._max_lengths) > 1 else ():
            mine = [i for i, other in enumerate(targets.numbers) if other == number]
            part = distance_metrics(
                [targets.soft[i] for i in mine], [logprobs[i] for i in mine], self.prefix
            )
            metrics[f"{name}/dataset_{number}"] = part[name]
        return metrics

    def evaluators(self, test_set: SupervisedDataset) -> list[Evaluator]:
        """Returns evaluators of the held-out texts: NLL and distance to the teachers."""
        data = all_data(test_set)
        plain = [without_number(datum) for datum in data]
        return [
            NLLEvaluator(plain, "test", self._tokenizer),
            TeacherDistanceEvaluator(self._teachers, data),
        ]


@dataclass(frozen=True)
class _Targets:
    soft: list[SoftDatum]
    numbers: list[int]


class TeacherDistanceEvaluator(TrainingClientEvaluator):
    """The metrics of :func:`distance_metrics` on held-out texts, under ``NAME/``.

    ``test/forward_kl`` and ``test/cross_entropy`` fall; ``test/topk_mass`` and ``test/entropy`` are
    the teacher's alone and stay. The teacher scores the texts once per process, at the first
    evaluation.
    """

    def __init__(
        self,
        teachers: Teachers,
        data: Sequence[tinker.Datum],
        name: str = "test",
        batch_size: int = 32,
    ) -> None:
        self._teachers, self._data, self._name = teachers, list(data), name
        self._batch_size = batch_size
        self._soft: list[SoftDatum] | None = None

    async def __call__(self, training_client: TrainingClient) -> dict[str, float]:
        """Scores all texts, ``batch_size`` in a request."""
        if self._soft is None:
            self._soft = await self._teachers.score(self._data)
        data = [soft.datum for soft in self._soft]
        futures = [
            training_client.forward(data[start : start + self._batch_size], "cross_entropy")
            for start in range(0, len(data), self._batch_size)
        ]
        logprobs = []
        for future in futures:
            logprobs += [record["logprobs"] for record in (await future).loss_fn_outputs]
        return distance_metrics(self._soft, logprobs, self._name)
