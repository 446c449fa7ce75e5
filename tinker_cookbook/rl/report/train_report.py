"""What an iteration leaves behind: its row of metrics, transcripts, and lines for the person."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.exceptions import TrainingError
from tinker_cookbook.rl.config import PolicyTrainingConfig
from tinker_cookbook.rl.loop.sources import Metrics, RolloutBatch, RolloutGroup
from tinker_cookbook.rl.metric_util import (
    RLTestSetEvaluator,
    compute_rollout_error_metrics,
    compute_sampling_client_metrics,
    compute_trajectory_metrics,
)
from tinker_cookbook.rl.report.diagnosis import diagnose, diagnose_kl
from tinker_cookbook.rl.report.live_view import RLProgress
from tinker_cookbook.rl.report.transcripts import TranscriptWriter
from tinker_cookbook.rl.types import RLDataset
from tinker_cookbook.training.session import TrainingSession

if TYPE_CHECKING:
    from tinker_cookbook.backends import SamplingClient

logger = logging.getLogger(__name__)

_TELL_EVERY = 10
"""Iterations between two diagnoses of the same cause."""


@dataclass(frozen=True)
class IterationReport:
    """What happened in the iteration that began after ``step`` updates.

    ``trained`` holds the metrics of its ``Update``. Training took ``training_seconds`` after the
    last group was there, and the iteration ``seconds`` in all.
    """

    step: int
    collected: RolloutBatch
    trained: Metrics
    training_seconds: float
    seconds: float


class ReportedSession(Protocol):
    """What the reporter needs of a run's session."""

    start_step: int
    total_steps: int

    def restored(self, key: str, default: int) -> int:
        """Returns a counter as the run's checkpoint has it."""
        ...

    async def evaluate(self, step: int) -> Metrics:
        """Returns the metrics of the evaluations that are due after update ``step``."""
        ...

    def write_row(self, row: Metrics, step: int) -> None:
        """Appends a row to the log."""
        ...


