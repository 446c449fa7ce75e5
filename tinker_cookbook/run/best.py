"""Tracks the best evaluation of a run, for the checkpoint ``best`` and for
early stopping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tinker_cookbook.exceptions import ConfigurationError, nearest_sentence
from tinker_cookbook.run.jsonl import NONFINITE_KEY

MetricMode = Literal["min", "max"]
_LOWER_IS_BETTER = {
    "nll", "loss", "bpb", "kl", "perplexity", "error", "errors",
    "brier", "mse", "mae", "rmse", "ece", "wer", "cer",
}  # fmt: skip

METRICS = (
    "test/dpo_loss",  # before test/nll, which DPO runs log for the chosen answers only
    "test/nll",
    "test/env/all/reward/total",
    "train_mean_nll",
    "reward/total",
)
"""Metrics to compare by default: the first that any run logs."""


def lower_is_better(metric: str) -> bool:
    """Returns whether a lower value is better, which holds for losses."""
    return not _LOWER_IS_BETTER.isdisjoint(metric.replace("/", "_").lower().split("_"))


@dataclass
class BestEvaluation:
    """Tracks one evaluation metric, including step 0 (before training).

    Attributes:
        metric: Name of the metric, such as ``test/nll``.
        mode: Whether lower or higher values are better.
        patience: Evaluations without improvement after which a run stops; 0: never.
        step: Step of the best evaluation, ``None`` before the first one.
        value: Best value.
        without: Evaluations since the best one.
    """

    metric: str
    mode: MetricMode
    patience: int = 0
    step: int | None = None
    value: float | None = None
    without: int = 0

    @classmethod
    def of(cls, config: Any) -> BestEvaluation | None:
        """Creates a tracker from the settings; ``None`` without ``best_metric``."""
        metric = config.best_metric
        if metric is None:
            return None
        mode = config.best_metric_mode or ("min" if lower_is_better(metric) else "max")
        return cls(metric, mode, config.early_stopping_patience)

    def restore(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Restores the state from the rows of ``metrics.jsonl``."""
        for row in rows:
            if "step" in row and self.metric in row:
                # JSON has no NaN or infinity: the row has null, and the number in another entry.
                value = row.get(NONFINITE_KEY, {}).get(self.metric, row[self.metric])
                number = math.nan if value is None else float(value)
                self.update(int(row["step"]), {self.metric: number})

    def update(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Records an evaluation; returns whether it is the best so far. NaN never is."""
        if self.metric not in metrics:
            return False
        new, old = float(metrics[self.metric]), self.value
        if old is None:
            better = new == new
        else:
            better = new < old if self.mode == "min" else new > old
        if better:
            self.step, self.value, self.without = step, new, 0
        else:
            self.without += 1
        return better

    @property
    def exhausted(self) -> bool:
        """Whether the run should stop."""
        return 0 < self.patience <= self.without

    def check_measured(self, metrics: Mapping[str, Any]) -> None:
        """Raises ConfigurationError if a run's first evaluation does not have the metric."""
        if self.metric not in metrics:
            raise ConfigurationError(
                f"best_metric: got {self.metric!r}, expected a metric of the evaluations: "
                f"{', '.join(metrics)}{nearest_sentence(self.metric, metrics)}"
            )

    def describe(self) -> str:
        """Returns ``test/nll 2.31 after step 30``."""
        at = "before training" if self.step == 0 else f"after step {self.step}"
        return f"{self.metric} {self.value:.5g} {at}" if self.value is not None else self.metric


def check_best_settings(config: Any) -> None:
    """Raises ConfigurationError for settings of the best checkpoint that have no effect."""
    if config.best_metric is None:
        for name in ("best_metric_mode", "early_stopping_patience"):
            if getattr(config, name):
                raise ConfigurationError(
                    f"{name}: got {getattr(config, name)} without best_metric; expected the metric "
                    "that decides, such as best_metric=test/nll"
                )
    elif not (config.eval_every or config.infrequent_eval_every):
        raise ConfigurationError(
            f"best_metric: got {config.best_metric}, but eval_every=0 and infrequent_eval_every=0 "
            "switch evaluations off; set eval_every to at least 1"
        )
