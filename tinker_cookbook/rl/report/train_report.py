"""Report of an iteration: its row of metrics, its transcripts, and its terminal output."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.exceptions import TrainingError
from tinker_cookbook.model_info import resolve_max_length
from tinker_cookbook.record.episodes import (
    RecordedGroup,
    TrainedDatum,
    group_rows,
    table_of,
    turn_table,
)
from tinker_cookbook.record.schema import turn_schema
from tinker_cookbook.record.write import RecordWriter
from tinker_cookbook.rl.config import Config
from tinker_cookbook.rl.loop.sources import Metrics, RolloutBatch, RolloutGroup, counted
from tinker_cookbook.rl.report.live_view import RLProgress
from tinker_cookbook.rl.report.transcripts import TranscriptFiles
from tinker_cookbook.rl.rollouts.place import RolloutPlace, at_place
from tinker_cookbook.rl.test_evaluator import RLTestSetEvaluator
from tinker_cookbook.rl.trajectory_metrics import (
    compute_sampling_client_metrics,
    compute_trajectory_metrics,
    error_metrics,
    reward_part_metrics,
)
from tinker_cookbook.rl.types import RLDataset, RolloutError, TrajectoryGroup
from tinker_cookbook.training.session import TrainingSession

logger = logging.getLogger(__name__)

_COUNTERS = {"trained": "cumulative_tokens", "sampled": "cumulative_sampled_tokens"}
"""Keys of the checkpoint for tokens counted since the start of the run."""


class Reporter:
    """Measures, shows and logs the iterations of a run inside a ``with`` block."""

    def __init__(
        self, config: Config, session: TrainingSession, progress: RLProgress, tokenizer: Any
    ) -> None:
        self._config, self._session, self._progress = config, session, progress
        self._tokenizer = tokenizer
        self._files = TranscriptFiles(
            config.log_path, config.num_groups_to_log, config.rollout_json_export, tokenizer
        )
        self._counters = {name: session.restored(name, 0) for name in _COUNTERS.values()}
        self._test_set: _RecordedTestSet | None = None

    def __enter__(self) -> Self:
        self._progress.__enter__()
        self._session.step_record.start(self._tokenizer)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._progress.__exit__(kind, error, trace)

    def add_evaluators(self, test_set: RLDataset | None) -> None:
        """Adds the evaluators of the config to the session, the test set first."""
        config, session = self._config, self._session
        session.shows = _worth_showing
        session.evaluators = [build() for build in config.evaluator_builders]
        session.infrequent_evaluators = [b() for b in config.infrequent_evaluator_builders]
        if test_set is None:
            return
        evaluator = _RecordedTestSet(
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
        evaluator.files, evaluator.record = self._files, session.step_record
        evaluator.step = session.start_step
        self._test_set = evaluator
        session.evaluators.insert(0, self._test_set)

    async def record_start(self) -> None:
        """Evaluates before training and logs the metrics as row 0."""
        metrics = await self._session.evaluate(0)
        if metrics:
            self._session.write_row({"progress/done_frac": 0.0, **metrics}, step=0)

    async def report(
        self,
        step: int,
        collected: RolloutBatch,
        trained: Metrics,
        times: Metrics,
        data: Sequence[TrainedDatum] = (),
    ) -> tuple[Metrics, dict[str, int]]:
        """Shows iteration ``step`` and queues its transcripts; returns its row and the counters.

        ``trained`` has the metrics of its ``Update``, ``times`` the result of :func:`time_metrics`,
        ``data`` its datums in the order of submission.
        """
        # In threads, since the event loop may be sampling the next groups.
        metrics = await asyncio.to_thread(self._measure, step, collected, trained, times)
        # The evaluation after this update writes its transcripts under the next step.
        if self._test_set is not None:
            self._test_set.step = step + 1
        groups = collected.groups
        await asyncio.to_thread(self._write_transcripts, step, groups, data)
        self._progress.update(step + 1, metrics)
        if errors := _errors(collected):
            # One line for all of them; logs.log has each.
            logger.warning(
                "step %d: %d failed rollouts%s; %d groups were skipped",
                step + 1,
                len(errors),
                counted(errors),
                collected.num_failed,
            )
        self._progress.show_transcript([one.group for one in groups], self._tokenizer)
        return metrics, dict(self._counters)

    def keep(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Writes the transcripts of an unfinished iteration, and waits for them."""
        if not groups:
            return
        try:
            self._write_transcripts(step, groups)
            self._session.step_record.flush()
        except TrainingError as error:  # the error that ended the iteration must be seen
            logger.warning("transcripts of step %d were not written: %s", step + 1, error)

    def _write_transcripts(
        self, step: int, groups: Sequence[RolloutGroup], data: Sequence[TrainedDatum] = ()
    ) -> None:
        entries = []
        for index, one in enumerate(groups):
            advantages = None if one.advantages is None else one.advantages.tolist()
            entries.append(
                RecordedGroup(index, one.group, one.tags, advantages, one.log, one.position)
            )
        record = self._session.step_record
        record.submit(partial(self._files.write, step, "train", entries))
        record.write(step + 1, "train", partial(turn_table, entries, data, record.images))

    def _measure(
        self, step: int, collected: RolloutBatch, trained: Metrics, times: Metrics
    ) -> Metrics:
        groups = [one.group for one in collected.groups]
        metrics: Metrics = {
            "progress/batch": step,
            "progress/done_frac": (step + 1) / self._session.total_steps,
            "epoch": collected.epoch,
            **compute_trajectory_metrics(groups, [one.tags for one in collected.groups]),
            **reward_part_metrics(groups),
            **error_metrics(_errors(collected), collected.num_failed),
            **trained,
            **collected.metrics,
        }
        # Synchronous runs always sample with the newest weights.
        synchronous = self._config.async_config is None
        if not synchronous:
            metrics.update(compute_sampling_client_metrics(groups, step))
        metrics["reward/total"] = metrics["env/all/reward/total"]
        # Tokens of this iteration, and of the run so far (resumed from the checkpoint).
        cached = int(metrics["env/all/total_cached_ob_tokens"])
        counts = {
            "sampled": int(metrics["env/all/total_ac_tokens"]),
            "prefill_cached": cached,
            "prefill_uncached": int(metrics["env/all/total_ob_tokens"]) - cached,
            "trained": int(metrics["tokens/trained"]),
        }
        metrics.update({f"tokens/{name}": count for name, count in counts.items()})
        for name, counter in sorted(_COUNTERS.items()):
            self._counters[counter] += counts[name]
            metrics[f"tokens/cumulative/{name}"] = self._counters[counter]
        metrics.update(times)
        # An asynchronous run samples all the time, so the rate is over the whole iteration.
        sampling = times["time/sampling" if synchronous else "time/total"]
        for name, seconds in (("sampled", sampling), ("trained", times["time/train"])):
            metrics[f"time/{name}_tokens_per_second"] = counts[name] / max(float(seconds), 1e-9)
        return metrics


