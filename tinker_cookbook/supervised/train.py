"""Supervised training with cross-entropy, using the loop over batches (``batch_loop``).

    python -m tinker_cookbook.supervised.train model_name=… log_path=… dataset_builder=module:Class
    python -m tinker_cookbook.supervised.train dataset_builder=mine:MyDataset --help

The second command also lists the options of that class.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import chz

from tinker_cookbook.backends import Future, TrainingClient
from tinker_cookbook.eval.evaluators import Evaluator
from tinker_cookbook.supervised.batch_loop import (
    Batch,
    BatchConfig,
    Objective,
    SubmittedBatch,
    tokenizer_of,
    train_batches,
)
from tinker_cookbook.supervised.common import compute_data_bpb, compute_token_nll, count_loss_tokens
from tinker_cookbook.supervised.nll_evaluator import NLLEvaluator
from tinker_cookbook.supervised.types import SupervisedDataset
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.training.config import prepared
from tinker_cookbook.training.session import Metrics, TrainingSession, run_evaluators
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.imports import tinker
from tinker_cookbook.utils.trace import scope_span

__all__ = ["Config", "CrossEntropy", "SubmittedBatch", "main", "run_evals"]

logger = logging.getLogger(__name__)


@chz.chz
class Config(BatchConfig):
    """Settings of a supervised run."""

    async_periodic_saves: bool = chz.field(
        default=False, doc="Has no effect: saves never block submitted steps"
    )

    def resolved(self) -> Config:
        """Returns the config with all values that follow from others."""
        return self._filled(Config, "dataset_builder")


async def main(config: Config) -> None:
    """Trains, or resumes the run in ``config.log_path``."""
    if config.async_periodic_saves:
        logger.warning(
            "async_periodic_saves has no effect: a save is queued after its step, and only the "
            "checkpoint record waits for it"
        )

    async def objective(session: TrainingSession) -> Objective:
        return CrossEntropy(tokenizer_of(config.dataset_builder))

    async with prepared(config) as config:
        await train_batches(config, objective)


async def run_evals(
    evaluators: Sequence[Evaluator], training_client: TrainingClient, step: int
) -> Metrics:
    """Returns the metrics of all evaluators on the client's current weights, for custom loops.

    Evaluators that sample share one snapshot of the weights. ``step`` is only logged.
    """
    logger.info("evaluating before step %d", step)
    async with scope_span("run_evals"):
        return await run_evaluators(evaluators, training_client)


class CrossEntropy(Objective):
    """Weighted negative log-likelihood of the targets.

    ``train_mean_nll`` and ``test/nll`` are nats per trained token, each token counted once; with a
    tokenizer there are also bits per byte (``train_mean_bpb``, ``test/bpb``).
    """

    shown = "train_mean_nll"

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer

    def submit(self, client: TrainingClient, batch: Batch) -> Future[tinker.ForwardBackwardOutput]:
        """Submits a pass with the backend's cross-entropy loss."""
        return client.forward_backward(batch.data, "cross_entropy")

    def metrics(self, batch: Batch, output: tinker.ForwardBackwardOutput) -> Metrics:
        """Returns ``num_loss_tokens`` and the mean losses."""
        # The backend returns one record for each datum, in order.
        logprobs = [record["logprobs"] for record in output.loss_fn_outputs]
        metrics: Metrics = {
            "num_loss_tokens": sum(count_loss_tokens(datum) for datum in batch.data),
            "train_mean_nll": compute_token_nll(logprobs, batch.data),
        }
        if self._tokenizer is not None:
            metrics["train_mean_bpb"] = compute_data_bpb(logprobs, batch.data, self._tokenizer)
        return metrics

    def evaluators(self, test_set: SupervisedDataset) -> list[Evaluator]:
        """Returns the evaluator of ``test/nll``."""
        return [NLLEvaluator.from_dataset(test_set, "test", self._tokenizer)]


if __name__ == "__main__":
    run_entrypoint(main)
