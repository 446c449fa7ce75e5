"""Why a run does not improve or becomes worse: causes with their steps, evidence, and advice.

Causes that concern one step, such as answers that are cut off, are in the rows of the run
(``rl/report/diagnosis.py`` finds them while it trains). This module adds those that only several
steps show, and the episodes or examples that show a cause.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median, pstdev
from typing import Any

import numpy as np

from tinker_cookbook.record.read import Record

Series = list[tuple[int, float]]
"""Steps and values of a metric."""

_FEW = 5
"""Steps of which the mean is taken at the start and at the end of a run."""
_MANY = 20
"""Steps from which on a flat curve is more than chance."""
_EVIDENCE = 3


@dataclass
class Cause:
    """A cause; ``since`` and ``until`` are its first and last step.

    ``setting`` is the key to change and ``advice`` how. ``evidence`` has places in the record:
    ``step``, ``split`` and ``group`` with ``member``, or ``datum``.
    """

    name: str
    text: str
    since: int
    until: int
    setting: str = ""
    advice: str = ""
    evidence: list[dict[str, Any]] = field(default_factory=list)


def find_causes(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[Cause]:
    """Returns the causes that the rows of a run show, the most recent first."""
    series = _Rows(rows)
    found = [*_of_steps(rows)]
    for check in (_kl_jump, _entropy, _length, _stale, _held_out_reward, _flat_reward, _spike,
                  _rising_loss, _flat_loss, _overfitting):  # fmt: skip
        cause = check(series, config)
        if cause is not None:
            found.append(cause)
    return sorted(found, key=lambda one: -one.until)


class _Rows:
    """Series of the metrics of a run."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = [row for row in rows if type(row.get("step")) is int]

    def __call__(self, *names: str) -> Series:
        """Returns the series of the first of these metrics that the run has."""
        for name in names:
            values = [
                (row["step"], float(row[name]))
                for row in self._rows
                if type(row.get(name)) in (int, float)
            ]
            if values:
                return values
        return []


def _of_steps(rows: Sequence[Mapping[str, Any]]) -> Iterable[Cause]:
    """Yields the causes that the run itself found, each with the last streak of its steps."""
    trained = [row for row in rows if "progress/batch" in row or "progress" in row]
    last: dict[str, Cause] = {}
    before: set[str] = set()
    for row in trained:
        now = str(row.get("diagnosis") or "")
        names: dict[str, str] = {}
        for part in filter(None, now.split("\n")):
            name, _, text = part.partition(": ")
            names[name] = text
        for name, text in names.items():
            if name in before:
                last[name].until, last[name].text = row["step"], text
            else:
                last[name] = Cause(name, text, row["step"], row["step"])
        before = set(names)
    # One step of equal rewards is chance; a cause of several steps is not.
    yield from (one for one in last.values() if one.until - one.since >= _FEW - 1)


def _start_and_end(values: Series) -> tuple[float, float]:
    numbers = [value for _, value in values]
    return mean(numbers[:_FEW]), mean(numbers[-_FEW:])


def _kl_jump(rows: _Rows, config: Mapping[str, Any]) -> Cause | None:
    kl = rows("optim/kl_sample_train_v1")
    for i, (step, value) in enumerate(kl[_FEW:], _FEW):
        usual = median(abs(one) for _, one in kl[max(0, i - _MANY) : i])
        if value > 0.01 and value > 10 * usual:
            rate = config.get("learning_rate")
            return Cause(
                "kl_jump",
                f"The KL between sampler and trainer jumped from {usual:.2g} to {value:.2g}.",
                step,
                step,
                "learning_rate",
                f"lower it, for example to {rate / 3:.2g}" if rate else "lower it",
            )
    return None


def _entropy(rows: _Rows, config: Mapping[str, Any]) -> Cause | None:
    entropy, mixed = rows("optim/entropy"), rows("env/all/by_group/frac_mixed")
    if len(entropy) < 2 * _FEW or not mixed:
        return None
    start, end = _start_and_end(entropy)
    reward = rows("reward/total")
    first, last = _start_and_end(reward) if reward else (0.0, 0.0)
    # A policy that has learned its task is certain, too; then the reward has risen.
    if end < 0.1 * start and last <= first + 0.1 * abs(first) and _start_and_end(mixed)[1] < 0.1:
        since = next(step for step, value in entropy if value < 0.2 * start)
        return Cause(
            "entropy_collapse",
            f"The entropy fell from {start:.2g} to {end:.2g} nats, so the samples of a group are "
            "alike and give no signal, although the reward has not risen.",
            since,
            entropy[-1][0],
            "kl_penalty_coef",
            "set it to 0.01, or lower learning_rate",
        )
    return None


