"""The training half of an iteration: finished groups in, updated weights and metrics out.

Groups may come all at once or in parts, as they are finished; each part's ``forward_backward`` is
submitted when it comes, and gradients add up until the substep ends with its ``optim_step``.
Nothing is awaited before the last of them is in the queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from tinker_cookbook.rl.advantages import compute_advantages, indices_of_varying_groups
from tinker_cookbook.rl.config import PolicyTrainingConfig
from tinker_cookbook.rl.data_processing import assemble_training_data, divide_by_action_tokens
from tinker_cookbook.rl.kl import compute_kl_sample_train
from tinker_cookbook.rl.loop.adjuster import (
    AdvantageAdjuster,
    Mean,
    RolloutData,
    advantages_of,
    logprobs_of,
    submit_policy_loss,
)
from tinker_cookbook.rl.loop.sources import RolloutGroup

if TYPE_CHECKING:
    import tinker
    from tinker import types

    from tinker_cookbook.backends import Future, TrainingClient

Metrics = dict[str, float | int | str]


@dataclass
class _Pass:
    """A submitted ``forward_backward``."""

    data: list[tinker.Datum]
    output: Future[types.ForwardBackwardOutput]


@dataclass
class _Substep:
    """The data of one optimizer step, and what of it has been submitted.

    Data without any signal wait: they are trained along with data that have some, since their
    log-probabilities count in the metrics, but alone they make no step. On them a gradient is 0 or
    rounding, which Adam would scale up to a full step, and its momentum would move on by itself.
    """

    number: int
    waiting: list[tinker.Datum] = field(default_factory=list)
    passes: list[_Pass] = field(default_factory=list)


class Update:
    """One iteration's training."""

    def __init__(
        self,
        config: PolicyTrainingConfig,
        client: TrainingClient,
        adam: types.AdamParams,
        adjuster: AdvantageAdjuster | None = None,
    ) -> None:
        self._config, self._client, self._adam = config, client, adam
        self._adjuster = adjuster
        self._substep: _Substep | None = None
        self._passes: list[_Pass] = []
        self._optim_steps: list[Future[types.OptimStepResponse]] = []
        self._untrained: list[tinker.Datum] = []
        self._adjusted: dict[str, Mean] = {}
        self._scoring_seconds = 0.0

    @property
    def data(self) -> list[tinker.Datum]:
        """The data trained on so far, with their masks."""
        return [datum for done in self._passes for datum in done.data]

    @property
    def num_tokens(self) -> int:
        """Tokens of these data."""
        return sum(datum.model_input.length for datum in self.data)

    async def add(self, groups: Sequence[RolloutGroup]) -> None:
        """Submits the training on these groups, whose substeps must not go backwards."""
        played, has_signal = await asyncio.to_thread(self._prepare, groups)
        if self._adjuster is not None and played.data_D:
            began = time.monotonic()
            adjustment = await self._adjuster.adjust(played)
            self._scoring_seconds += time.monotonic() - began
            has_signal = adjustment.has_signal
            for name, mean in adjustment.means.items():
                self._adjusted[name] = self._adjusted.get(name, Mean()) + mean
        substeps_D = [played.groups[place.group].substep for place in played.places_D]
        pairs_D = zip(substeps_D, played.data_D, strict=True)
        for number, pairs in groupby(pairs_D, lambda pair: pair[0]):
            part = [datum for _, datum in pairs]
            rewarded = any(values.any() for values in advantages_of(part))
            if self._config.loss_normalization == "tokens":
                part = divide_by_action_tokens(part)
            self._submit(number, part, has_signal and rewarded)

    async def finish(self) -> Metrics:
        """Closes the last substep, waits for all of them, and gives the metrics."""
        self._close_substep()
        outputs = [await done.output for done in self._passes]
        optim_steps = [await done for done in self._optim_steps]
        metrics: Metrics = {
            "optim/lr": self._adam.learning_rate,
            "optim/num_steps": len(optim_steps),
            "tokens/trained": self.num_tokens,
        }
        if self._adjuster is not None:
            metrics["time/scoring"] = self._scoring_seconds
        metrics.update({name: mean.mean for name, mean in self._adjusted.items()})
        metrics.update(self._policy_metrics(outputs))
        for reports in (outputs, optim_steps):
            # Clients of user code may report no metrics.
            metrics.update(_combined([getattr(one, "metrics", None) or {} for one in reports]))
        return metrics

    def _prepare(self, groups: Sequence[RolloutGroup]) -> tuple[RolloutData, bool]:
        """The data, and whether any group's rewards differ."""
        config = self._config
        played = [group.group for group in groups]
        for member, advantages in zip(
            groups, compute_advantages(played, config.advantage_normalization), strict=True
        ):
            member.advantages = advantages
        varying = indices_of_varying_groups(played)
        kept = varying if config.remove_constant_reward_groups else range(len(groups))
        chosen = [groups[i] for i in kept]
        data_D, places_D = assemble_training_data(
            [group.group for group in chosen],
            [group.advantages for group in chosen],  # type: ignore[misc]
        )
        return RolloutData(chosen, data_D, places_D), bool(varying)

    def _submit(self, substep: int, data: list[tinker.Datum], has_signal: bool) -> None:
        if self._substep is None or self._substep.number != substep:
            self._close_substep()
            self._substep = _Substep(substep)
        current = self._substep
        current.waiting += data
        if not (has_signal or current.passes):
            return
        submit = submit_policy_loss if self._adjuster is None else self._adjuster.submit
        output = submit(self._client, current.waiting, self._config)
        current.passes.append(_Pass(current.waiting, output))
        self._passes.append(current.passes[-1])
        current.waiting = []

    def _close_substep(self) -> None:
        current, self._substep = self._substep, None
        if current is None:
            return
        self._untrained += current.waiting
        if current.passes:
            self._optim_steps.append(self._client.optim_step(self._adam))

    def _policy_metrics(self, outputs: Sequence[types.ForwardBackwardOutput]) -> Metrics:
        """KL and entropy; where nothing was trained, the sampler's entropy alone."""
        read = logprobs_of if self._adjuster is None else self._adjuster.trained_logprobs
        logprobs_D = [logprobs for output in outputs for logprobs in read(output)]
        if logprobs_D:
            return dict(compute_kl_sample_train(self.data, logprobs_D))
        sampled_D = [datum.loss_fn_inputs["logprobs"] for datum in self._untrained]
        metrics = compute_kl_sample_train(self._untrained, sampled_D)
        return {key: value for key, value in metrics.items() if key == "optim/entropy"}


def _combined(reports: Sequence[dict[str, float]]) -> Metrics:
    """The backend's metrics as ``optim/NAME``; the end of a name (``loss:sum``) says how to join
    those of several operations, and without one they are averaged."""
    joined: dict[str, list[float]] = {}
    for report in reports:
        for name, value in report.items():
            joined.setdefault(name, []).append(float(value))
    ways = {"sum": sum, "max": max, "min": min}
    return {
        f"optim/{name}": ways.get(name.rpartition(":")[2], _mean)(values)
        for name, values in joined.items()
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
