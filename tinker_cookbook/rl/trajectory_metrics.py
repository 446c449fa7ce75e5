"""Metrics of a batch of trajectories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.rl.advantages import is_constant
from tinker_cookbook.rl.types import STOP_METRIC_PREFIX, RolloutError, TrajectoryGroup

GOOD_REWARD = 0.5
"""A group of equal rewards counts as all good from this reward on, otherwise as all bad."""

_MOST_METRICS = 16
"""Metrics of an environment up to which the parts of its reward are looked for (10 ms)."""

# An environment or the runner may report an event only if it happened. A mean over the reports
# would always be 1, so these are divided by all turns or episodes, or only counted.
_TURN_EVENTS, _EPISODE_EVENT = ("parse_error", "empty_answer"), "zero_reward_on_limit"
_EVENTS = frozenset((*_TURN_EVENTS, _EPISODE_EVENT, "num_truncations_max_turn_tokens"))


def compute_trajectory_metrics(
    trajectory_groups_P: Sequence[TrajectoryGroup], taglist_P: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Returns the metrics of a batch; ``docs/rl-metrics.md`` explains them.

    Pass all groups of the batch, including those with constant rewards, and for each the
    ``logging_tags`` of its builder. ``env/all/…`` covers all groups; ``env/TAG/…`` those with the
    tag, for each tag that some groups have and others lack. ``env/all/NAME`` is the mean of a
    metric of the environment over the steps and episodes that report it.

    Raises:
        DataValidationError: A metric is not a number.
    """
    totals_P = [TrajectoryTotals.of(group) for group in trajectory_groups_P]
    return metrics_of_totals(totals_P, taglist_P)