def _length(rows: _Rows, config: Mapping[str, Any]) -> Cause | None:
    length, reward = rows("env/all/ac_tokens_per_turn"), rows("reward/total")
    if len(length) < 2 * _FEW or not reward:
        return None
    start, end = _start_and_end(length)
    first, last = _start_and_end(reward)
    if not (end > 2 * start or end < start / 2) or last > first + _noise(reward):
        return None
    return Cause(
        "length_drift",
        f"Answers went from {start:.0f} to {end:.0f} tokens, and the reward has not risen.",
        next(step for step, value in length if value > 1.5 * start or value < start / 1.5),
        length[-1][0],
        "max_tokens" if end > start else "temperature",
        "limit the length, or make it part of the reward",
    )


def _stale(rows: _Rows, config: Mapping[str, Any]) -> Cause | None:
    stale, kl = rows("async/staleness_mean"), rows("optim/kl_sample_train_v1")
    old = [step for step, value in stale if value >= 2]
    if not old or not kl or max(value for _, value in kl) < 0.01:
        return None
    return Cause(
        "stale_samples",
        "Samples are two and more updates old when they are trained, and the KL is above 0.01.",
        old[0],
        old[-1],
        "async_config.max_steps_off_policy",
        "lower it",
    )


def _held_out_reward(rows: _Rows, config: Mapping[str, Any]) -> Cause | None:
    train, test = rows("reward/total"), rows("test/env/all/reward/total")
    if len(test) < 4 or len(train) < 2 * _FEW:
        return None
    best_step, best = max(test, key=lambda one: one[1])
    later = [value for step, value in test if step > best_step]
    rises = mean(v for s, v in train if s > best_step) if later else 0.0
    before = [value for step, value in train if step <= best_step][-_FEW:]
    fell = len(later) >= 2 and max(later) < best - 0.1 * max(abs(best), 0.1)
    if not (fell and before and rises > mean(before)):
        return None
    return Cause(
        "overfitting",
        f"The reward still rises, but on held-out problems it fell from {best:.3g} to "
        f"{later[-1]:.3g}.",
        best_step,
        test[-1][0],
        "best_metric",
        "keep the best checkpoint with best_metric=test/env/all/reward/total; use more problems",
    )


def _flat_reward(rows: _Rows, config: Mapping[str, Any]) -> Cause | None:
    reward, mixed = rows("reward/total"), rows("env/all/by_group/frac_mixed")
    if len(reward) < _MANY or not mixed:
        return None
    first, last = _start_and_end(reward)
    has_signal = mean(value for _, value in mixed) > 0.2
    if has_signal and abs(last - first) < _noise(reward) and not config.get("random_rewards"):
        rate = config.get("learning_rate")
        return Cause(
            "flat_reward",
            f"Groups have different rewards, but in {len(reward)} steps the mean did not move "
            f"({first:.3g} to {last:.3g}).",
            reward[0][0],
            reward[-1][0],
            "learning_rate",
            f"raise it, for example to {rate * 3:.2g}" if rate else "raise it",
        )
    return None


def _loss(rows: _Rows) -> Series:
    return rows("train_mean_nll", "dpo_loss")


