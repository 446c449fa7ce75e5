"""Iterations of an RL run in every mode: sample groups, train on them, take the new weights.

Groups come all at once or in parts. The ``forward_backward`` of a part is submitted as soon as the
part is complete, and gradients accumulate until the ``optim_step`` of the substep. Nothing is
awaited before the last operation is in the backend's queue.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from tinker_cookbook.backends import Future, TrainingClient
from tinker_cookbook.record.episodes import TrainedDatum
from tinker_cookbook.rl.advantages import indices_of_varying_groups, normalized_advantages
from tinker_cookbook.rl.config import Config
from tinker_cookbook.rl.data_processing import (
    REFERENCE_LOGPROBS,
    DatumOrigin,
    assemble_training_data,
    divide_by_action_tokens,
)
from tinker_cookbook.rl.loop.adjuster import (
    AdvantageAdjuster,
    Mean,
    RolloutData,
    advantages_of,
    logprobs_of,
    submit_loss,
)
from tinker_cookbook.rl.loop.importance import RatioStatistics, truncate_importance
from tinker_cookbook.rl.loop.sources import (
    GroupSource,
    Metrics,
    PolicySnapshot,
    RolloutBatch,
    RolloutGroup,
)
from tinker_cookbook.rl.metrics import (
    compute_kl_sample_train,
    kl_sample_train_by_depth,
    post_kl_metrics,
)
from tinker_cookbook.rl.report.train_report import Reporter, time_metrics
from tinker_cookbook.run.paths import local_path
from tinker_cookbook.training.session import TrainingSession
from tinker_cookbook.utils.activity import activity
from tinker_cookbook.utils.imports import tinker
from tinker_cookbook.utils.model_inputs import score_datums
from tinker_cookbook.utils.trace import scope_span


class Loop:
    """Iterations of a run.

    ``on_trained`` is called with the groups and the update of an iteration before its new weights
    are sampled from or saved.
    """

    def __init__(
        self,
        config: Config,
        session: TrainingSession,
        source: GroupSource,
        reporter: Reporter,
        adjuster: AdvantageAdjuster | None,
        on_trained: Callable[[RolloutBatch, Update], None] | None = None,
    ) -> None:
        self._config, self._session = config, session
        self._source, self._reporter = source, reporter
        self._adjuster, self._on_trained = adjuster, on_trained

    async def run(self, total_steps: int) -> None:
        """Runs from the session's first iteration to the last, or until no groups are left."""
        start = self._session.start_step
        # A resumed run already has row 0, the evaluation before training.
        if start == 0:
            await self._reporter.record_start()
        snapshot: PolicySnapshot | None = await self._snapshot(start)
        for step in range(start, total_steps):
            snapshot = await self._iteration(step, total_steps, snapshot)
            if snapshot is None or self._session.stopped:
                return

    async def _iteration(
        self, step: int, total_steps: int, snapshot: PolicySnapshot
    ) -> PolicySnapshot | None:
        """Runs one update, writes its row and returns the new weights."""
        config, source = self._config, self._source
        began = time.monotonic()
        now = activity()
        now.step, blocked = f"step {step + 1}/{total_steps}", now.blocked_seconds
        # 1. Sample; the source passes groups to the update as they finish.
        update = Update(
            config, self._session.client, config.adam_params(step, total_steps), self._adjuster
        )
        try:
            async with scope_span("sample"):
                with now.phase("sampling"):
                    collected = await source.collect(step, snapshot, update.add)
            if collected is None:
                return None
            blocked = now.blocked_seconds - blocked
            # 2. Wait for the training that is still in the queue.
            async with scope_span("train_step"):
                with now.phase("training"):
                    trained = await update.finish()
            # Only the wait after the last group: earlier training overlapped with sampling.
            training = time.monotonic() - began - collected.sampling_seconds
            # Before the snapshot: a checkpoint that is saved with it includes the caller's counts.
            if self._on_trained is not None:
                self._on_trained(collected, update)
            # 3. Take the new weights, with which an asynchronous source continues at once.
            snapshot = await self._snapshot(step + 1)
            source.update_weights(snapshot)
            if config.compute_post_kl and update.data:
                # The same tokens with the new weights show how far the update moved the policy.
                with now.phase("scoring"):
                    after_D = await score_datums(snapshot.client, update.data)
                trained.update(post_kl_metrics(update.data, after_D))
        except BaseException:  # Ctrl-C too: save the transcripts of what was sampled
            self._reporter.keep(step, source.finished())
            raise
        # 4. Write transcripts, evaluate, write the row, and save what is due.
        scoring = float(trained.get("time/scoring", 0.0))
        times = time_metrics(collected, training, scoring, time.monotonic() - began, blocked)
        with now.phase("writing transcripts"):
            metrics, counters = await self._reporter.report(
                step, collected, trained, times, update.trained_data(collected.groups)
            )
        await self._session.finish_step(
            step + 1,
            metrics,
            epoch=collected.epoch,
            counters=counters,
            # The line of a checkpoint is written last, so the source's state must exist before it.
            before_save=lambda: source.save(local_path(config.log_path), step + 1),
        )
        return snapshot

    async def _snapshot(self, step: int) -> PolicySnapshot:
        client = await self._session.sampling_client(
            record_stability_info=self._config.records_stability_info()
        )
        # Rollouts may still run while later updates train, so they sample from fixed weights.
        return PolicySnapshot(client, step)


