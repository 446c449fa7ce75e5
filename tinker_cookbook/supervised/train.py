"""The supervised training loop.

For each step: take the next batch (prepared ahead in the background), submit ``forward_backward``
and ``optim_step`` together, and keep ``submit_ahead`` further steps in flight while waiting for
the results. At a boundary, where an evaluation or a checkpoint is due, nothing more is submitted
until it is done, so both see exactly the updates their step says.

Rows of ``metrics.jsonl``: ``step`` counts finished updates. Row 0 holds the evaluations before
training; row k the metrics of the k-th batch, computed with the weights before its update, and the
evaluations after it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import chz

from tinker_cookbook.display import TrainingProgress, print_example
from tinker_cookbook.eval.evaluators import EvaluatorBuilder
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.supervised.common import compute_bpb, compute_token_nll, count_loss_tokens
from tinker_cookbook.supervised.evaluators import NLLEvaluator
from tinker_cookbook.supervised.prefetch import Prefetcher
from tinker_cookbook.supervised.showcase import Showcase
from tinker_cookbook.supervised.types import (
    ChatDatasetBuilder,
    SupervisedDataset,
    SupervisedDatasetBuilder,
)
from tinker_cookbook.training.config import TrainingConfig
from tinker_cookbook.training.session import Metrics, TrainingSession, training_session

if TYPE_CHECKING:
    import tinker
    from tinker import types

    from tinker_cookbook.backends import Future, TrainingClient
    from tinker_cookbook.tokenizer_utils import Tokenizer


@chz.chz
class Config(TrainingConfig):
    """Settings of a supervised run."""

    dataset_builder: SupervisedDatasetBuilder = chz.field(doc="Training and test data")
    evaluator_builders: list[EvaluatorBuilder] = chz.field(
        default_factory=list, doc="Evaluations every eval_every steps"
    )
    infrequent_evaluator_builders: list[EvaluatorBuilder] = chz.field(
        default_factory=list, doc="Evaluations every infrequent_eval_every steps"
    )
    submit_ahead: int = chz.field(default=1, doc="Steps in flight beyond the one awaited")
    show_samples: int = chz.field(
        default=1, doc="Held-out prompts that the model answers before and after training"
    )
    sample_max_tokens: int = chz.field(default=96, doc="Longest of these answers")

    def check(self) -> None:
        """Raises ``ConfigurationError`` for the first setting that cannot work."""
        super().check()
        if isinstance(self.dataset_builder, ChatDatasetBuilder):
            self.dataset_builder.common_config.check()
        for name, low in (("submit_ahead", 0), ("show_samples", 0), ("sample_max_tokens", 1)):
            if getattr(self, name) < low:
                raise ConfigurationError(f"{name}: got {getattr(self, name)}, expected >= {low}")


@dataclass(frozen=True)
class Schedule:
    """Which batch each step takes: epochs over ``num_batches`` batches, ``total_steps`` in all."""

    num_batches: int
    total_steps: int

    @classmethod
    def of(cls, dataset: SupervisedDataset, config: Config) -> Schedule:
        """As many steps as the epochs have, or ``max_steps`` if that is less."""
        total = len(dataset) * config.num_epochs
        if config.max_steps is not None:
            total = min(total, config.max_steps)
        return cls(len(dataset), total)

    def place(self, step: int) -> tuple[int, int]:
        """(epoch, batch index) of the 0-based ``step``."""
        return divmod(step, self.num_batches)


@dataclass(frozen=True)
class _InFlight:
    """A submitted step. ``tokens`` counts those read up to and with it."""

    step: int
    data: list[tinker.Datum]
    tokens: int
    forward_backward: Future[types.ForwardBackwardOutput]
    optim_step: Future[types.OptimStepResponse]
    learning_rate: float


async def main(config: Config) -> None:
    """Trains, or continues the run in ``config.log_path``."""
    config.check()
    train_set, test_set = config.dataset_builder()
    schedule = Schedule.of(train_set, config)
    async with training_session(config) as session:
        if session.start_step >= schedule.total_steps:
            session.say(
                f"This run is complete ({session.start_step} steps); num_epochs or max_steps can "
                "make it longer.",
                *session.summary(),
            )
            return
        client = await session.start(schedule.total_steps)
        train_set.set_epoch(config.seed)
        if (tokenizer := tokenizer_of(config.dataset_builder)) is not None:
            print_example(train_set.get_batch(0)[0], tokenizer)
        session.evaluators = [build() for build in config.evaluator_builders]
        session.infrequent_evaluators = [b() for b in config.infrequent_evaluator_builders]
        if test_set is not None:
            session.evaluators.insert(0, NLLEvaluator.from_dataset(test_set, "test", tokenizer))
        showcase = Showcase.of(
            config.dataset_builder, config.show_samples, config.sample_max_tokens
        )
        await showcase.show(await session.sampling_client(), "before training")
        await _train(config, session, client, train_set, schedule)
        await showcase.show(await session.sampling_client(), "after training")
        if train_set.num_dropped:
            session.say(f"{train_set.num_dropped} examples had no token to train and were dropped")
        session.say(*session.summary())


def tokenizer_of(builder: SupervisedDatasetBuilder) -> Tokenizer | None:
    """The tokenizer of a builder of chat data."""
    return builder.tokenizer if isinstance(builder, ChatDatasetBuilder) else None


async def _train(
    config: Config,
    session: TrainingSession,
    client: TrainingClient,
    dataset: SupervisedDataset,
    schedule: Schedule,
) -> None:
    """The loop over steps."""
    loop = _Loop(config, session, schedule)
    if session.start_step == 0:
        await loop.record_start()
    with loop.progress, Prefetcher(batches(dataset, schedule, config, session.start_step)) as ahead:
        for step in range(session.start_step, schedule.total_steps):
            loop.submit(client, step, await ahead.next())
            keep = 0 if loop.at_boundary() else config.submit_ahead
            while len(loop.in_flight) > keep:
                await loop.finish_oldest()
        while loop.in_flight:
            await loop.finish_oldest()


def batches(
    dataset: SupervisedDataset, schedule: Schedule, config: Config, start: int
) -> Iterator[list[tinker.Datum]]:
    """The batches of steps ``start`` and on; each epoch has an order of its own from the seed."""
    current = None
    for step in range(start, schedule.total_steps):
        epoch, index = schedule.place(step)
        if epoch != current:
            dataset.set_epoch(config.seed + epoch)
            current = epoch
        yield dataset.get_batch(index)


class _Loop:
    """What the loop carries from step to step: steps in flight and running counts."""

    def __init__(self, config: Config, session: TrainingSession, schedule: Schedule) -> None:
        self._config, self._session, self._schedule = config, session, schedule
        self._tokenizer = tokenizer_of(config.dataset_builder)
        self.in_flight: deque[_InFlight] = deque()
        self.progress = TrainingProgress(schedule.total_steps, session.start_step)
        self._tokens = session.restored("cumulative_tokens", 0)
        self._finished_at = time.monotonic()

    async def record_start(self) -> None:
        """Row 0: the evaluations before training."""
        metrics = await self._session.evaluate(0)
        if metrics:
            self._session.write_row({"progress": 0.0, "epoch": 0, **metrics}, step=0)
        self._finished_at = time.monotonic()

    def submit(self, client: TrainingClient, step: int, data: list[tinker.Datum]) -> None:
        """Queues one update."""
        params = self._config.adam_params(step, self._schedule.total_steps)
        self._tokens += _num_tokens(data)
        self.in_flight.append(
            _InFlight(
                step,
                data,
                self._tokens,
                client.forward_backward(data, "cross_entropy"),
                client.optim_step(params),
                params.learning_rate,
            )
        )

    def at_boundary(self) -> bool:
        """Whether something is due after the newest submitted update."""
        return self._session.boundary(self.in_flight[-1].step + 1, self._tokens)

    async def finish_oldest(self) -> None:
        """Waits for the oldest update and writes its row."""
        oldest = self.in_flight.popleft()
        output = await oldest.forward_backward
        optim = await oldest.optim_step
        metrics = self._metrics(oldest, output, optim)
        self.progress.update(
            oldest.step + 1, float(metrics["train_mean_nll"]), int(metrics["num_tokens"])
        )
        await self._session.finish_step(
            oldest.step + 1,
            metrics,
            epoch=self._schedule.place(oldest.step)[0],
            counters={"cumulative_tokens": oldest.tokens},
        )
        self._finished_at = time.monotonic()

    def _metrics(
        self,
        done: _InFlight,
        output: types.ForwardBackwardOutput,
        optim: types.OptimStepResponse,
    ) -> Metrics:
        num_tokens = _num_tokens(done.data)
        seconds = time.monotonic() - self._finished_at
        logprobs = [record["logprobs"] for record in output.loss_fn_outputs]
        metrics: Metrics = {
            "epoch": self._schedule.place(done.step)[0],
            "progress": (done.step + 1) / self._schedule.total_steps,
            "learning_rate": done.learning_rate,
            "num_sequences": len(done.data),
            "num_tokens": num_tokens,
            "num_loss_tokens": sum(count_loss_tokens(datum) for datum in done.data),
            "tokens/cumulative/trained": done.tokens,
            "train_mean_nll": compute_token_nll(logprobs, done.data),
            "time/step": seconds,
            "time/tokens_per_second": num_tokens / max(seconds, 1e-9),
        }
        if self._tokenizer is not None:
            metrics["train_mean_bpb"] = compute_bpb(logprobs, done.data, self._tokenizer)
        for name, value in (optim.metrics or {}).items():
            metrics[f"optim/{name}"] = value
        return metrics


def _num_tokens(data: list[tinker.Datum]) -> int:
    return sum(datum.model_input.length for datum in data)