def _spike(rows: _Rows, config: Mapping[str, Any]) -> Cause | None:
    loss = _loss(rows)
    for i, (step, value) in enumerate(loss[_MANY // 2 :], _MANY // 2):
        usual = [one for _, one in loss[max(0, i - _MANY) : i]]
        if value > mean(usual) + 6 * pstdev(usual) and value > 1.3 * mean(usual):
            return Cause(
                "loss_spike",
                f"The loss of one batch is {value:.3g}, and was {mean(usual):.3g} on average.",
                step,
                step,
                "grad_clip_norm",
                "look at the examples with the highest loss; set it to 1 to limit their effect",
            )
    return None


def _rising_loss(rows: _Rows, config: Mapping[str, Any]) -> Cause | None:
    loss = _loss(rows)
    if len(loss) < 2 * _FEW:
        return None
    first, last = _start_and_end(loss)
    if last < 1.1 * first:
        return None
    rate = config.get("learning_rate")
    return Cause(
        "rising_loss",
        f"The loss rose from {first:.3g} to {last:.3g}.",
        next(step for step, value in loss if value > first),
        loss[-1][0],
        "learning_rate",
        f"lower it, for example to {rate / 10:.2g}" if rate else "lower it",
    )


def _flat_loss(rows: _Rows, config: Mapping[str, Any]) -> Cause | None:
    loss, test = _loss(rows), rows("test/nll", "test/dpo_loss")
    if len(loss) < _MANY or len(test) < 2:
        return None
    # Batches differ, so the held-out loss decides; it is the same examples each time.
    if test[0][1] - test[-1][1] < 0.01 * abs(test[0][1]) and test[-1][1] <= 1.01 * test[0][1]:
        rate = config.get("learning_rate")
        return Cause(
            "flat_loss",
            f"The held-out loss hardly moved: {test[0][1]:.4g} to {test[-1][1]:.4g}.",
            test[0][0],
            test[-1][0],
            "learning_rate",
            f"raise it, for example to {rate * 10:.2g}" if rate else "raise it",
        )
    return None


def _overfitting(rows: _Rows, config: Mapping[str, Any]) -> Cause | None:
    loss, test = _loss(rows), rows("test/nll", "test/dpo_loss")
    if len(test) < 3 or not loss:
        return None
    step, best = min(test, key=lambda one: one[1])
    later = [value for at, value in test if at > step]
    falls = [value for at, value in loss if at > step]
    if later and falls and later[-1] > 1.03 * best and falls[-1] < loss[0][1]:
        return Cause(
            "overfitting",
            f"The held-out loss rose from {best:.3g} to {later[-1]:.3g}, while the loss of the "
            "training data fell.",
            step,
            test[-1][0],
            "num_epochs",
            "train fewer epochs, or keep the best checkpoint with best_metric=test/nll",
        )
    return None


def _noise(values: Series) -> float:
    """Returns twice the standard error of the difference of two means of ``_FEW`` steps."""
    numbers = [value for _, value in values]
    differences = [b - a for a, b in itertools.pairwise(numbers)]
    return 2 * pstdev(differences) / _FEW**0.5 if len(differences) > 1 else 0.0


def add_evidence(cause: Cause, record: Record) -> None:
    """Adds the episodes or examples of the cause's last step that show it best."""
    table = record.table(cause.until)
    if table is None:
        return
    rows = table.to_pylist()
    if "targets" in table.column_names:
        order: Callable[[dict[str, Any]], float] = _example_loss
        keys = ("datum",)
    else:
        order, keys = _ORDERS.get(cause.name, _lowest_reward), ("group", "member")
    seen: list[tuple[int, ...]] = []
    for row in sorted(rows, key=order, reverse=True):
        place = tuple(row[key] for key in keys)
        if place not in seen:
            seen.append(place)
            at = dict(zip(keys, place, strict=True))
            cause.evidence.append({"step": cause.until, "split": "train", **at})
        if len(seen) == _EVIDENCE:
            return


def _example_loss(row: dict[str, Any]) -> float:
    if not row.get("logprobs") or not row.get("weights"):
        return 0.0
    weights = np.abs(row["weights"])
    return float(-(weights * row["logprobs"]).sum() / max(weights.sum(), 1e-9))


def _lowest_reward(row: dict[str, Any]) -> float:
    return -float(row["episode_reward"])


def _mismatch(row: dict[str, Any]) -> float:
    if not row.get("trainer_logprobs"):
        return 0.0
    return float(np.abs(np.subtract(row["trainer_logprobs"], row["logprobs"])).max())


def _longest(row: dict[str, Any]) -> float:
    return float(len(row.get("answer") or ()))


_ORDERS: dict[str, Callable[[dict[str, Any]], float]] = {
    "kl_jump": _mismatch,
    "high_kl": _mismatch,
    "stale_samples": _mismatch,
    "length_drift": _longest,
    "cut_off": _longest,
    "empty": lambda row: -_longest(row),
}
