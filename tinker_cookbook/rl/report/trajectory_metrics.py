"""What a batch of trajectories tells, as metrics.

Groups are added up one by one (``TrajectoryTotals``), so that a whole test set can be measured
without being kept. For the metrics' names, signs, start values and bad values see
``compute_trajectory_metrics``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.rl.advantages import is_constant
from tinker_cookbook.rl.types import Metrics, RolloutError, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    import tinker

__all__ = [
    "GOOD_REWARD",
    "TrajectoryTotals",
    "compute_rollout_error_metrics",
    "compute_sampling_client_metrics",
    "compute_trajectory_metrics",
]

GOOD_REWARD = 0.5
"""A group of equal rewards is all good from here on, below it all bad."""

# An environment or the runner may note an event only where it happened. A mean over the turns that
# mention it would then always be 1, so these are taken over all turns and episodes instead.
_TURN_EVENTS = ("parse_error",)
_EPISODE_EVENTS = ("zero_reward_on_limit",)
_COUNTED_EVENTS = ("num_truncations_max_turn_tokens",)
_EVENTS = frozenset((*_TURN_EVENTS, *_EPISODE_EVENTS, *_COUNTED_EVENTS))


def compute_trajectory_metrics(
    trajectory_groups_P: Sequence[TrajectoryGroup], taglist_P: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Metrics of a batch; ``taglist_P`` holds the ``logging_tags`` of each group.

    Give all groups that were played, also those whose rewards are equal, and each with its own
    tags. Metrics ``env/all/…`` are of all groups; ``env/TAG/…`` of those with the tag, for each
    tag that some groups have and others lack.

    ``env/all/reward/total``
        Mean total reward of an episode (steps and group). Starts at what the untrained model gets
        and should rise; flat for some ten steps means that nothing is learned (see ``by_group``).
    ``env/all/by_group/frac_mixed``, ``…/frac_all_good``, ``…/frac_all_bad``
        Shares of groups whose rewards differ, are all equal and at least 0.5, are all equal and
        below 0.5; they add up to 1. Only mixed groups train anything. Near 0 mixed: the task is
        too hard (all bad) or too easy (all good) for the model, or samples hardly differ.
    ``env/all/ac_tokens_per_turn``, ``…/ob_tokens_per_turn``
        Mean length of an action and of an observation (the whole prompt). Actions close to
        ``max_tokens`` are cut off; a steady climb or fall of their length is the first sign that
        the reward is gamed.
    ``env/all/turns_per_episode``
        Mean number of actions in an episode; 0 only where the first prompt is already too long.
    ``env/all/total_episodes``, ``…/total_turns``, ``…/total_ac_tokens``, ``…/total_ob_tokens``
        What was played. Fewer episodes than asked for: rollouts failed (``rollout_errors/…``).
    ``env/all/total_cached_ob_tokens``
        Observation tokens that the sampler had computed before. 0 in a group's first turn unless
        its members share a request; in later turns a low share of ``total_ob_tokens`` means that
        observations do not extend each other.
    ``env/all/NAME``
        Each metric of the environment: its mean over the steps and episodes that report it.
    ``stop/REASON``
        Share of episodes that ended for this reason (``StopReason``), for reasons that occurred;
        they add up to 1. Good is mostly ``completed``; the rest are limits and failures.
    ``parse_error``
        Share of turns that did not parse, if any turn reports it. Should fall to near 0.
    ``zero_reward_on_limit``
        Share of episodes whose reward was taken away because a limit ended them.
    ``num_truncations_max_turn_tokens``
        How often a turn was cut off at ``max_turn_tokens``. Should be rare.

    Raises:
        DataValidationError: The lists differ in length, or a metric is not a number.
    """
    if len(taglist_P) != len(trajectory_groups_P):
        raise DataValidationError(
            f"taglist_P: got {len(taglist_P)} entries, expected {len(trajectory_groups_P)}, one "
            "for each group; filter groups and tags by the same places "
            "(indices_of_varying_groups), or take metrics before filtering"
        )
    totals_P = [TrajectoryTotals.of(group) for group in trajectory_groups_P]
    return metrics_of_totals(totals_P, taglist_P)