class Reporter:
    """Measures, shows and writes down the iterations of a run. Use it in ``with``.

    Args:
        config: The run's.
        session: Holds the counters of a run that is continued.
        progress: The live view.
        tokenizer: Of the policy.
    """

    def __init__(
        self,
        config: PolicyTrainingConfig,
        session: ReportedSession,
        progress: RLProgress,
        tokenizer: Any,
    ) -> None:
        self._config, self._session, self._progress = config, session, progress
        self._tokenizer = tokenizer
        self._writer = TranscriptWriter(
            config.log_path, config.num_groups_to_log, config.rollout_json_export, tokenizer
        )
        self._counters = {name: session.restored(name, 0) for name in _COUNTERS}
        self._told: dict[str, int] = {}
        self._test_sets: list[_RecordedTestSet] = []

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.__exit__(kind, error, trace)
        self._writer.__exit__(kind, error, trace)

    def add_evaluators(self, session: TrainingSession, test_set: RLDataset | None) -> None:
        """Gives the session the evaluations of the config, the test set first."""
        config = self._config
        session.shows = _worth_showing
        session.evaluators = [build() for build in config.evaluator_builders]
        session.infrequent_evaluators = [b() for b in config.infrequent_evaluator_builders]
        if test_set is None:
            return
        evaluator = RLTestSetEvaluator(
            test_set,
            config.max_tokens,
            num_groups_to_log=config.num_groups_to_log,
            strategy=config.effective_rollout_strategy(),
            temperature=config.eval_temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            seed=config.seed,
            config=config.rollouts(),
        )
        self._test_sets = [_RecordedTestSet(evaluator, self._writer, session.start_step)]
        session.evaluators.insert(0, self._test_sets[0])

    async def record_start(self) -> None:
        """Row 0: the evaluations before training."""
        metrics = await self._session.evaluate(0)
        if metrics:
            self._session.write_row({"progress/done_frac": 0.0, **metrics}, step=0)

    def training(self) -> None:
        """All groups of the iteration are there."""
        self._progress.training()

    async def report(self, done: IterationReport) -> tuple[Metrics, dict[str, int]]:
        """Shows the iteration and queues its transcripts; gives its row and the counters."""
        metrics = await asyncio.to_thread(self._measure, done)
        groups = done.collected.groups
        for group_set in self._test_sets:
            group_set.step = done.step + 1
        await asyncio.to_thread(self._write_transcripts, done.step, groups)
        self._progress.update(done.step + 1, metrics)
        self._tell(done.step, groups, metrics)
        self._progress.show_transcript([one.group for one in groups], self._tokenizer)
        self._progress.evaluating()
        return metrics, dict(self._counters)

    def keep(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Writes the transcripts of an iteration that did not come to its end, and waits."""
        if not groups:
            return
        try:
            self._write_transcripts(step, groups)
            self._writer.flush()
        except TrainingError as error:  # another error is on its way, which must be seen
            logger.warning("transcripts of step %d were not written: %s", step + 1, error)

    def _write_transcripts(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        self._writer.write(
            step,
            "train",
            [played.group for played in groups],
            [played.tags for played in groups],
            [_floats(played.advantages) for played in groups],
            [played.log for played in groups],
        )

    def _measure(self, done: IterationReport) -> Metrics:
        groups = [played.group for played in done.collected.groups]
        tags = [played.tags for played in done.collected.groups]
        total = self._session.total_steps
        metrics: Metrics = {
            "progress/batch": done.step,
            "progress/done_frac": (done.step + 1) / total,
            "epoch": done.collected.epoch,
            **compute_trajectory_metrics(groups, tags),
            **compute_rollout_error_metrics(groups, done.collected.num_failed),
            **done.trained,
            **done.collected.metrics,
        }
        if self._config.async_config is not None:
            metrics.update(compute_sampling_client_metrics(groups, done.step))
        metrics["reward/total"] = metrics["env/all/reward/total"]
        metrics.update(self._count_tokens(metrics))
        metrics.update(_times(done, metrics, self._config))
        return metrics

    def _count_tokens(self, metrics: Metrics) -> Metrics:
        seen = int(metrics["env/all/total_ob_tokens"])
        cached = int(metrics["env/all/total_cached_ob_tokens"])
        counts = {
            "sampled": int(metrics["env/all/total_ac_tokens"]),
            "prefill_cached": cached,
            "prefill_uncached": seen - cached,
            "trained": int(metrics["tokens/trained"]),
        }
        out: Metrics = {f"tokens/{name}": count for name, count in counts.items()}
        for name in ("sampled", "trained"):
            counter = _COUNTER_OF[name]
            self._counters[counter] += counts[name]
            out[f"tokens/cumulative/{name}"] = self._counters[counter]
        return out

    def _tell(self, step: int, groups: Sequence[RolloutGroup], metrics: Metrics) -> None:
        """Says what keeps the reward from moving or makes it unstable: once, and again after a
        while."""
        config, played = self._config, [one.group for one in groups]
        off_policy = config.async_config and config.async_config.max_steps_off_policy
        found = [diagnose(played, metrics, config.max_tokens), diagnose_kl(metrics, off_policy)]
        due = [one for one in found if one is not None]
        for one in due:
            since = self._told.get(one.cause)
            if since is None or step - since >= _TELL_EVERY:
                self._told[one.cause] = step
                logger.warning("step %d: %s", step + 1, one)
        # What was overcome is told at once when it comes back.
        causes = {one.cause for one in due}
        self._told = {cause: told for cause, told in self._told.items() if cause in causes}


_COUNTER_OF = {"trained": "cumulative_tokens", "sampled": "cumulative_sampled_tokens"}
_COUNTERS = tuple(_COUNTER_OF.values())


class _RecordedTestSet(SamplingClientEvaluator):
    """Plays the test set and keeps transcripts of it; ``step`` is the number of updates."""

    def __init__(self, evaluator: RLTestSetEvaluator, writer: TranscriptWriter, step: int) -> None:
        self._evaluator, self._writer, self.step = evaluator, writer, step

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        """Metrics of the weights that the client holds."""
        evaluator = self._evaluator
        metrics = await evaluator(sampling_client)
        await asyncio.to_thread(
            self._writer.write,
            self.step,
            f"eval_{evaluator.name}",
            evaluator.last_groups,
            evaluator.last_tags,
        )
        return metrics


def _worth_showing(name: str) -> bool:
    """Of the many metrics of a test set, the reward and what makes it up."""
    if not name.startswith("test/"):
        return not name.rpartition("/")[2].startswith("num_")
    return name.endswith("env/all/reward/total")


def _times(done: IterationReport, metrics: Metrics, config: PolicyTrainingConfig) -> Metrics:
    """Returns where the time went.

    ``time/total`` is that of the iteration without evaluations and checkpoints; the others add up
    to it. While groups were played, many episodes waited at once, for the sampler, the environment
    or the grader: that time is divided as their waiting was.
    """
    played = done.collected.sampling_seconds
    waited: dict[str, float] = {}
    for group in done.collected.groups:
        for trajectory in group.group.trajectories_G:
            for name, seconds in trajectory.seconds.items():
                waited[name] = waited.get(name, 0.0) + seconds
    whole = sum(waited.values())
    shares = {name: seconds / whole for name, seconds in waited.items()} if whole > 0 else {}
    scoring = done.trained.get("time/scoring")
    training = done.training_seconds
    if scoring is not None:
        # Parts that a streaming run scores while others are played are in the time of those.
        scoring = 0.0 if config.stream_minibatch_config is not None else float(scoring)
        training = max(0.0, training - scoring)
    times = {f"time/{name}": played * share for name, share in shares.items()}
    times.setdefault("time/sampling", played if not shares else 0.0)
    times["time/train"] = training
    if scoring is not None:
        times["time/scoring"] = scoring
    other = done.seconds - played - done.training_seconds
    out: Metrics = {**times, "time/other": max(0.0, other), "time/total": done.seconds}
    sampled = int(metrics["tokens/sampled"])
    trained = int(metrics["tokens/trained"])
    # In an asynchronous run sampling never stops, so its rate is over the whole iteration.
    in_turn = config.async_config is None
    sampling = float(times["time/sampling"]) if in_turn else done.seconds
    out["time/sampled_tokens_per_second"] = sampled / max(sampling, 1e-9)
    out["time/trained_tokens_per_second"] = trained / max(training, 1e-9)
    return out


def _floats(advantages: Any) -> list[float] | None:
    return None if advantages is None else [float(value) for value in advantages]