def metrics_of_totals(
    totals_P: Sequence[TrajectoryTotals], taglist_P: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Returns ``compute_trajectory_metrics`` from the totals of each group."""
    total = TrajectoryTotals.sum(totals_P)
    metrics = {f"env/all/{name}": value for name, value in total.env_metrics().items()}
    metrics |= total.event_metrics()
    # A dict, for the order of first occurrence; "all" would collide with the name for all groups.
    tags = {tag: None for taglist in taglist_P for tag in taglist if tag != "all"}
    for tag in tags:
        tagged = [one for one, own in zip(totals_P, taglist_P, strict=True) if tag in own]
        # A tag that all groups have would repeat env/all.
        if len(tagged) < len(totals_P):
            of_tag = TrajectoryTotals.sum(tagged).env_metrics()
            metrics |= {f"env/{tag}/{name}": value for name, value in of_tag.items()}
    return metrics


def reward_part_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Returns how large the parts of the rewards are, as far as the environment's metrics show it.

    If the reward is a weighted sum of two or three metrics, ``reward/range/NAME`` is the largest
    difference that a metric makes between the rewards of a group. Otherwise the result is empty.
    """
    groups = [group for group in groups if group.trajectories_G]
    reports_E: list[Counter[str]] = []
    for group in groups:
        for trajectory, metrics in zip(group.trajectories_G, group.metrics_G, strict=True):
            total: Counter[str] = Counter()
            for report in (metrics, *(turn.metrics for turn in trajectory.transitions)):
                total.update({name: float(value) for name, value in report.items()})
            reports_E.append(total)
    # No part of a reward that someone wrote.
    names = sorted(set().union(*reports_E) - {"empty_answer"})
    if len(names) < 2 or len(reports_E) < 4 * len(groups):
        return {}
    values = np.array([[report[name] for name in names] for report in reports_E])
    rewards = np.array([reward for group in groups for reward in group.get_total_rewards()])
    both = np.column_stack([rewards, values])
    # Less the mean of the group, as in advantages.
    ends = np.cumsum([len(group.trajectories_G) for group in groups])[:-1]
    parts_P = [part - part.mean(0) for part in np.split(both, ends)]
    centred = np.concatenate(parts_P)
    size = float(centred[:, 0] @ centred[:, 0])
    varying = [i for i in range(1, both.shape[1]) if centred[:, i].any()]
    if not (0 < size < np.inf) or not np.isfinite(centred).all() or len(varying) > _MOST_METRICS:
        return {}
    for count in (1, 2, 3):
        for chosen in combinations(varying, count):
            columns = centred[:, chosen]
            weights = np.linalg.lstsq(columns, centred[:, 0], rcond=None)[0]
            rest = centred[:, 0] - columns @ weights
            if rest @ rest > 1e-9 * size:
                continue
            # A metric that is the reward itself says nothing about its parts.
            if count == 1:
                varying = [i for i in varying if i != chosen[0]]
                continue
            ranges = np.max([np.ptp(part[:, chosen], axis=0) for part in parts_P], axis=0)
            sizes = np.abs(weights) * ranges
            return {
                f"reward/range/{names[i - 1]}": float(one)
                for i, one in zip(chosen, sizes, strict=True)
            }
    return {}


def compute_sampling_client_metrics(
    groups: Sequence[TrajectoryGroup], now_step: int
) -> dict[str, float]:
    """Returns the age of the weights that sampled the groups, after ``now_step`` updates.

    ``async/staleness_…`` is ``now_step`` minus the updates of the sampling weights: 0 on-policy,
    at most ``max_steps_off_policy`` in asynchronous training. A mean at that bound means that
    training is the bottleneck.
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


def error_metrics(errors: Iterable[RolloutError], groups_skipped: int = 0) -> dict[str, float]:
    """Returns how many rollouts failed, by the class of their exception; ``{}`` if none did.

    ``groups_skipped`` is the number of groups that the batch lacks because too few of their
    rollouts succeeded.
    """
    counts = Counter(error.error_type for error in errors)
    if not counts and not groups_skipped:
        return {}
    metrics = {f"rollout_errors/{kind}": float(count) for kind, count in sorted(counts.items())}
    metrics["rollout_errors/total"] = float(counts.total())
    metrics["rollout_errors/groups_skipped"] = float(groups_skipped)
    return metrics


@dataclass
class TrajectoryTotals:
    """Sums over trajectories, so that a test set can be measured without keeping its episodes.

    ``counts`` has episodes, turns, tokens, and groups by the kind of their rewards; ``env_counts``
    has the number of reports of each metric of the environment; ``stops`` has episodes by stop
    reason.
    """

    counts: Counter[str] = field(default_factory=Counter)
    reward: float = 0.0
    env_sums: dict[str, float] = field(default_factory=dict)
    env_counts: Counter[str] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)
    events: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, group: TrajectoryGroup) -> TrajectoryTotals:
        """Returns the totals of one group."""
        total = cls()
        rewards_G = group.get_total_rewards()
        total.counts["episodes"] = len(rewards_G)
        total.reward = float(sum(rewards_G))
        if rewards_G:
            # In a constant group, every member has the same reward.
            kind = "all_good" if rewards_G[0] >= GOOD_REWARD else "all_bad"
            total.counts[kind if is_constant(rewards_G) else "mixed"] += 1
            texts = {str([turn.ac.tokens for turn in t.transitions]) for t in group.trajectories_G}
            total.counts["same_text"] += len(rewards_G) > len(texts) == 1
        for trajectory, metrics in zip(group.trajectories_G, group.metrics_G, strict=True):
            if trajectory.stop_reason is not None:
                total.stops[str(trajectory.stop_reason)] += 1
            for turn in trajectory.transitions:
                total.counts["turns"] += 1
                total.counts["cut_off"] += turn.ac.stop_reason == "length"
                total.counts["untrained"] += turn.is_masked or not turn.ac.tokens
                total.counts["ac_tokens"] += len(turn.ac.tokens)
                spans = _spans(turn.ac.tokens)
                total.counts["spans"] += len(spans)
                total.counts["repeated_spans"] += len(spans) - len(set(spans))
                total.counts["ob_tokens"] += turn.ob.length
                total.counts["cached_ob_tokens"] += turn.ac.prompt_cache_hit_tokens
            # Metrics of the environment, and events that are 0 in each turn without a report.
            reports = [metrics, *(turn.metrics for turn in trajectory.transitions)]
            for report in reports:
                for name, value in report.items():
                    # Stop reasons are counted once for each trajectory, above.
                    if name not in _EVENTS and not name.startswith(STOP_METRIC_PREFIX):
                        _add(total.env_sums, name, _number(name, value))
                        total.env_counts[name] += 1
            # Sorted, because the order of strings in a set differs between processes.
            for name in sorted(_EVENTS & {name for report in reports for name in report}):
                # A report without the event means that it did not happen.
                values = [_number(name, report.get(name, 0)) for report in reports]
                # An event of the episode counts once, however many reports have it.
                happened = float(max(values) > 0) if name == _EPISODE_EVENT else sum(values)
                _add(total.events, name, happened)
        return total

    @classmethod
    def sum(cls, parts: Iterable[TrajectoryTotals]) -> TrajectoryTotals:
        """Returns the sum of all parts, added in the given order."""
        total = cls()
        for part in parts:
            total.counts += part.counts
            total.reward += part.reward
            total.env_counts += part.env_counts
            total.stops += part.stops
            for name, value in part.env_sums.items():
                _add(total.env_sums, name, value)
            for name, value in part.events.items():
                _add(total.events, name, value)
        return total

    def env_metrics(self) -> dict[str, float]:
        """Returns the metrics below ``env/all/`` or ``env/TAG/``."""
        count = self.counts
        # These names come last, so that an environment cannot overwrite them.
        metrics = {name: value / self.env_counts[name] for name, value in self.env_sums.items()}
        for name in ("episodes", "turns", "ac_tokens", "ob_tokens", "cached_ob_tokens"):
            metrics[f"total_{name}"] = float(count[name])
        if count["turns"]:
            metrics["ac_tokens_per_turn"] = count["ac_tokens"] / count["turns"]
            metrics["ob_tokens_per_turn"] = count["ob_tokens"] / count["turns"]
            metrics["frac_cut_off"] = count["cut_off"] / count["turns"]
            metrics["frac_untrained"] = count["untrained"] / count["turns"]
            metrics["frac_repeated"] = count["repeated_spans"] / max(count["spans"], 1)
        if count["episodes"]:
            metrics["turns_per_episode"] = count["turns"] / count["episodes"]
            metrics["reward/total"] = self.reward / count["episodes"]
            kinds = ("mixed", "all_good", "all_bad")
            # Groups without an episode have no kind, so the shares are of the others.
            groups = sum(count[kind] for kind in kinds)
            kinds = (*kinds, "same_text")
            metrics |= {f"by_group/frac_{kind}": count[kind] / groups for kind in kinds}
            metrics["by_group/size"] = count["episodes"] / groups
        return metrics

    def event_metrics(self) -> dict[str, float]:
        """Returns ``stop/…`` and the metrics of ``_EVENTS``."""
        episodes = self.counts["episodes"]
        metrics = {f"stop/{reason}": n / episodes for reason, n in sorted(self.stops.items())}
        # Events without a divisor are counts.
        divisors = dict.fromkeys(_TURN_EVENTS, max(self.counts["turns"], 1))
        divisors[_EPISODE_EVENT] = episodes
        return metrics | {name: n / divisors.get(name, 1) for name, n in self.events.items()}


def _add(sums: dict[str, float], name: str, value: float) -> None:
    sums[name] = sums.get(name, 0.0) + value


def _spans(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns each four tokens in a row: fewer occur twice in any longer text."""
    return [*zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False)]


def _number(name: str, value: object) -> float:
    if not isinstance(value, (int, float, np.number)):
        raise DataValidationError(
            f"metrics[{name!r}]: got {value!r} of type {type(value).__name__}, expected a number; "
            "texts belong in the step's logs"
        )
    return float(value)