class Update:
    """Training of one iteration.

    Data with only zero advantages wait in a substep until there are data with a training signal,
    because their log-probabilities count in the metrics. Alone they make no optimizer step: their
    gradient is 0 or rounding, which Adam would scale up to a full step, and its momentum would move
    the weights.
    """

    def __init__(
        self,
        config: Config,
        client: TrainingClient,
        adam: tinker.AdamParams,
        adjuster: AdvantageAdjuster | None = None,
    ) -> None:
        self._config, self._client, self._adam = config, client, adam
        self._adjuster = adjuster
        self.data: list[tinker.Datum] = []
        """Data trained on so far, with their masks."""
        self.sources: list[tuple[RolloutGroup, DatumOrigin, int, int]] = []
        """Group, origin, number of the pass and of the optimizer step of each of ``data``."""
        self.logprobs: list[Any] = []
        """Log-probabilities [T] of each of ``data``, once the update is finished."""
        self._passes: list[Future[tinker.ForwardBackwardOutput]] = []
        self._optim_steps: list[Future[tinker.OptimStepResponse]] = []
        self._adjusted: dict[str, Mean] = {}
        self._ratios = RatioStatistics()
        self._scoring_seconds = 0.0
        self._episodes = self._whole_episodes = 0
        # The current substep: its number, whether it has a pass, and its data without a signal.
        self._substep: int | None = None
        self._has_pass = False
        self._waiting: list[tuple[tinker.Datum, tuple[RolloutGroup, DatumOrigin]]] = []
        self._untrained: list[tinker.Datum] = []

    async def add(self, groups: Sequence[RolloutGroup]) -> None:
        """Submits the training on groups; their substeps must be in order."""
        # 1. Make training data; advantages come from the rewards.
        rollouts, has_signal = await asyncio.to_thread(self._prepare, groups)
        # Turns are one datum as long as each prompt begins with all tokens of the turn before.
        per_episode = Counter(rollouts.origins_D)
        self._episodes += len(per_episode)
        self._whole_episodes += sum(count == 1 for count in per_episode.values())
        # 2. Adjust the advantages by a reference policy or a teacher.
        if self._adjuster is not None and rollouts.data_D:
            began = time.monotonic()
            with activity().phase("scoring"):
                adjustment = await self._adjuster.adjust(rollouts)
            self._scoring_seconds += time.monotonic() - began
            # A reference or a teacher also gives a signal where the rewards of a group are equal.
            has_signal = adjustment.has_signal
            for name, mean in adjustment.means.items():
                self._adjusted[name] = self._adjusted.get(name, Mean()) + mean
        # 3. Weight the tokens by how the trainer's policy differs from the sampler's.
        data_D = rollouts.data_D
        if cap := self._config.importance_ratio_cap:
            data_D = await truncate_importance(self._client, data_D, cap, self._ratios)
        # 4. Submit one pass for each substep; groups of different substeps never share a pass.
        sources_D = [(rollouts.groups[origin.group], origin) for origin in rollouts.origins_D]
        pairs_D = zip(data_D, sources_D, strict=True)
        for number, pairs in groupby(pairs_D, lambda pair: pair[1][0].substep):
            part, sources = map(list, zip(*pairs, strict=True))
            # ``has_signal`` ignores rounding but covers all groups; this covers the substep.
            rewarded = any(values.any() for values in advantages_of(part))
            if self._config.loss_normalization == "tokens":
                # The part is a whole substep: the config refuses ``tokens`` with streaming.
                part = divide_by_action_tokens(part)
            if self._substep != number:
                self._close_substep()
                self._substep = number
            self._waiting += zip(part, sources, strict=True)
            if not (self._has_pass or (has_signal and rewarded)):
                continue
            ready = [datum for datum, _ in self._waiting]
            # In the order of the passes, because ``finish`` pairs their outputs with the data.
            self.data += ready
            numbers = len(self._passes), len(self._optim_steps)
            self.sources += [(*source, *numbers) for _, source in self._waiting]
            self._waiting, self._has_pass = [], True
            if self._adjuster is None:
                loss_fn = self._config.training_loss_fn()
                output = submit_loss(self._client, ready, loss_fn, self._config.loss_fn_config)
            else:
                output = self._adjuster.submit(self._client, ready, self._config)
            self._passes.append(output)

    def trained_data(self, groups: Sequence[RolloutGroup]) -> list[TrainedDatum]:
        """Returns the data of the finished update with what training computed for them."""
        reference_D = [datum.loss_fn_inputs.get(REFERENCE_LOGPROBS) for datum in self.data]
        # An asynchronous update may have groups of the same index from two batches.
        places = {id(group): place for place, group in enumerate(groups)}
        return [
            TrainedDatum(
                places[id(group)],
                origin.member,
                origin.turns,
                advantages,
                # A teacher's loss has them as an array.
                logprobs if isinstance(logprobs, np.ndarray) else logprobs.to_numpy(),
                *numbers,
                reference_logprobs=None if reference is None else reference.to_numpy(),
            )
            for (group, origin, *numbers), advantages, logprobs, reference in zip(
                self.sources, advantages_of(self.data), self.logprobs, reference_D, strict=True
            )
        ]

    def _prepare(self, groups: Sequence[RolloutGroup]) -> tuple[RolloutData, bool]:
        """Returns the training data, and whether the rewards of any group differ."""
        config = self._config
        results = [group.group for group in groups]
        advantages_P = normalized_advantages(results, config.advantage_normalization)
        for group, advantages in zip(groups, advantages_P, strict=True):
            # Transcripts show the advantages, also those of groups that are dropped below.
            group.advantages = advantages
        # Groups with a constant reward have advantages of 0; the config may drop them.
        varying = indices_of_varying_groups(results)
        kept = varying if config.remove_constant_reward_groups else range(len(groups))
        data_D, origins_D = assemble_training_data(
            [results[i] for i in kept], [advantages_P[i] for i in kept]
        )
        return RolloutData([groups[i] for i in kept], data_D, origins_D), bool(varying)

    def _close_substep(self) -> None:
        # Data that got no signal until the end of the substep are not trained.
        self._untrained += [datum for datum, _ in self._waiting]
        if self._has_pass:
            # Not awaited: the backend runs the operations of a client in order, so the passes of
            # the next substep already use the updated weights.
            self._optim_steps.append(self._client.optim_step(self._adam))
        self._waiting, self._has_pass = [], False

    async def finish(self) -> Metrics:
        """Closes the last substep, waits for all operations and returns the metrics."""
        self._close_substep()
        # Everything is in the queue now, so waiting no longer leaves the backend idle.
        outputs = [await output for output in self._passes]
        optim_steps = [await step for step in self._optim_steps]
        metrics: Metrics = {
            "optim/lr": self._adam.learning_rate,
            "optim/num_steps": len(optim_steps),
            "tokens/trained": sum(datum.model_input.length for datum in self.data),
        }
        if self._episodes:
            metrics["optim/frac_one_datum"] = self._whole_episodes / self._episodes
        if self._adjuster is not None:
            # A streaming run scores one part while others are sampled: that is time of sampling.
            streaming = self._config.stream_minibatch_config is not None
            metrics["time/scoring"] = 0.0 if streaming else self._scoring_seconds
        metrics.update({name: mean.mean for name, mean in self._adjusted.items()})
        metrics.update(self._ratios.metrics())
        # KL and entropy; only the sampler's entropy if nothing was trained.
        read = logprobs_of if self._adjuster is None else self._adjuster.trained_logprobs
        logprobs_D = [logprobs for output in outputs for logprobs in read(output)]
        self.logprobs = logprobs_D
        if logprobs_D:
            metrics.update(compute_kl_sample_train(self.data, logprobs_D))
            if edges := self._config.kl_depth_edges:
                metrics.update(kl_sample_train_by_depth(self.data, logprobs_D, edges))
        else:
            # Compared with themselves their KL is always 0, so only the entropy is kept.
            sampled_D = [datum.loss_fn_inputs["logprobs"] for datum in self._untrained]
            found = compute_kl_sample_train(self._untrained, sampled_D)
            metrics.update({key: v for key, v in found.items() if key == "optim/entropy"})
        # The suffix of a backend's metric (``loss:sum``) is its reduction over the operations; a
        # metric without one is averaged.
        reductions = {"sum": sum, "max": max, "min": min}
        for reports in (outputs, optim_steps):
            joined: dict[str, list[float]] = {}
            for report in reports:
                # Clients of user code may report no metrics.
                for name, value in (getattr(report, "metrics", None) or {}).items():
                    joined.setdefault(name, []).append(float(value))
            for name, values in joined.items():
                reduce = reductions.get(
                    name.rpartition(":")[2], lambda values: sum(values) / len(values)
                )
                metrics[f"optim/{name}"] = reduce(values)
        return metrics