def metrics_of_totals(
    totals_P: Sequence[TrajectoryTotals], taglist_P: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Returns ``compute_trajectory_metrics`` of groups that were added up before, one total
    each."""
    together = TrajectoryTotals.sum(totals_P)
    metrics = {f"env/all/{name}": value for name, value in together.env_metrics().items()}
    metrics |= together.event_metrics()
    tags = {tag: None for taglist in taglist_P for tag in taglist if tag != "all"}
    for tag in tags:
        tagged = [totals for totals, own in zip(totals_P, taglist_P, strict=True) if tag in own]
        if len(tagged) < len(totals_P):
            of_tag = TrajectoryTotals.sum(tagged).env_metrics()
            metrics |= {f"env/{tag}/{name}": value for name, value in of_tag.items()}
    return metrics


def compute_sampling_client_metrics(
    groups: Sequence[TrajectoryGroup], now_step: int
) -> dict[str, float]:
    """Returns how old the weights are that sampled the groups; ``now_step`` counts the updates
    so far.

    ``sampling_client/step_max``, ``…_min``, ``…_mean``
        Updates in the weights that sampled: ``now_step`` in synchronous training.
    ``async/staleness_max``, ``…_min``, ``…_mean``
        ``now_step`` minus these: 0 on-policy, at most ``max_steps_off_policy`` in asynchronous
        training. A mean at that bound means that sampling is the bottleneck's other side: data
        wait for the trainer.
    ``training_client/step``
        ``now_step``.
    """
    if not groups:
        return {}
    steps = np.array([group.sampling_client_step for group in groups], dtype=np.float64)
    metrics = {"training_client/step": float(now_step)}
    for name, values in (("sampling_client/step", steps), ("async/staleness", now_step - steps)):
        metrics[f"{name}_max"] = float(values.max())
        metrics[f"{name}_min"] = float(values.min())
        metrics[f"{name}_mean"] = float(values.mean())
    return metrics


def compute_rollout_error_metrics(
    groups: Iterable[TrajectoryGroup], groups_skipped: int = 0
) -> dict[str, float]:
    """Returns how many rollouts failed, also where a retry mended it; nothing where none did.

    ``rollout_errors/TYPE``
        Failures by the name of their exception. ``rollout_errors/total``: all of them.
    ``rollout_errors/groups_skipped``
        Groups of which too few members could be played, so that the batch lacks them.

    0 is normal. A few timeouts are harmless; a steady share costs time and biases the data
    towards what does not fail.
    """
    return error_metrics(
        (error for group in groups for error in group.rollout_errors), groups_skipped
    )


def error_metrics(errors: Iterable[RolloutError], groups_skipped: int = 0) -> dict[str, float]:
    """Returns ``compute_rollout_error_metrics`` of the entries of ``rollout_errors``."""
    counts = Counter(error.error_type for error in errors)
    if not counts and not groups_skipped:
        return {}
    metrics = {f"rollout_errors/{kind}": float(count) for kind, count in sorted(counts.items())}
    metrics["rollout_errors/total"] = float(counts.total())
    metrics["rollout_errors/groups_skipped"] = float(groups_skipped)
    return metrics


@dataclass
class TrajectoryTotals:
    """Sums over trajectories: small, whatever the length of what they are sums of."""

    groups: Counter[str] = field(default_factory=Counter)
    episodes: int = 0
    turns: int = 0
    ac_tokens: int = 0
    ob_tokens: int = 0
    cached_ob_tokens: int = 0
    reward: float = 0.0
    env_sums: dict[str, float] = field(default_factory=dict)
    env_counts: Counter[str] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)
    events: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, group: TrajectoryGroup) -> TrajectoryTotals:
        """Of one group."""
        totals = cls()
        rewards_G = group.get_total_rewards()
        if rewards_G:
            totals.groups[_kind(rewards_G)] += 1
        totals.episodes = len(rewards_G)
        totals.reward = float(sum(rewards_G))
        for trajectory, metrics in zip(group.trajectories_G, group.metrics_G, strict=True):
            totals._add_trajectory(trajectory, metrics)
        return totals

    @classmethod
    def sum(cls, parts: Iterable[TrajectoryTotals]) -> TrajectoryTotals:
        """Of all together, added up in the order given."""
        total = cls()
        for part in parts:
            total._add(part)
        return total

    def env_metrics(self) -> dict[str, float]:
        """Returns the metrics below ``env/all/`` or ``env/TAG/``."""
        # Own names last: an environment must not overwrite them.
        metrics = {name: value / self.env_counts[name] for name, value in self.env_sums.items()}
        metrics["total_episodes"] = float(self.episodes)
        metrics["total_turns"] = float(self.turns)
        metrics["total_ac_tokens"] = float(self.ac_tokens)
        metrics["total_ob_tokens"] = float(self.ob_tokens)
        metrics["total_cached_ob_tokens"] = float(self.cached_ob_tokens)
        if self.turns:
            metrics["ac_tokens_per_turn"] = self.ac_tokens / self.turns
            metrics["ob_tokens_per_turn"] = self.ob_tokens / self.turns
        if self.episodes:
            metrics["turns_per_episode"] = self.turns / self.episodes
            metrics["reward/total"] = self.reward / self.episodes
            for kind in ("mixed", "all_good", "all_bad"):
                metrics[f"by_group/frac_{kind}"] = self.groups[kind] / self.groups.total()
        return metrics

    def event_metrics(self) -> dict[str, float]:
        """Returns ``stop/…`` and what else is counted over all turns and episodes."""
        metrics = {f"stop/{reason}": n / self.episodes for reason, n in sorted(self.stops.items())}
        for name, value in self.events.items():
            if name in _TURN_EVENTS:
                metrics[name] = value / max(self.turns, 1)
            elif name in _EPISODE_EVENTS:
                metrics[name] = value / self.episodes
            else:
                metrics[name] = value
        return metrics

    def _add_trajectory(self, trajectory: Trajectory, metrics: Metrics) -> None:
        if trajectory.stop_reason is not None:
            self.stops[str(trajectory.stop_reason)] += 1
        self.turns += len(trajectory.transitions)
        reports = [metrics]
        for transition in trajectory.transitions:
            self.ac_tokens += len(transition.ac.tokens)
            self.ob_tokens += _length(transition.ob)
            self.cached_ob_tokens += transition.ac.prompt_cache_hit_tokens
            reports.append(transition.metrics)
        for report in reports:
            for name, value in report.items():
                if name not in _EVENTS:
                    self.env_sums[name] = self.env_sums.get(name, 0.0) + _number(name, value)
                    self.env_counts[name] += 1
        for name in sorted(_EVENTS & {name for report in reports for name in report}):
            values = [_number(name, report.get(name, 0)) for report in reports]
            happened = float(max(values) > 0) if name in _EPISODE_EVENTS else sum(values)
            self.events[name] = self.events.get(name, 0.0) + happened

    def _add(self, other: TrajectoryTotals) -> None:
        self.groups += other.groups
        self.episodes += other.episodes
        self.turns += other.turns
        self.ac_tokens += other.ac_tokens
        self.ob_tokens += other.ob_tokens
        self.cached_ob_tokens += other.cached_ob_tokens
        self.reward += other.reward
        self.env_counts += other.env_counts
        self.stops += other.stops
        for sums, more in ((self.env_sums, other.env_sums), (self.events, other.events)):
            for name, value in more.items():
                sums[name] = sums.get(name, 0.0) + value


def _kind(rewards_G: Sequence[float]) -> str:
    if not is_constant(rewards_G):
        return "mixed"
    return "all_good" if rewards_G[0] >= GOOD_REWARD else "all_bad"


def _length(observation: tinker.ModelInput) -> int:
    return int(observation.length)


def _number(name: str, value: object) -> float:
    if not isinstance(value, (int, float, np.number)):
        raise DataValidationError(
            f"metrics[{name!r}]: got {value!r} of type {type(value).__name__}, expected a number; "
            "texts belong into the step's logs"
        )
    return float(value)
