"""Training loop over batches of datums, for supervised training, preferences and distillation.

Each step gets the next batch (prefetched in the background), lets the objective prepare it (with
a reference model or a teacher), submits ``forward_backward`` and ``optim_step`` together, and keeps
``submit_ahead`` further steps in flight while it waits for results. Before an evaluation or a
checkpoint, nothing more is submitted, so both see exactly the updates up to their step.

Rows of ``metrics.jsonl``: ``step`` counts finished updates. Row 0 has the evaluations before
training; row k the metrics of the k-th batch, computed with the weights before its update, and the
evaluations after it. A batch without a trained token (if all examples are too long, for example)
counts as a step without an update: the batch of a step depends only on the step, also in a resumed
run.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import chz

from tinker_cookbook.backends import Future, TrainingClient
from tinker_cookbook.display import TrainingProgress, print_example
from tinker_cookbook.eval.evaluators import (
    Evaluator,
    EvaluatorBuilder,
    TrainingClientEvaluator,
)
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.leaves import find_leaf
from tinker_cookbook.record.examples import example_table
from tinker_cookbook.run.paths import local_path
from tinker_cookbook.supervised.held_out_answers import show_answers
from tinker_cookbook.supervised.prefetch import Prefetcher
from tinker_cookbook.supervised.row_datasets import trained_batch
from tinker_cookbook.supervised.types import (
    ChatDatasetBuilder,
    SupervisedDataset,
    SupervisedDatasetBuilder,
)
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.training.config import REQUIRED, TrainingConfig, number
from tinker_cookbook.training.estimate import checkpoint_space, duration, estimate_line
from tinker_cookbook.training.restarts import through_restarts
from tinker_cookbook.training.session import (
    Metrics,
    TrainingSession,
    is_complete,
    training_session,
)
from tinker_cookbook.utils.activity import activity
from tinker_cookbook.utils.cost_estimation import fetch_model_pricing
from tinker_cookbook.utils.heartbeat import reporting_activity
from tinker_cookbook.utils.imports import tinker
from tinker_cookbook.utils.trace import scope_span

if TYPE_CHECKING:
    import pyarrow as pa

_TIMED_STEPS = 2


@chz.chz
class BatchConfig(TrainingConfig):
    """Settings of all loops over batches of datums."""

    dataset_builder: SupervisedDatasetBuilder = chz.field(
        default=None, doc="Training and test data", metadata=REQUIRED
    )
    data_report: int = number(
        1000, "Number of rows for the report on chat data before training; 0: no report"
    )
    evaluator_builders: list[EvaluatorBuilder] = chz.field(
        default_factory=list, doc="Evaluations every eval_every steps"
    )
    infrequent_evaluator_builders: list[EvaluatorBuilder] = chz.field(
        default_factory=list, doc="Evaluations every infrequent_eval_every steps"
    )
    submit_ahead: int = number(1, "Number of steps submitted ahead of the awaited one")
    show_samples: int = number(
        1, "Held-out prompts that the model answers before and after training"
    )
    sample_max_tokens: int = number(96, "Maximum tokens of these answers", low=1)

    def check(self) -> None:
        """Raises ``ConfigurationError`` for the first invalid setting."""
        super().check()
        if isinstance(self.dataset_builder, ChatDatasetBuilder):
            self.dataset_builder.common_config.check()


Columns: TypeAlias = Mapping[str, Sequence[Any]]
"""Columns of the run's record (``record.schema.example_schema``): a value for each datum."""


@dataclass(frozen=True)
class Batch:
    """Training data of one step, with the results of ``Objective.prepare``."""

    data: list[tinker.Datum]
    prepared: Any = None
    columns: Columns = field(default_factory=dict)
    """Columns of the run's record, known before the pass."""

    @property
    def num_tokens(self) -> int:
        """Number of input tokens."""
        return sum(datum.model_input.length for datum in self.data)


class Objective(ABC):
    """Training objective: loss, preparation and metrics of a step."""

    shown: str = "loss"
    """Name of the metric in the progress bar."""

    async def prepare(self, step: int, data: list[tinker.Datum]) -> Batch:
        """Computes what the loss needs from a reference or a teacher, for the 0-based ``step``.

        Called in the order of steps, while earlier steps train. Any randomness must depend only on
        the seed and ``step``, because a resumed run calls it again.
        """
        return Batch(data)

    @abstractmethod
    def submit(self, client: TrainingClient, batch: Batch) -> Future[tinker.ForwardBackwardOutput]:
        """Submits the forward-backward pass of the batch."""

    @abstractmethod
    def metrics(self, batch: Batch, output: tinker.ForwardBackwardOutput) -> Metrics:
        """Returns the objective's metrics of the batch."""

    def columns(self, batch: Batch, output: tinker.ForwardBackwardOutput) -> Columns:
        """Returns columns of the run's record besides tokens, weights and log-probabilities."""
        return batch.columns

    def evaluators(self, test_set: SupervisedDataset) -> list[Evaluator]:
        """Returns the evaluations on held-out data."""
        return []


