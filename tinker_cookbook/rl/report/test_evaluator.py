"""Plays a test set with one version of the weights, without training on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from tinker_cookbook.completers import TinkerTokenCompleter, TokenCompleter
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.exceptions import (
    AllTrajectoriesFailedError,
    ConfigurationError,
    DataValidationError,
)
from tinker_cookbook.rl.report.trajectory_metrics import (
    TrajectoryTotals,
    error_metrics,
    metrics_of_totals,
)
from tinker_cookbook.rl.rollouts.async_utils import gather_or_cancel
from tinker_cookbook.rl.rollouts.group import run_group
from tinker_cookbook.rl.rollouts.limits import RolloutConfig
from tinker_cookbook.rl.rollouts.strategy import RolloutStrategy
from tinker_cookbook.rl.types import (
    EnvGroupBuilder,
    RLDataset,
    RolloutError,
    TrajectoryGroup,
)

if TYPE_CHECKING:
    from tinker_cookbook.backends import SamplingClient

__all__ = ["RLTestSetEvaluator"]


class RLTestSetEvaluator(SamplingClientEvaluator):
    """Plays every group of ``dataset`` once; gives ``NAME/env/all/…`` and the like.

    The metrics are those of ``compute_trajectory_metrics`` and ``compute_rollout_error_metrics``
    with ``NAME/`` in front. ``NAME/env/all/reward/total`` is the one to watch: it starts at what
    the untrained model gets and should rise with ``env/all/reward/total`` of training; if it falls
    while that rises, the policy learns the training problems by heart.

    Only ``max_groups_in_flight`` groups are held at a time. With a ``seed`` the metrics depend on
    the weights alone, not on timing: group i is played with ``policy.derived(i)``, and sums are
    taken in the order of the dataset. Groups are played where ``set_rollout_executor`` says.

    Args:
        dataset: Its batches are asked for one after the other, in a thread.
        max_tokens: Most tokens of one answer.
        name: Prefix of the metrics.
        num_groups_to_log: How many groups, the first of the dataset, to keep for transcripts.
        strategy: What to do about rollouts that fail; ``None`` raises the first error. Under one
            that tolerates failures, groups that fail as a whole are counted in
            ``NAME/rollout_errors/groups_skipped``.
        temperature: 1 measures the policy as it is trained, 0 its most probable answers.
        top_p: As in ``TinkerTokenCompleter``.
        top_k: As in ``TinkerTokenCompleter``.
        seed: Makes evaluations repeatable.
        config: Limits and policies of the rollouts.
        context_window: As in ``TinkerTokenCompleter``.
        max_groups_in_flight: How many groups to play at a time.

    Attributes:
        last_groups: The groups kept of the latest evaluation, in the order of the dataset.
        last_tags: Their ``logging_tags``.
    """

    def __init__(
        self,
        dataset: RLDataset,
        max_tokens: int,
        name: str = "test",
        num_groups_to_log: int = 4,
        strategy: RolloutStrategy | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        seed: int | None = None,
        config: RolloutConfig | None = None,
        *,
        context_window: int | None = None,
        max_groups_in_flight: int = 256,
    ) -> None:
        for field_name, value, low in (
            ("max_tokens", max_tokens, 1),
            ("num_groups_to_log", num_groups_to_log, 0),
            ("max_groups_in_flight", max_groups_in_flight, 1),
        ):
            if value < low:
                raise ConfigurationError(f"{field_name}: got {value}, expected at least {low}")
        if not 0 <= temperature < float("inf"):
            raise ConfigurationError(
                f"temperature: got {temperature}, expected a finite number >= 0"
            )
        self.name = name
        self.last_groups: list[TrajectoryGroup] = []
        self.last_tags: list[list[str]] = []
        self._dataset, self._strategy, self._config = dataset, strategy, config
        self._num_groups_to_log = num_groups_to_log
        self._in_flight = max_groups_in_flight
        self._make_policy = partial(
            TinkerTokenCompleter,
            max_tokens=max_tokens,
            temperature=temperature,
            context_window=context_window,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
        )

    def policy(self, sampling_client: SamplingClient) -> TinkerTokenCompleter:
        """Returns the completer for evaluation on the test set."""
        return self._make_policy(sampling_client)

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        """Plays the test set.

        Raises:
            DataValidationError: The dataset has no group.
            AllTrajectoriesFailedError: No group could be played under a tolerant strategy.
        """
        played = _Played(self._num_groups_to_log)
        problems = _Problems(self._dataset)
        policy = self.policy(sampling_client)
        await gather_or_cancel(self._play(problems, policy, played) for _ in range(self._in_flight))
        if not played.totals:
            self._raise_for_nothing(played)
        self.last_groups = [played.groups[i] for i in sorted(played.groups)]
        self.last_tags = [played.tags[i] for i in sorted(played.groups)]
        return {f"{self.name}/{key}": value for key, value in played.metrics().items()}

    async def _play(self, problems: _Problems, policy: TokenCompleter, played: _Played) -> None:
        """Plays one group after the other until there is none left."""
        while (problem := await problems.next()) is not None:
            index, builder = problem
            try:
                group = await run_group(
                    builder, policy.derived(index), strategy=self._strategy, config=self._config
                )
            except AllTrajectoriesFailedError as error:
                played.skipped.append(error)
                continue
            played.add(index, group, builder.logging_tags())

    def _raise_for_nothing(self, played: _Played) -> None:
        if played.skipped:
            raise AllTrajectoriesFailedError(
                f"{self.name}: none of {len(played.skipped)} groups could be played; the first "
                f"failed with: {played.skipped[0]}"
            ) from played.skipped[0]
        raise DataValidationError(
            f"{self.name} dataset: got no group in {len(self._dataset)} batches, expected at least "
            "one; leave the test set out or check how it is built"
        )


class _Problems:
    """The dataset's groups one by one; a batch is built when the one before is used up."""

    def __init__(self, dataset: RLDataset) -> None:
        self._groups = self._numbered(dataset)
        self._lock = asyncio.Lock()

    async def next(self) -> tuple[int, EnvGroupBuilder] | None:
        """Returns the next group and its place in the dataset; ``None`` at the end."""
        async with self._lock:  # an asynchronous generator cannot be asked twice at a time
            return await anext(self._groups, None)

    @staticmethod
    async def _numbered(dataset: RLDataset) -> AsyncIterator[tuple[int, EnvGroupBuilder]]:
        index = 0
        for batch in range(len(dataset)):
            for builder in await asyncio.to_thread(dataset.get_batch, batch):
                yield index, builder
                index += 1


@dataclass
class _Played:
    """What is kept of the groups: their sums, and a few of them whole."""

    num_to_keep: int
    totals: dict[int, TrajectoryTotals] = field(default_factory=dict)
    tags: dict[int, list[str]] = field(default_factory=dict)
    errors: dict[int, list[RolloutError]] = field(default_factory=dict)
    groups: dict[int, TrajectoryGroup] = field(default_factory=dict)
    skipped: list[AllTrajectoriesFailedError] = field(default_factory=list)

    def add(self, index: int, group: TrajectoryGroup, tags: Sequence[str]) -> None:
        self.totals[index] = TrajectoryTotals.of(group)
        self.tags[index] = list(tags)
        self.errors[index] = list(group.rollout_errors)
        self.groups[index] = group
        if len(self.groups) > self.num_to_keep:
            del self.groups[max(self.groups)]

    def metrics(self) -> dict[str, float]:
        order = sorted(self.totals)
        errors = (error for i in order for error in self.errors[i])
        return {
            **metrics_of_totals([self.totals[i] for i in order], [self.tags[i] for i in order]),
            **error_metrics(errors, len(self.skipped)),
        }
