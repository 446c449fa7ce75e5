"""Report of an iteration: its row of metrics, its transcripts, and its terminal output."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from tinker_cookbook.backends import SamplingClient, TrainingClient
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.exceptions import TrainingError
from tinker_cookbook.model_info import resolve_max_length
from tinker_cookbook.rl.config import Config
from tinker_cookbook.rl.loop.sources import Metrics, RolloutBatch, RolloutGroup, counted
from tinker_cookbook.rl.report.diagnosis import diagnose, diagnose_kl
from tinker_cookbook.rl.report.live_view import RLProgress
from tinker_cookbook.rl.report.test_evaluator import RLTestSetEvaluator
from tinker_cookbook.rl.report.trajectory_metrics import (
    compute_sampling_client_metrics,
    compute_trajectory_metrics,
    error_metrics,
)
from tinker_cookbook.rl.report.transcript_text import LoggedGroup
from tinker_cookbook.rl.report.transcripts import TranscriptWriter
from tinker_cookbook.rl.rollouts.place import RolloutPlace, at_place
from tinker_cookbook.rl.types import RLDataset, RolloutError
from tinker_cookbook.training.session import TrainingSession

logger = logging.getLogger(__name__)

_REPEAT_AFTER = 10
"""Iterations between two diagnoses of the same cause."""
_MIN_GROUPS = 8
"""Groups in a row with good or equal rewards after which this is reported."""

_COUNTERS = {"trained": "cumulative_tokens", "sampled": "cumulative_sampled_tokens"}
"""Keys of the checkpoint for tokens counted since the start of the run."""


@dataclass(frozen=True)
class IterationReport:
    """Results of the iteration that began after ``step`` updates.

    ``trained`` has the metrics of its ``Update``; ``training_seconds`` is the time from the last
    finished group to the end of training.
    """

    step: int
    collected: RolloutBatch
    trained: Metrics
    training_seconds: float
    seconds: float
    blocked_seconds: float = 0.0
    """Time for which an environment blocked the event loop."""


class LoopSession(Protocol):
    """The part of a run's session that the loop and its reporter use."""

    client: TrainingClient
    stopped: bool
    start_step: int
    total_steps: int

    def restored(self, key: str, default: int) -> int:
        """Returns a counter from the run's checkpoint."""
        ...

    async def sampling_client(self, *, record_stability_info: bool = False) -> SamplingClient:
        """Returns a client of the current weights."""
        ...

    async def evaluate(self, step: int) -> Metrics:
        """Returns the metrics of the evaluations that are due after update ``step``."""
        ...

    def write_row(self, row: Metrics, step: int) -> None:
        """Appends a row to the log."""
        ...

    async def finish_step(
        self,
        step: int,
        metrics: Metrics,
        *,
        epoch: int,
        counters: dict[str, int],
        before_save: Callable[[], None] | None = None,
    ) -> None:
        """Writes the row of an update, and saves and evaluates what is due after it."""
        ...