class _RecordedTestSet(RLTestSetEvaluator):
    """Evaluates on the test set after ``step`` updates, and writes its episodes."""

    files: TranscriptFiles
    record: RecordWriter
    step: int

    def observe(self, index: int, group: TrajectoryGroup, tags: Sequence[str]) -> None:
        """Keeps the rows of a group, which take less memory than its episodes."""
        super().observe(index, group, tags)
        if self.record.level == "off":
            return
        group.sampling_client_step = self.step
        self._rows += group_rows(RecordedGroup(index, group, tags), self.record.images)

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        """Returns the metrics of the client's weights."""
        self._rows: list[dict[str, Any]] = []
        with at_place(RolloutPlace(str(self.files.log_path), (self.name, self.step))):
            metrics = await super().__call__(sampling_client)
        rows = sorted(self._rows, key=lambda row: row["group"])
        table = partial(table_of, rows, turn_schema())
        split = f"eval_{self.name}"
        # In a thread, because it may wait for earlier steps.
        await asyncio.to_thread(self.record.write, self.step, split, table)
        kept = zip(self.last_groups, self.last_tags, strict=True)
        entries = [RecordedGroup(index, *one) for index, one in enumerate(kept)]
        work = partial(self.files.write, self.step, split, entries)
        await asyncio.to_thread(self.record.submit, work)
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


def time_metrics(
    collected: RolloutBatch, training: float, scoring: float, seconds: float, blocked: float
) -> Metrics:
    """Returns the times of an iteration, which took ``seconds`` without evaluations.

    ``training`` is the time from the last finished group to the end of training, ``scoring`` the
    part of it for which an adjuster scored data, and ``blocked`` the time for which an environment
    blocked the event loop. ``time/total`` is the sum of the others.
    """
    # During sampling many episodes wait at once: for the sampler, the environment or the grader.
    # The time of sampling is divided in proportion to the sums of these waiting times.
    rollouts = collected.sampling_seconds
    waited: Counter[str] = Counter()
    for group in collected.groups:
        for trajectory in group.group.trajectories_G:
            waited.update(trajectory.seconds)
    whole = sum(waited.values())
    # Without waiting times all of the rollout time counts as sampling.
    times: Metrics = {"time/sampling": rollouts, "time/env": 0.0}
    if whole > 0:
        # While an environment blocks the event loop, all other episodes wait for it too.
        blocked = min(blocked, rollouts)
        times = {f"time/{name}": (rollouts - blocked) * s / whole for name, s in waited.items()}
        times["time/env"] = float(times.get("time/env", 0.0)) + blocked
    times["time/train"] = max(0.0, training - scoring)
    times["time/other"] = max(0.0, seconds - rollouts - training)
    times["time/total"] = seconds
    return times