@dataclass(frozen=True)
class Schedule:
    """Batch of each step: epochs over ``num_batches`` batches, ``total_steps`` in all."""

    num_batches: int
    total_steps: int

    @classmethod
    def of(cls, dataset: SupervisedDataset, config: BatchConfig) -> Schedule:
        """Returns the schedule of ``max_steps``, which may repeat the data, or ``num_epochs``."""
        total = len(dataset) * config.num_epochs if config.max_steps is None else config.max_steps
        return cls(len(dataset), total)

    def position(self, step: int) -> tuple[int, int]:
        """Returns epoch and batch index of the 0-based ``step``."""
        return divmod(step, self.num_batches)


@through_restarts
async def train_batches(
    config: BatchConfig,
    make_objective: Callable[[TrainingSession], Awaitable[Objective]],
    data: tuple[SupervisedDataset, SupervisedDataset | None] | None = None,
) -> None:
    """Trains, or resumes the run in ``config.log_path``; ``data`` replaces the builder's datasets.

    ``make_objective`` is called once the backend is connected.
    """
    with reporting_activity() as now, now.phase("building the dataset"):
        train_set, test_set = config.dataset_builder() if data is None else data
        schedule = Schedule.of(train_set, config)
        # Fail before the backend is connected if nothing can be trained.
        first = await asyncio.to_thread(first_datum, train_set, config.seed)
    async with training_session(config, train_set, schedule.total_steps) as session:
        # A finished run prints its summary without connecting to the backend.
        if is_complete(session, schedule.total_steps):
            return
        # A resumed run already has its report. Find errors in the data before a model is loaded.
        report = None
        reporting = find_leaf("supervised.data_report")
        if config.data_report and session.start_step == 0 and reporting is not None:
            with activity().phase("checking the data"):
                report = await asyncio.to_thread(
                    reporting.make_report, train_set, test_set, config.data_report
                )
        client = await session.start(schedule.total_steps)
        if report is not None:
            report.write(local_path(config.log_path))
            session.print(*report.lines())
        objective = await make_objective(session)
        if (tokenizer := tokenizer_of(config.dataset_builder)) is not None:
            print_example(first, tokenizer)
        session.evaluators = [build() for build in config.evaluator_builders]
        session.evaluators += session.extra_evaluators
        session.infrequent_evaluators = [b() for b in config.infrequent_evaluator_builders]
        if test_set is not None:
            held_out = objective.evaluators(test_set)
            for one in held_out:
                if isinstance(one, TrainingClientEvaluator):
                    one.record = session.step_record
            # The held-out loss comes first in the logs.
            session.evaluators[:0] = held_out
        # Callers may pass the data to ``main`` instead of a builder.
        builder, count = config.dataset_builder, config.show_samples
        prompts = builder.held_out_prompts(count) if builder is not None and count else []
        answers = partial(show_answers, session, builder, config.sample_max_tokens, prompts)
        begun = time.monotonic()
        begins = f"after step {session.start_step}" if session.start_step else "before training"
        await answers(begins)
        if (tokenizer := tokenizer_of(config.dataset_builder)) is not None:
            session.step_record.start(tokenizer)
        loop = _Loop(config, session, schedule, objective)
        loop.sample_seconds = time.monotonic() - begun
        if report is not None:
            loop.tokens_an_epoch = report.train.input_tokens
            loop.facts["data/frac_duplicates"] = report.train.duplicates / report.train.rows_read
        await loop.run(client, train_set)
        # With max_steps=0 the weights are unchanged, and the answers would be the same.
        if schedule.total_steps:
            await answers("after training")
        session.print(*train_set.report(), *loop.report(), *session.summary())


def tokenizer_of(builder: SupervisedDatasetBuilder) -> Tokenizer | None:
    """Returns the tokenizer of a builder of chat data; None for other builders."""
    return builder.tokenizer if isinstance(builder, ChatDatasetBuilder) else None


def batches(
    dataset: SupervisedDataset, schedule: Schedule, seed: int, start: int
) -> Iterator[list[tinker.Datum]]:
    """Yields the batches from step ``start``; a batch without a trained token is empty."""
    current = None
    for step in range(start, schedule.total_steps):
        epoch, index = schedule.position(step)
        # The order of an epoch depends only on the seed and the epoch, also in a resumed run.
        if epoch != current:
            dataset.set_epoch(seed + epoch)
            current = epoch
        yield trained_batch(dataset, index)


