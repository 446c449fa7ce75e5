"""Direct preference optimization (DPO) on the shared loop over batches (``supervised.batch_loop``).

    python -m tinker_cookbook.preference.train_dpo model_name=… log_path=… \\
        dataset_builder=module:Class dataset_builder.KEY=…
    python -m tinker_cookbook.preference.train_dpo dataset_builder=mine:MyPairs --help

A batch has pairs of chosen and rejected answers to the same prompt. A frozen reference,
the initial policy, scores each answer. One pass then trains the policy on the
loss of ``dpo_loss``; both answers of a pair share the forward pass of their prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import chz
import numpy as np

from tinker_cookbook import display
from tinker_cookbook.backends import Future, SamplingClient, TrainingClient
from tinker_cookbook.eval.evaluators import (
    Evaluator,
    TrainingClientEvaluator,
    forward_logprobs,
)
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.preference.dpo_loss import (
    PairLoss,
    PairLossName,
    PairObjective,
    answer_rewards,
    answer_scores,
    pair_metrics,
)
from tinker_cookbook.preference.reference import reference_client
from tinker_cookbook.record.examples import write_held_out
from tinker_cookbook.run.weights_paths import weights_field
from tinker_cookbook.supervised.batch_loop import (
    Batch,
    BatchConfig,
    Columns,
    Objective,
    train_batches,
)
from tinker_cookbook.supervised.common import compute_token_nll
from tinker_cookbook.supervised.nll_evaluator import all_data
from tinker_cookbook.supervised.types import SupervisedDataset
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.training.config import prepared, setting
from tinker_cookbook.training.server_needs import Need
from tinker_cookbook.training.session import Metrics, TrainingSession
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint, run_to_end
from tinker_cookbook.utils.imports import official_names, tinker
from tinker_cookbook.utils.model_inputs import score_datums
from tinker_cookbook.vocabulary import check_same_vocabulary

__getattr__ = official_names(__name__)


@chz.chz
class Config(BatchConfig):
    """Settings of a DPO run; ``dataset_builder`` returns pairs."""

    learning_rate: float | None = 1e-5
    dpo_beta: float = setting(
        0.1, "Scale of the rewards; a larger value stays closer to the reference"
    )
    dpo_loss: PairLossName = setting("dpo", "dpo, ipo or simpo")
    label_smoothing: float = setting(0.0, "Share of labels assumed to be wrong (conservative DPO)")
    simpo_gamma: float = setting(0.5, "Target margin of simpo")
    reference_model_name: str | None = weights_field(
        "sampler_weights", "Reference; or a base model; default: the initial policy"
    )
    num_replicas: int | None = setting(
        None, "Has no effect: the backend decides how many machines it uses"
    )

    def recommended_rate(self) -> float:
        """Returns a tenth of ``get_lr``: 1.3e-4 for the demo model, 2.9e-5 for Llama 8B."""
        # Gradients of pairs are noisier than those of target texts.
        return 0.1 * super().recommended_rate()

    def resolved(self) -> Config:
        """Returns the config with all values that follow from others."""
        return self._filled(Config, "dataset_builder")

    @property
    def pair_loss(self) -> PairLoss:
        """The loss of these settings."""
        return PairLoss(self.dpo_loss, self.dpo_beta, self.label_smoothing, self.simpo_gamma)

    def check(self) -> None:
        """Raises ``ConfigurationError`` for the first invalid setting."""
        super().check()
        self.pair_loss.check()
        if self.reference_model_name is not None and not self.pair_loss.needs_reference:
            raise ConfigurationError(
                f"reference_model_name: got {self.reference_model_name!r} with dpo_loss="
                f"{self.dpo_loss}, which has no reference; leave one out"
            )

    def server_needs(self) -> list[Need]:
        """Returns the required server features: custom losses, and scores of the reference."""
        needs = [Need("custom_loss", f"dpo_loss={self.dpo_loss}")]
        if self.pair_loss.needs_reference:
            needs.append(
                Need("prompt_logprobs", f"dpo_loss={self.dpo_loss} with its reference policy")
            )
        return [*super().server_needs(), *needs]


def main(config: Config) -> None:
    """Trains, or resumes the run in ``config.log_path``."""
    run_to_end(main_async(config))


async def main_async(config: Config) -> None:
    """Asynchronous version of :func:`main`."""
    async with prepared(config) as config:
        await _train(config)


async def _train(config: Config) -> None:
    name = config.reference_model_name
    # The reference scores the policy's token ids, so it must have the same vocabulary.
    if name is not None and not name.startswith("tinker://"):
        check_same_vocabulary(config.model_name, name, "reference_model_name")

    async def objective(session: TrainingSession) -> Objective:
        loss = config.pair_loss
        if not loss.needs_reference:
            return Pairs(loss, None)
        # Open the reference once and never update it, so that rewards are comparable between steps.
        return Pairs(loss, await reference_client(session, config, name))

    await train_batches(config, objective)


def print_example(datum: tinker.Datum, tokenizer: Tokenizer, label: str = "") -> None:
    """Prints one answer with its prompt in colours; ``label`` is the title."""
    display.print_example(datum, tokenizer, title=label or "a training example")


class Pairs(Objective):
    """Pairwise objective; ``dpo_loss.pair_metrics`` documents the metrics."""

    shown = "dpo_loss"

    def __init__(self, loss: PairLoss, reference: SamplingClient | None) -> None:
        self._loss, self._reference = loss, reference

    async def prepare(self, step: int, data: list[tinker.Datum]) -> Batch:
        """Scores every answer with the reference."""
        # For SimPO, a reference of 0 leaves the log-probabilities unchanged.
        if self._reference is None:
            return Batch(data, np.zeros(len(data)))
        logprobs = await score_datums(self._reference, data)
        return Batch(data, answer_scores(data, logprobs), {"reference_logprobs": logprobs})

    def submit(self, client: TrainingClient, batch: Batch) -> Future[tinker.ForwardBackwardOutput]:
        """Queues one pass with autograd on the local engine, two passes on the hosted API."""
        loss = PairObjective(self._loss, batch.data, batch.prepared)
        return client.forward_backward_custom(batch.data, loss)

    def metrics(self, batch: Batch, output: tinker.ForwardBackwardOutput) -> Metrics:
        """Returns ``num_pairs`` and the metrics of ``pair_metrics``."""
        logprobs = [record["logprobs"] for record in output.loss_fn_outputs]
        found = pair_metrics(self._loss, batch.data, batch.prepared, logprobs)
        return {"num_pairs": len(batch.data) // 2, **found}

    def columns(self, batch: Batch, output: tinker.ForwardBackwardOutput) -> Columns:
        """Returns the pair of each answer, its reward, and the margin of the pair."""
        return self.columns_of(batch, [record["logprobs"] for record in output.loss_fn_outputs])

    def columns_of(self, batch: Batch, logprobs: Sequence[tinker.TensorData]) -> Columns:
        """Returns the columns of a batch with the policy's log-probabilities."""
        rewards = answer_rewards(self._loss, batch.data, batch.prepared, logprobs)
        numbers = np.arange(len(rewards))
        margins = np.repeat(rewards[::2] - rewards[1::2], 2)
        return {
            **batch.columns,
            "pair": (numbers // 2).tolist(),
            "chosen": (numbers % 2 == 0).tolist(),
            "reward": rewards.tolist(),
            "margin": margins.tolist(),
        }

    def evaluators(self, test_set: SupervisedDataset) -> list[Evaluator]:
        """Returns the evaluator of held-out pairs."""
        return [PairEvaluator(self, self._loss, all_data(test_set))]


class PairEvaluator(TrainingClientEvaluator):
    """``test/dpo_loss``, ``test/accuracy``, ``test/margin``, ``test/chosen_reward`` and
    ``test/rejected_reward`` as in ``pair_metrics``, over all pairs; and ``test/nll``: nats per
    token of the chosen answers, which rises if they become less likely."""

    def __init__(self, pairs: Pairs, loss: PairLoss, data: list[tinker.Datum]) -> None:
        if not data:
            raise DataValidationError(
                "held-out pairs: got none that can be scored, expected at least one; max_length "
                "may leave no room for answers"
            )
        self._pairs, self._loss, self._data = pairs, loss, data
        self._batch: Batch | None = None

    async def __call__(self, training_client: TrainingClient) -> dict[str, float]:
        """Scores all pairs."""
        forward = forward_logprobs(training_client, self._data)
        if self._batch is None:
            # The reference is frozen, so score the pairs once per process, while the policy
            # scores them too.
            scored = self._pairs.prepare(0, self._data)
            logprobs, self._batch = await asyncio.gather(forward, scored)
        else:
            logprobs = await forward
        if self.record is not None:
            columns = self._pairs.columns_of(self._batch, logprobs)
            write_held_out(self.record, "test", self._data, logprobs, columns)
        return {
            **pair_metrics(self._loss, self._data, self._batch.prepared, logprobs, "test/"),
            # Only chosen answers: the margin can grow while both answers become less likely.
            "test/nll": compute_token_nll(logprobs[::2], self._data[::2]),
            "test/num_pairs": float(len(self._data) // 2),
        }


if __name__ == "__main__":
    run_entrypoint(main)
