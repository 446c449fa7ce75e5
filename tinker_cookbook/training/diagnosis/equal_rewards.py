"""Why nothing is learned from the rewards of a batch: they are equal within each group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean

import numpy as np

from tinker_cookbook.training.diagnosis.history import (
    BAD,
    CUT,
    EMPTY,
    GOOD,
    LENGTH,
    LONG,
    MIXED,
    REWARD,
    SAME,
    STEPS,
    TEACHER,
    TEST_REWARD,
    TREND,
    Found,
    History,
    steps_text,
)

_MANY = 10
"""Steps after which a reward that stays the same is no slow start."""
ONLY_ZERO = "perhaps because the grader returns nothing else"


def no_signal(row: Mapping[str, float]) -> bool:
    """Returns whether hardly any group has different rewards; a teacher gives another signal."""
    # One in ten: a batch of 64 may have a few by chance and still learn nothing.
    return TEACHER not in row and row.get(MIXED, 1.0) <= 0.1


def _same_text(run: History) -> str | None:
    # A model that has learned short answers gives one text at any temperature.
    if run.mean_of(SAME) < 0.5 or learned(run):
        return None
    return "The samples of a group are the same text"


def mostly_right(run: History) -> bool:
    """Returns whether nearly all answers of the last steps are right."""
    # By itself "good" is a reward of 0.5 and more, which is little on a scale to 100.
    return run.mean_of(GOOD) >= 0.9 and 0.8 <= run.mean_of(REWARD) <= 1.05


def learned(run: History) -> bool:
    """Returns whether rewards differed before and are now near the best that the run had."""
    if not max(run(MIXED).values[-LONG:], default=0.0) > 0.1:
        return False
    if mostly_right(run):
        return True
    rewards = np.array(run(REWARD).values[-LONG:] or [0.0])
    # Unlike max and min these ignore NaN.
    best, worst = np.fmax.reduce(rewards), np.fmin.reduce(rewards)
    return bool(best > worst and run.mean_of(REWARD) >= best - 0.1 * (best - worst))


def _all_good(run: History) -> str | None:
    if learned(run):
        # To have learned the problems is a success; to go on for long is not.
        if len(run.streak(no_signal)) < TREND:
            return None
        if mostly_right(run):
            return "The problems are solved"
        return f"The reward is near the best of this run, {run.mean_of(REWARD):.3g}"
    return "Every answer was right from the start" if mostly_right(run) else None


def _cut_off(run: History) -> str | None:
    # Half: the others would show in mixed groups if the length did not matter.
    share = run.mean_of(CUT) if _mostly_bad(run) else 0.0
    if share < 0.5:
        return None
    return f"{share:.0%} of the answers of {run.last_steps} are cut off at max_tokens"


def _empty(run: History) -> str | None:
    if run.mean_of(CUT) >= 0.5 or mostly_right(run) or learned(run):
        return None
    # One token is only the end.
    if 0 < run.mean_of(LENGTH) <= 1.5:
        return "The answers are empty"
    # Only steps that have empty answers have the metric.
    share = fmean(row.get(EMPTY, 0.0) for row in [*run.rows][-STEPS:])
    if share < 0.5:
        return None
    return f"{share:.0%} of the answers of {run.last_steps} are only white space or thinking"


def _bad_format(run: History) -> str | None:
    # ``format`` is a metric of each problem that checks it, ``parse_error`` only of failed turns.
    formats = [row["env/all/format"] for row in run.rows if "env/all/format" in row][-STEPS:]
    share = max(run.mean_of("parse_error"), 1 - fmean(formats) if formats else 0.0)
    if share < 0.5 or not _mostly_bad(run):
        return None
    return f"{share:.0%} of the answers of {run.last_steps} cannot be parsed or have not the format"


def _one_reward(run: History) -> str | None:
    last = {row.get(REWARD) for row in [*run.rows][-STEPS:]}
    # 0 and 1 also come from a grader that works, and so does a reward that was learned.
    if len(last) > 1 or last <= {0.0, 1.0, None} or max(run(MIXED).values) > 0.1:
        return None
    if max(run.mean_of(GOOD), run.mean_of(BAD)) < 1:
        return None
    return f"Every answer gets the reward {last.pop():.3g}"


def _flat(run: History) -> Found:
    """The reward never changed, and few groups have different rewards."""
    rows, rewards = [*run.rows][-_MANY:], run(REWARD).values[-LONG:]
    mixed = fmean([row.get(MIXED, 1.0) for row in rows] or [1.0])
    # Only 0 is for `all_bad`.
    if len(rows) < _MANY or mixed >= 0.2 or TEACHER in run.last or not any(rewards):
        return None
    # A tenth: the few answers that differ move the mean by less. Near 1 the problems are solved.
    mean = run.mean_of(REWARD)
    if not max(rewards) - min(rewards) <= 0.1 * max(map(abs, rewards)) or 0.8 <= mean <= 1.05:
        return None
    steps = [int(row["step"]) for row in rows]
    return steps[0], (
        f"The reward stays near {mean:.3g}, and in {1 - mixed:.0%} of the groups of "
        f"{steps_text(steps)} all samples get the same reward"
    )


def _mostly_bad(run: History) -> bool:
    return run.mean_of(BAD) >= 0.9


def _all_bad(run: History) -> str | None:
    # A reward below 0.5 may be a good one where 0 is the best, or on a scale to 0.3.
    if not (_mostly_bad(run) and -1 <= run.mean_of(REWARD) <= 0.1):
        return None
    # A single other reward, also of a held-out problem, shows that the grader has others.
    rewards = {*run(REWARD).values, *run(TEST_REWARD).values}
    if rewards != {0.0} or max(run(MIXED).values) > 0:
        return "All answers are wrong"
    return f"All answers of {steps_text(run(REWARD).steps)} have the reward 0, {ONLY_ZERO}"


def _all_constant(run: History) -> str | None:
    if learned(run):
        return None
    return "Each problem is too easy or too hard for all of its samples"


_CONDITIONS = {
    "empty": _empty,
    "same_text": _same_text,
    "cut_off": _cut_off,
    "format": _bad_format,
    "one_reward": _one_reward,
    "all_good": _all_good,
    "all_bad": _all_bad,
    "all_constant": _all_constant,
}


def rule_of(name: str) -> Callable[[History], Found]:
    """Returns the rule of one of these causes."""
    condition = _CONDITIONS[name]

    def rule(run: History) -> Found:
        steps = run.streak(no_signal)
        if len(steps) < STEPS or (text := condition(run)) is None:
            return _flat(run) if name == "one_reward" else None
        return steps[0], f"{text}, so all samples of a group get the same reward"

    return rule
