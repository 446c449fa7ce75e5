"""Metrics of a run until now, as the causes read them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

FEW = 5
"""Values of which a mean is taken: of one batch it would be noise, of more it would come late."""
STEPS = 3
"""Steps in a row in which nothing can be learned; in fewer this may be chance."""
TREND = 20
"""Steps after which a metric that does not move is more than noise or a slow start."""
KEPT = 50
"""Rows that the causes look back on."""
LONG = 500
"""Values in which a trend is looked for; of all of a long run it would cost 10 ms a step."""


# Names of metrics.
REWARD, TEST_REWARD = "reward/total", "test/env/all/reward/total"
KL, ENTROPY, LENGTH = "optim/kl_sample_train_v1", "optim/entropy", "env/all/ac_tokens_per_turn"
MIXED, GOOD = "env/all/by_group/frac_mixed", "env/all/by_group/frac_all_good"
BAD, SAME = "env/all/by_group/frac_all_bad", "env/all/by_group/frac_same_text"
EMPTY, REPEATED = "empty_answer", "env/all/frac_repeated"
CUT, UNTRAINED = "env/all/frac_cut_off", "env/all/frac_untrained"
STALE, TEACHER = "async/staleness_mean", "teacher_kl"
DUPLICATES = "data/frac_duplicates"
LOSSES = ("teacher/forward_kl", "train_mean_nll", "dpo_loss")
HELD_OUT = ("test/dpo_loss", "test/nll")
READ = {
    *LOSSES, *HELD_OUT, REWARD, TEST_REWARD, KL, ENTROPY, LENGTH, MIXED, STALE, TEACHER,
    DUPLICATES, CUT, REPEATED, "margin", "test/nll",
}  # fmt: skip
RANGE = "reward/range/"


@dataclass
class Series:
    """Values of a metric; those that are not finite are NaN."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def start(self) -> float:
        """Mean of the first values; few, because a run may change quickly. NaN without values."""
        return fmean(self.values[:STEPS] or [math.nan])

    @property
    def end(self) -> float:
        """Mean of the last values; NaN without values."""
        return fmean(self.values[-FEW:] or [math.nan])

    @property
    def start_text(self) -> str:
        """``start`` with the steps whose mean it is."""
        return mean_text(self.start, self.steps[:STEPS])

    @property
    def end_text(self) -> str:
        """``end`` with the steps whose mean it is."""
        return mean_text(self.end, self.steps[-FEW:])

    def at(self, index: int) -> str:
        """Returns a value with its step."""
        return f"{self.values[index]:.4g} at step {self.steps[index]}"

    @property
    def error(self) -> float:
        """Standard error of ``end - start``, from the differences of values that follow each other:
        they have noise, but hardly any trend."""
        differences = np.diff(self.values[-KEPT:])
        # A difference has twice the variance of a value, and a mean of n values an n-th of it.
        variance = np.mean(differences**2) / 2 if len(differences) else math.inf
        return math.sqrt(variance / STEPS + variance / FEW)

    def first_step(self, holds: Callable[[float], bool]) -> int:
        """Returns the first step at which this holds for the value, else the last step."""
        pairs = zip(self.steps, self.values, strict=True)
        return next((step for step, value in pairs if holds(value)), self.steps[-1])


def steps_text(steps: Sequence[int]) -> str:
    """Returns these steps as words."""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def mean_text(value: float, steps: Sequence[int]) -> str:
    """Returns a mean with its steps, because no point of the curve has this value."""
    return f"{value:.4g} ({'mean of ' if len(steps) > 1 else ''}{steps_text(steps)})"


class History:
    """Metrics of a run until now, with its settings as in ``config.json``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.rows: deque[Mapping[str, float]] = deque(maxlen=KEPT)
        """The finite numbers in the last rows of training steps."""
        self.ranges: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=KEPT)
        """Steps and parts of the reward of the last rows that have them."""
        self._series: dict[str, Series] = {}

    @property
    def last(self) -> Mapping[str, float]:
        """The last row of a training step; empty before the first."""
        return self.rows[-1] if self.rows else {}

    def add(self, row: Mapping[str, Any], step: int) -> None:
        """Adds the row of ``step``."""
        finite = {
            name: value
            for name, value in row.items()
            if isinstance(value, (int, float)) and math.isfinite(value)
        }
        if "progress/batch" in row or "num_sequences" in row:
            self.rows.append(finite | {"step": step})
            parts = {k.removeprefix(RANGE): v for k, v in finite.items() if k.startswith(RANGE)}
            if parts:
                self.ranges.append((step, parts))
        for name in READ & row.keys():
            series = self._series.setdefault(name, Series())
            series.steps.append(step)
            series.values.append(float(finite.get(name, math.nan)))

    def __call__(self, *names: str) -> Series:
        """Returns the first of these metrics that the run has, else an empty series."""
        return next((self._series[name] for name in names if name in self._series), Series())

    def mean_of(self, name: str) -> float:
        """Returns the mean over the last steps; 0 if they lack it."""
        values = [row[name] for row in [*self.rows][-STEPS:] if name in row]
        return fmean(values) if values else 0.0

    @property
    def last_steps(self) -> str:
        """The steps of ``mean_of``."""
        return steps_text([int(row["step"]) for row in [*self.rows][-STEPS:]])

    def streak(self, holds: Callable[[Mapping[str, float]], bool]) -> list[int]:
        """Returns the last steps, in order, in all of which this holds."""
        steps: list[int] = []
        for row in reversed(self.rows):
            if not holds(row):
                break
            steps.insert(0, int(row["step"]))
        return steps

    @property
    def loss(self) -> Series:
        """Loss of the batches."""
        return self(*LOSSES)

    @property
    def held_out(self) -> Series:
        """Loss on held-out data."""
        return self(*HELD_OUT)


Found = tuple[int, str] | None
"""First step of a cause and its text, if it holds."""
