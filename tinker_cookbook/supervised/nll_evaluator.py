"""Held-out loss, computed by a training client or a sampling client.

Both return ``NAME/nll``, the mean of ``-logprob`` over trained positions in nats. Weights only
select these positions; their scale (``reduction="mean"``) has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinker_cookbook.backends import SamplingClient, TrainingClient
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator, TrainingClientEvaluator
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.record.examples import write_held_out
from tinker_cookbook.supervised.common import (
    compute_data_bpb,
    compute_token_nll,
    count_loss_tokens,
)
from tinker_cookbook.supervised.row_datasets import trained_batch
from tinker_cookbook.supervised.types import SupervisedDataset
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.utils.imports import tinker
from tinker_cookbook.utils.model_inputs import score_datums


def all_data(dataset: SupervisedDataset) -> list[tinker.Datum]:
    """Returns all datums of a dataset with trained tokens, in the current order."""
    return [datum for index in range(len(dataset)) for datum in trained_batch(dataset, index)]


class _HeldOutLoss:
    """Data of an evaluator, and the metrics of their log-probabilities."""

    def __init__(
        self,
        data: Sequence[tinker.Datum],
        name: str = "test",
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._data, self._name, self._tokenizer = list(data), name, tokenizer
        self._num_loss_tokens = sum(map(count_loss_tokens, self._data))
        # The mean over no tokens is NaN, so fail before training starts.
        if not self._num_loss_tokens:
            raise DataValidationError(
                f"{name} data: got {len(self._data)} examples without a single token to score, "
                "expected at least one; check max_length and train_on_what"
            )

    def metrics(self, logprobs: list[Any]) -> dict[str, float]:
        metrics = {
            f"{self._name}/nll": compute_token_nll(logprobs, self._data),
            f"{self._name}/num_loss_tokens": float(self._num_loss_tokens),
        }
        if self._tokenizer is not None:
            metrics[f"{self._name}/bpb"] = compute_data_bpb(logprobs, self._data, self._tokenizer)
        return metrics


class NLLEvaluator(_HeldOutLoss, TrainingClientEvaluator):
    """Mean negative log-likelihood of held-out data by ``TrainingClient.forward``.

    Metrics are ``NAME/nll`` (nats per trained token), ``NAME/num_loss_tokens`` and, with a
    tokenizer, ``NAME/bpb`` (bits per byte). ``batch_size`` is the number of examples in a request.
    """

    def __init__(
        self,
        data: Sequence[tinker.Datum],
        name: str = "test",
        tokenizer: Tokenizer | None = None,
        batch_size: int = 64,
    ) -> None:
        super().__init__(data, name, tokenizer)
        if batch_size < 1:
            raise ConfigurationError(f"batch_size: got {batch_size}, expected at least 1")
        self._batch_size = batch_size

    @classmethod
    def from_dataset(
        cls,
        dataset: SupervisedDataset,
        name: str = "test",
        tokenizer: Tokenizer | None = None,
        batch_size: int = 64,
    ) -> NLLEvaluator:
        """Creates the evaluator from all data of ``dataset``, rendered once."""
        return cls(all_data(dataset), name, tokenizer, batch_size)

    async def __call__(self, training_client: TrainingClient) -> dict[str, float]:
        """Computes the metrics; submits all requests first, so that the backend is never idle."""
        futures = [
            training_client.forward(self._data[start : start + self._batch_size], "cross_entropy")
            for start in range(0, len(self._data), self._batch_size)
        ]
        logprobs: list[Any] = []
        for future in futures:
            logprobs += [record["logprobs"] for record in (await future).loss_fn_outputs]
        if self.record is not None:
            write_held_out(self.record, self._name, self._data, logprobs)
        return self.metrics(logprobs)


class SamplerNLLEvaluator(_HeldOutLoss, SamplingClientEvaluator):
    """Metrics of ``NLLEvaluator`` by ``SamplingClient.compute_logprobs``."""

    @classmethod
    def from_dataset(
        cls, dataset: SupervisedDataset, name: str = "test", tokenizer: Tokenizer | None = None
    ) -> SamplerNLLEvaluator:
        """Creates the evaluator from all data of ``dataset``, rendered once."""
        return cls(all_data(dataset), name, tokenizer)

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        """Scores complete sequences; the first token has no prediction."""
        return self.metrics(await score_datums(sampling_client, self._data))