class Reporter:
    """Measures, shows and logs the iterations of a run inside a ``with`` block."""

    def __init__(
        self,
        config: Config,
        session: LoopSession,
        progress: RLProgress,
        tokenizer: Any,
    ) -> None:
        self._config, self._session, self._progress = config, session, progress
        self._tokenizer = tokenizer
        self._writer = TranscriptWriter(
            config.log_path, config.num_groups_to_log, config.rollout_json_export, tokenizer
        )
        self._counters = {name: session.restored(name, 0) for name in _COUNTERS.values()}
        # Cause to its groups in a row and the step of its last message.
        self._diagnosed: dict[str, tuple[int, int | None]] = {}
        self._test_sets: list[_RecordedTestSet] = []

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._progress.__exit__(kind, error, trace)
        self._writer.__exit__(kind, error, trace)

    def add_evaluators(self, session: TrainingSession, test_set: RLDataset | None) -> None:
        """Adds the evaluators of the config to the session, the test set first."""
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
            context_window=resolve_max_length(config.model_name, None),
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
        """Evaluates before training and logs the metrics as row 0."""
        metrics = await self._session.evaluate(0)
        if metrics:
            self._session.write_row({"progress/done_frac": 0.0, **metrics}, step=0)

    async def report(self, done: IterationReport) -> tuple[Metrics, dict[str, int]]:
        """Shows the iteration and queues its transcripts; returns its row and the counters."""
        # In threads, since the event loop may be sampling the next groups.
        metrics = await asyncio.to_thread(self._measure, done)
        groups = done.collected.groups
        # The evaluation after this update writes its transcripts under the next step.
        for test_set in self._test_sets:
            test_set.step = done.step + 1
        await asyncio.to_thread(self._write_transcripts, done.step, groups)
        self._progress.update(done.step + 1, metrics)
        if errors := _errors(done.collected):
            # One line for all of them; logs.log has each.
            logger.warning(
                "step %d: %d failed rollouts%s; %d groups were skipped",
                done.step + 1,
                len(errors),
                counted(errors),
                done.collected.num_failed,
            )
        self._warn(done.step, groups, metrics)
        self._progress.show_transcript([one.group for one in groups], self._tokenizer)
        return metrics, dict(self._counters)

    def keep(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Writes the transcripts of an unfinished iteration, and waits for them."""
        if not groups:
            return
        try:
            self._write_transcripts(step, groups)
            self._writer.flush()
        except TrainingError as error:  # the error that ended the iteration must be seen
            logger.warning("transcripts of step %d were not written: %s", step + 1, error)

    def _write_transcripts(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        entries = [
            LoggedGroup(
                index,
                one.group,
                one.tags,
                None if one.advantages is None else one.advantages.tolist(),
                one.log,
            )
            for index, one in enumerate(groups)
        ]
        self._writer.write(step, "train", entries)

    def _measure(self, done: IterationReport) -> Metrics:
        groups = [one.group for one in done.collected.groups]
        tags = [one.tags for one in done.collected.groups]
        metrics: Metrics = {
            "progress/batch": done.step,
            "progress/done_frac": (done.step + 1) / self._session.total_steps,
            "epoch": done.collected.epoch,
            **compute_trajectory_metrics(groups, tags),
            **error_metrics(_errors(done.collected), done.collected.num_failed),
            **done.trained,
            **done.collected.metrics,
        }
        # Synchronous runs always sample with the newest weights.
        if self._config.async_config is not None:
            metrics.update(compute_sampling_client_metrics(groups, done.step))
        metrics["reward/total"] = metrics["env/all/reward/total"]
        # Tokens of this iteration, and of the run so far (resumed from the checkpoint).
        prompt_tokens = int(metrics["env/all/total_ob_tokens"])
        cached = int(metrics["env/all/total_cached_ob_tokens"])
        counts = {
            "sampled": int(metrics["env/all/total_ac_tokens"]),
            "prefill_cached": cached,
            "prefill_uncached": prompt_tokens - cached,
            "trained": int(metrics["tokens/trained"]),
        }
        metrics.update({f"tokens/{name}": count for name, count in counts.items()})
        for name, counter in sorted(_COUNTERS.items()):
            self._counters[counter] += counts[name]
            metrics[f"tokens/cumulative/{name}"] = self._counters[counter]
        metrics.update(_times(done, counts, self._config))
        return metrics

    def _warn(self, step: int, groups: Sequence[RolloutGroup], metrics: Metrics) -> None:
        """Logs why the reward does not rise or training may become unstable, at intervals."""
        config = self._config
        off_policy = config.async_config and config.async_config.max_steps_off_policy
        found = [
            diagnose([one.group for one in groups], metrics, config.max_tokens),
            diagnose_kl(metrics, off_policy),
        ]
        # A cause that disappeared is forgotten, so it is logged at once when it comes back.
        before, self._diagnosed = self._diagnosed, {}
        for one in found:
            if one is None:
                continue
            seen, last = before.get(one.cause, (0, None))
            seen += len(groups)
            # A few groups may be solved by chance.
            enough = seen >= _MIN_GROUPS or one.cause not in ("all_good", "one_reward")
            if enough and (last is None or step - last >= _REPEAT_AFTER):
                logger.warning("step %d: %s", step + 1, one.text)
                last = step
            self._diagnosed[one.cause] = seen, last


class _RecordedTestSet(SamplingClientEvaluator):
    """Evaluates on the test set after ``step`` updates and writes its transcripts."""

    def __init__(self, evaluator: RLTestSetEvaluator, writer: TranscriptWriter, step: int) -> None:
        self._evaluator, self._writer, self.step = evaluator, writer, step

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        """Returns the metrics of the client's weights."""
        evaluator = self._evaluator
        with at_place(RolloutPlace(str(self._writer.log_path), (evaluator.name, self.step))):
            metrics = await evaluator(sampling_client)
        kept = zip(evaluator.last_groups, evaluator.last_tags, strict=True)
        entries = [LoggedGroup(index, *one) for index, one in enumerate(kept)]
        await asyncio.to_thread(self._writer.write, self.step, f"eval_{evaluator.name}", entries)
        return metrics


def _errors(collected: RolloutBatch) -> list[RolloutError]:
    """Returns the errors of all failed rollouts, those of retried ones and skipped groups too."""
    return [e for one in collected.groups for e in one.group.rollout_errors] + collected.errors


def _worth_showing(name: str) -> bool:
    """Returns whether the terminal shows a metric of an evaluation; a test set has many."""
    # Counts (num_…) are not results.
    if not name.startswith("test/"):
        return not name.rpartition("/")[2].startswith("num_")
    return name.endswith("env/all/reward/total")


def _times(done: IterationReport, counts: Mapping[str, int], config: Config) -> Metrics:
    """Returns the times of an iteration and its token rates.

    ``time/total`` excludes evaluations and checkpoints; the other times add up to it.
    """
    # During sampling many episodes wait at once: for the sampler, the environment or the grader.
    # The time of sampling is divided in proportion to the sums of these waiting times.
    rollouts = done.collected.sampling_seconds
    waited: dict[str, float] = {}
    for group in done.collected.groups:
        for trajectory in group.group.trajectories_G:
            for name, seconds in trajectory.seconds.items():
                waited[name] = waited.get(name, 0.0) + seconds
    whole = sum(waited.values())
    blocked = min(done.blocked_seconds, rollouts) if whole > 0 else 0.0
    shares = {name: seconds / whole for name, seconds in waited.items()} if whole > 0 else {}
    times: Metrics = {
        f"time/{name}": (rollouts - blocked) * share for name, share in shares.items()
    }
    # While an environment blocks the event loop, all other episodes wait for it too.
    times["time/env"] = float(times.get("time/env", 0.0)) + blocked
    # Without waiting times all of the rollout time counts as sampling.
    times.setdefault("time/sampling", rollouts if not shares else 0.0)
    times["time/train"] = training = done.training_seconds
    if "time/scoring" in done.trained:
        # A streaming run scores one part while others are sampled, within the time of sampling.
        streaming = config.stream_minibatch_config is not None
        times["time/scoring"] = scoring = 0.0 if streaming else float(done.trained["time/scoring"])
        # The update waits for the scores, so their time is part of training_seconds.
        times["time/train"] = training = max(0.0, training - scoring)
    times["time/other"] = max(0.0, done.seconds - rollouts - done.training_seconds)
    times["time/total"] = done.seconds
    # An asynchronous run samples all the time, so the rate is over the whole iteration.
    synchronous = config.async_config is None
    sampling = float(times["time/sampling"]) if synchronous else done.seconds
    times["time/sampled_tokens_per_second"] = counts["sampled"] / max(sampling, 1e-9)
    times["time/trained_tokens_per_second"] = counts["trained"] / max(training, 1e-9)
    return times