def first_datum(dataset: SupervisedDataset, seed: int) -> tinker.Datum:
    """Returns the first trained example of the first epoch; raises DataValidationError if none."""
    dataset.set_epoch(seed)
    for index in range(len(dataset)):
        if data := trained_batch(dataset, index):
            return data[0]
    raise DataValidationError(
        f"dataset_builder: none of the examples in {len(dataset)} batches has a token to train on, "
        "expected at least one; raise max_length, or check train_on_what and the data"
    )


@dataclass(frozen=True)
class _InFlight:
    """Submitted step with the running counts of tokens and skipped steps."""

    step: int
    batch: Batch
    tokens: int
    skipped: int
    update: SubmittedBatch | None
    """None for a skipped step."""


@dataclass
class SubmittedBatch:
    """Batch whose update is submitted and not yet awaited.

    ``eval_metrics`` and ``infrequent_eval_metrics`` are for custom loops that evaluate before they
    submit; ``train_batches`` evaluates after the update.
    """

    fwd_bwd_future: Future[tinker.ForwardBackwardOutput]
    optim_step_future: Future[tinker.OptimStepResponse]
    metrics: Metrics
    """Metrics that are known before the results."""
    data: list[tinker.Datum]
    step: int
    """Counts from 0, over all epochs."""
    epoch_idx: int
    batch_idx: int
    eval_metrics: Metrics | None = None
    infrequent_eval_metrics: Metrics | None = None
    num_tokens: int = 0
    """Number of input tokens."""


