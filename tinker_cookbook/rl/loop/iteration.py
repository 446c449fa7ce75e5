"""The iterations of an RL run, in every mode, and also over a client and log of the caller."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from tinker_cookbook.rl.kl import compute_post_kl
from tinker_cookbook.rl.loop.rollout_worker import PolicySnapshot
from tinker_cookbook.rl.loop.sources import Collected, GroupSource
from tinker_cookbook.rl.loop.update import Metrics, Update
from tinker_cookbook.rl.report.train_report import IterationReport, ReportedSession, Reporter
from tinker_cookbook.utils.paths import local_path
from tinker_cookbook.utils.trace import scope_span

if TYPE_CHECKING:
    from tinker_cookbook.backends import SamplingClient, TrainingClient
    from tinker_cookbook.rl.config import PolicyTrainingConfig
    from tinker_cookbook.rl.loop.adjuster import AdvantageAdjuster


class LoopSession(ReportedSession, Protocol):
    """What the loop needs of a run's session (``training.session.TrainingSession``)."""

    client: TrainingClient

    async def sampling_client(self, *, record_stability_info: bool = False) -> SamplingClient:
        """Returns a client for the present weights."""
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
        """Evaluates, writes the row and saves what is due after update ``step``."""
        ...


class Loop:
    """The iterations of a run.

    Args:
        config: The run's.
        session: Its client, log and checkpoints.
        source: Where the groups come from.
        reporter: Measures and shows the iterations.
        adjuster: Changes the advantages; ``None`` leaves them.
        on_trained: Called with the groups and the update of an iteration before its new weights are
            taken, and so before a checkpoint of them.
    """

    def __init__(
        self,
        config: PolicyTrainingConfig,
        session: LoopSession,
        source: GroupSource,
        reporter: Reporter,
        adjuster: AdvantageAdjuster | None,
        on_trained: Callable[[Collected, Update], None] | None = None,
    ) -> None:
        self._config, self._session = config, session
        self._source, self._reporter = source, reporter
        self._adjuster, self._on_trained = adjuster, on_trained

    async def run(self, total_steps: int) -> None:
        """Runs from the session's first iteration to the last, or until no groups are left."""
        start = self._session.start_step
        if start == 0:
            await self._reporter.record_start()
        snapshot: PolicySnapshot | None = await self._snapshot(start)
        for step in range(start, total_steps):
            snapshot = await self._iteration(step, total_steps, snapshot)
            if snapshot is None:
                return

    async def _iteration(
        self, step: int, total_steps: int, snapshot: PolicySnapshot
    ) -> PolicySnapshot | None:
        """One update, its row, and what is due after it; gives the new weights."""
        config, source = self._config, self._source
        began = time.monotonic()
        update = Update(
            config, self._session.client, config.adam_params(step, total_steps), self._adjuster
        )
        try:
            async with scope_span("sample"):
                collected = await source.collect(step, snapshot, update.add)
            if collected is None:
                return None
            self._reporter.training()
            async with scope_span("train_step"):
                trained = await update.finish()
            training = time.monotonic() - began - collected.sampling_seconds
            if self._on_trained is not None:
                self._on_trained(collected, update)
            snapshot = await self._snapshot(step + 1)
            source.renew(snapshot)
            if config.compute_post_kl and update.data:
                trained.update(await compute_post_kl(update.data, snapshot.client))
        except BaseException:  # Ctrl-C too: what was sampled is worth reading
            self._reporter.keep(step, source.finished())
            raise
        report = IterationReport(step, collected, trained, training, time.monotonic() - began)
        metrics, counters = await self._reporter.report(report)
        await self._session.finish_step(
            step + 1,
            metrics,
            epoch=collected.epoch,
            counters=counters,
            before_save=lambda: source.save(local_path(config.log_path), step + 1),
        )
        return snapshot

    async def _snapshot(self, step: int) -> PolicySnapshot:
        client = await self._session.sampling_client(
            record_stability_info=self._config.records_stability_info()
        )
        return PolicySnapshot(client, step)
