"""Evaluation of a policy on a test set, without training on it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.completers import TinkerTokenCompleter, TokenCompleter
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.exceptions import AllTrajectoriesFailedError, DataValidationError
from tinker_cookbook.rl.rollouts.async_utils import gather_or_cancel
from tinker_cookbook.rl.rollouts.errors import add_group, error_record
from tinker_cookbook.rl.rollouts.group import run_group
from tinker_cookbook.rl.rollouts.limits import RolloutConfig
from tinker_cookbook.rl.rollouts.place import at_place, current_place
from tinker_cookbook.rl.rollouts.strategy import FailFast, RolloutStrategy, skips_group
from tinker_cookbook.rl.trajectory_metrics import (
    TrajectoryTotals,
    error_metrics,
    metrics_of_totals,
)
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RolloutError, TrajectoryGroup
from tinker_cookbook.utils.activity import activity


class RLTestSetEvaluator(SamplingClientEvaluator):
    """Runs rollouts for every group of ``dataset`` once and returns their metrics.

    The metrics are those of ``compute_trajectory_metrics`` and ``error_metrics`` with the prefix
    ``NAME/``. ``NAME/env/all/reward/total`` is the main one: it starts at the untrained model's
    value and should rise with ``env/all/reward/total`` of training; if it falls
    while that rises, the policy overfits the training problems.

    With a ``seed`` the metrics depend on the weights only, not on timing: group i is sampled with
    ``policy.derived(i)``, and sums are computed in the order of the dataset. Rollouts run in the
    executor of ``set_rollout_executor``.

    Args:
        dataset: Its batches are requested sequentially, in a thread.
        max_tokens: Maximum tokens of an answer.
        name: Prefix of the metrics.
        num_groups_to_log: Number of groups, from the start of the dataset, kept in ``last_groups``.
        strategy: How to handle rollouts that fail; ``None`` raises the first error. A strategy that
            tolerates failures counts groups that fail as a whole in
            ``NAME/rollout_errors/groups_skipped``.
        temperature: 1 measures the policy that is trained, 0 its most probable answers.
        top_p: As in ``TinkerTokenCompleter``, like ``top_k``, ``seed`` and ``context_window``.
        config: Limits and policies of the rollouts.
        max_groups_in_flight: Maximum number of concurrent groups.
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

    def observe(self, index: int, group: TrajectoryGroup, tags: Sequence[str]) -> None:
        """Called with each finished group, in any order, and its index in the dataset.

        A subclass stores data here for metrics that need all groups.
        """

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        """Evaluates the weights of ``sampling_client``; see ``eval_token_completer``."""
        return await self.eval_token_completer(self.policy(sampling_client))

    async def eval_token_completer(self, policy: TokenCompleter) -> dict[str, float]:
        """Evaluates any policy; the sampling settings of this evaluator do not apply to it.

        Raises:
            DataValidationError: The dataset has no group.
            AllTrajectoriesFailedError: Every group failed under a tolerant strategy.
        """
        place, now = current_place(), activity()
        now.details["evaluating"] = self.name
        strategy = self._strategy or FailFast()
        builders, lock = enumerate(self._builders()), asyncio.Lock()
        # By index, since groups finish in any order: sums and tags of all groups, and a few groups
        # as a whole.
        measured: dict[int, tuple[TrajectoryTotals, list[str]]] = {}
        errors: dict[int, list[RolloutError]] = {}
        kept: dict[int, TrajectoryGroup] = {}

        async def run_groups() -> None:
            """Runs one group after the other until none is left."""
            while True:
                async with lock:  # the next batch may be slow to build, so it is built in a thread
                    index, builder = await asyncio.to_thread(next, builders, (-1, None))
                if builder is None:
                    return
                try:
                    # A policy for each index: samples do not depend on the order of starts.
                    own = policy.derived(index)
                    with at_place(None if place is None else place.at_group(index)):
                        group = await run_group(
                            builder, own, strategy=strategy, config=self._config
                        )
                except Exception as error:
                    # The other groups still give a measurement.
                    if not skips_group(strategy, error):
                        where = f"{self.name} set, group {index}"
                        add_group(error, where, isinstance(strategy, FailFast))
                        raise
                    errors[index] = [error_record(error)]
                    continue
                tags = list(builder.logging_tags())
                self.observe(index, group, tags)
                # Sums instead of episodes, so that memory does not grow with the test set.
                measured[index] = TrajectoryTotals.of(group), tags
                errors[index], kept[index] = list(group.rollout_errors), group
                now.details["evaluating"] = f"{self.name}: {len(measured)} groups finished"
                # Groups finish in any order, so those with the smallest indices are kept.
                if len(kept) > self._num_groups_to_log:
                    del kept[max(kept)]

        # This many workers are the limit on concurrent groups.
        await gather_or_cancel(run_groups() for _ in range(self._in_flight))
        if not measured and errors:
            raise AllTrajectoriesFailedError(
                f"{self.name}: none of {len(errors)} groups succeeded; the first failed with: "
                f"{errors[min(errors)][0]}"
            )
        if not measured:
            raise DataValidationError(
                f"{self.name} dataset: got no group in {len(self._dataset)} batches, expected at "
                "least one; leave the test set out or check how it is built"
            )
        self.last_groups = [kept[i] for i in sorted(kept)]
        self.last_tags = [measured[i][1] for i in sorted(kept)]
        # In the order of the dataset, since rounding of a sum depends on the order.
        totals_P, tags_P = zip(*(measured[i] for i in sorted(measured)), strict=True)
        found = chain.from_iterable(errors.values())
        failed = error_metrics(found, len(errors) - len(measured))
        metrics = {**metrics_of_totals(totals_P, tags_P), **failed}
        return {f"{self.name}/{key}": value for key, value in metrics.items()}

    def _builders(self) -> Iterator[EnvGroupBuilder]:
        """Yields the builders; a batch is built when the one before is used up."""
        for batch in range(len(self._dataset)):
            yield from self._dataset.get_batch(batch)