class _Loop:
    """Loop over steps: the steps in flight, and running counts."""

    def __init__(
        self,
        config: BatchConfig,
        session: TrainingSession,
        schedule: Schedule,
        objective: Objective,
    ) -> None:
        self._config, self._session, self._schedule = config, session, schedule
        self._objective = objective
        self._in_flight: deque[_InFlight] = deque()
        self._progress = TrainingProgress(schedule.total_steps, session.start_step)
        # A resumed run continues with the counts of its checkpoint.
        self._tokens = session.restored("cumulative_tokens", 0)
        self._skipped = session.restored("skipped_batches", 0)
        self._finished_at = time.monotonic()
        self.sample_seconds = 0.0
        """Time of answers to held-out prompts."""
        self.tokens_an_epoch: float | None = None
        """Input tokens of an epoch, if a report has counted them."""
        self.facts: Metrics = {}
        """Facts about the data, for the first row."""
        self._estimate: float | None = None
        """Estimated seconds of the run."""
        self._timed: list[tuple[float, int]] = []  # seconds and tokens of the first steps
        self._begun = self._finished_at

    async def run(self, client: TrainingClient, dataset: SupervisedDataset) -> None:
        """Trains from the first step of the session."""
        config, schedule, session = self._config, self._schedule, self._session
        # A resumed run starts at its step; earlier batches are not rendered.
        rows = batches(dataset, schedule, config.seed, session.start_step)
        now = activity()
        with self._progress, Prefetcher(rows) as ahead:
            if session.start_step == 0:
                # Row 0 has the evaluations before training.
                if metrics := await session.evaluate(0):
                    row = {"progress": 0.0, "epoch": 0, **self._pop_facts(), **metrics}
                    session.write_row(row, step=0)
                # The evaluation must not count in the time of the first step.
                self._finished_at = time.monotonic()
                self._progress.restart()
            for step in range(session.start_step, schedule.total_steps):
                now.step = f"step {step + 1}/{schedule.total_steps}"
                with now.phase("waiting for the data"):
                    data = await ahead.next()
                if data:
                    async with scope_span("prepare_batch"):
                        with now.phase("preparing the batch"):
                            batch = await self._objective.prepare(step, data)
                    self._submit(client, step, batch)
                else:
                    self._skip(step)
                # Before an evaluation or a checkpoint, wait for all submitted steps. If a
                # checkpoint contained later steps, a resumed run would train on their batches
                # twice.
                at_boundary = session.boundary(step + 1, self._tokens)
                while len(self._in_flight) > (0 if at_boundary else config.submit_ahead):
                    await self._finish_oldest()
                if session.stopped:
                    break
            while self._in_flight:
                await self._finish_oldest()

    def report(self) -> list[str]:
        """Returns lines about the time and about skipped batches, if any."""
        lines: list[str] = []
        if self._estimate is not None:
            took = time.monotonic() - self._begun + self.sample_seconds
            lines.append(f"took {duration(took)}; the estimate was {duration(self._estimate)}")
        if not self._skipped:
            return lines
        return [
            *lines,
            f"{self._skipped} of {self._schedule.total_steps} batches were skipped: none of their "
            "examples had a token to train on (max_length truncates before the answer)",
        ]

    def _record(self, done: _InFlight, output: tinker.ForwardBackwardOutput) -> None:
        record, batch, objective = self._session.step_record, done.batch, self._objective

        def make_table() -> pa.Table:
            columns = objective.columns(batch, output)
            logprobs = [one.get("logprobs") for one in output.loss_fn_outputs]
            return example_table(batch.data, logprobs, columns, record.images)

        record.write(done.step + 1, "train", make_table)

    def _submit(self, client: TrainingClient, step: int, batch: Batch) -> None:
        """Queues one update."""
        params = self._config.adam_params(step, self._schedule.total_steps)
        # Count at submission, because boundary() needs it for save_every_tokens.
        self._tokens += batch.num_tokens
        # Both requests are queued before either is awaited, so the backend is never idle.
        forward_backward = self._objective.submit(client, batch)
        epoch, index = self._schedule.position(step)
        update = SubmittedBatch(
            forward_backward,
            client.optim_step(params),
            {"learning_rate": params.learning_rate},
            batch.data,
            step,
            epoch,
            index,
            num_tokens=batch.num_tokens,
        )
        # Store the counts now: later steps raise the totals before this row is written.
        self._in_flight.append(_InFlight(step, batch, self._tokens, self._skipped, update))

    def _skip(self, step: int) -> None:
        """Records a step without an update."""
        self._skipped += 1
        if self._skipped == 1:
            epoch, index = self._schedule.position(step)
            self._session.print(
                f"step {step + 1}: batch {index} of epoch {epoch} is skipped, since none of its "
                "examples has a token to train on; further ones are only counted"
            )
        # Queue it like an update, so that rows are written in the order of steps.
        self._in_flight.append(_InFlight(step, Batch([]), self._tokens, self._skipped, None))

    async def _print_estimate(self, step: int, seconds: float, tokens: int) -> None:
        """Prints the estimate for the run after its second step; the first step is a warm-up."""
        steps = self._schedule.total_steps - self._session.start_step
        if self._estimate is not None or steps <= _TIMED_STEPS:
            return
        self._timed.append((seconds, tokens))
        if len(self._timed) < _TIMED_STEPS:
            return
        session, done = self._session, sum(tokens for _, tokens in self._timed)
        a_step = done / _TIMED_STEPS
        if self.tokens_an_epoch is not None:
            a_step = self.tokens_an_epoch / self._schedule.num_batches
        rates = None
        # Prices apply only to the hosted service.
        if session.connection.is_hosted_service:
            rates = await asyncio.to_thread(fetch_model_pricing, self._config.model_name)
        # The remaining tokens take as long as those of this step.
        left = max(a_step * steps - done, 0) * seconds / max(tokens, 1)
        others = session.eval_seconds_after(step) + 2 * self.sample_seconds
        self._estimate = time.monotonic() - self._begun + left + others
        local = session.connection.kind == "local"
        line = estimate_line(
            steps,
            round(a_step * steps),
            self._estimate,
            local=local,
            rates=rates,
            checkpoints=checkpoint_space(self._config, self._schedule.total_steps),
        )
        session.print(line)

    def _pop_facts(self) -> Metrics:
        facts, self.facts = self.facts, {}
        return facts

    async def _finish_oldest(self) -> None:
        """Waits for the oldest update and writes its row."""
        done, now = self._in_flight.popleft(), activity()
        epoch, _ = self._schedule.position(done.step)
        metrics: Metrics = {
            "epoch": epoch,
            "progress": (done.step + 1) / self._schedule.total_steps,
            "num_sequences": len(done.batch.data),
            "num_tokens": done.batch.num_tokens,
            "tokens/cumulative/trained": done.tokens,
            **self._pop_facts(),
        }
        shown = None
        if done.update is None:
            metrics["num_skipped_batches"] = 1
        else:
            now.step = f"step {done.step + 1}/{self._schedule.total_steps}"
            async with scope_span("train_step"):
                with now.phase("training"):
                    output = await done.update.fwd_bwd_future
                    optim = await done.update.optim_step_future
            # Measure between the ends of two steps, because steps in flight overlap.
            seconds = time.monotonic() - self._finished_at
            metrics |= {
                **done.update.metrics,
                **self._objective.metrics(done.batch, output),
                "time/step": seconds,
                "time/tokens_per_second": done.batch.num_tokens / max(seconds, 1e-9),
                **{f"optim/{name}": value for name, value in (optim.metrics or {}).items()},
            }
            self._record(done, output)
            shown = float(metrics[self._objective.shown])
            await self._print_estimate(done.step + 1, seconds, done.batch.num_tokens)
        self._progress.show(done.step + 1, shown, done.batch.num_tokens)
        # Counters are saved with the checkpoint and restored by a resumed run.
        counters = {"cumulative_tokens": done.tokens}
        if done.skipped:
            counters["skipped_batches"] = done.skipped
        await self._session.finish_step(done.step + 1, metrics, epoch=epoch, counters=counters)
        # Evaluations and checkpoints must not count in the time of the next step.
        self._finished_at = time.monotonic()
