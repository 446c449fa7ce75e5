"""Environment with one forecast per market and a Brier reward; an evaluator over all markets."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import chz
import numpy as np

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.judges.agreement import roc_auc as auc_of
from tinker_cookbook.recipes.forecasting.data import ForecastExample, MarketFile
from tinker_cookbook.renderers import Message, Renderer, get_renderer, get_text_content
from tinker_cookbook.rl.dataset_utils import EpochCycledRLDataset
from tinker_cookbook.rl.envs.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from tinker_cookbook.rl.envs.problem_dataset import ProblemDataset
from tinker_cookbook.rl.test_evaluator import RLTestSetEvaluator
from tinker_cookbook.rl.types import (
    Env,
    EnvGroupBuilder,
    Logs,
    Metrics,
    RLDatasetBuilder,
    Trajectory,
    TrajectoryGroup,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.terminal import get_console

_NAME = r"(?:(?:final\s+)?(?:answer|forecast)|probability(?:\s+of\s+yes)?)\s*[:=]\s*"
_NUMBER = r"(?P<value>[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(?P<percent>%?)"
_MARKS = r"[*_]{0,2}"
_FORECAST = re.compile(
    rf"\s*{_MARKS}(?:{_NAME})?{_MARKS}\s*{_NUMBER}{_MARKS}[.!]?{_MARKS}\s*", re.IGNORECASE
)


def parse_forecast(response: str) -> float | None:
    """Returns the probability in the last line that is not empty, or ``None``.

    ``0.7``, ``70%``, ``Forecast: **0.7**.`` are read; a line with other words is not.
    """
    lines = [line for line in response.splitlines() if line.strip()]
    match = _FORECAST.fullmatch(lines[-1]) if lines else None
    if match is None:
        return None
    value = float(match["value"]) / (100 if match["percent"] else 1)
    return value if 0 <= value <= 1 else None


def brier_reward(probability: float, outcome: int) -> float:
    """Returns ``1 - (probability - outcome)^2``, which is best at the true probability."""
    return 1 - (probability - outcome) ** 2


def render_prompt(example: ForecastExample) -> str:
    """Returns the question; it has neither the outcome nor a price of the market."""
    return (
        f"Will this market resolve YES? Today is {example.snapshot_time:%Y-%m-%d}.\n"
        f"Event: {example.event_title}\nMarket: {example.market}\n"
        f"Resolution: {example.resolution_criteria}\nCloses: {example.close_time:%Y-%m-%d}\n"
        f"Sources:\n{example.reference_material}\n"
        "Reply with the probability of YES, a number from 0 to 1, and nothing else."
    )


def _scores(probability: float | None, outcome: int) -> dict[str, float]:
    # An answer without a forecast gets less than the expected reward of the worst honest forecast.
    if probability is None:
        return {"brier_reward": 0.0, "accuracy": 0.0, "format_valid": 0.0}
    right = 0.5 if probability == 0.5 else float((probability > 0.5) == bool(outcome))
    reward = brier_reward(probability, outcome)
    return {"brier_reward": reward, "accuracy": right, "format_valid": 1.0}


class ForecastEnv(MessageEnv):
    """One forecast; its reward is Brier's, and 0 if no probability can be read."""

    def __init__(self, example: ForecastExample) -> None:
        self.example = example
        self.example_id = f"{example.submission_id}:{example.market}"

    async def initial_observation(self) -> list[Message]:
        """Returns the question."""
        return [Message(role="user", content=render_prompt(self.example))]

    async def step(self, message: Message) -> MessageStepResult:
        """Scores the forecast by the outcome."""
        probability = parse_forecast(get_text_content(message))
        scores = _scores(probability, self.example.outcome)
        logs: Logs = {
            "question_id": self.example_id,
            "forecast": "invalid" if probability is None else f"{probability:.6f}",
            "outcome": self.example.outcome,
            **scores,
        }
        return MessageStepResult(scores["brier_reward"], True, [], logs=logs)


@dataclass(frozen=True)
class ForecastGroupBuilder(EnvGroupBuilder):
    """Forecasts of the same market."""

    example: ForecastExample
    renderer: Renderer
    group_size: int

    async def make_envs(self) -> Sequence[Env]:
        """Makes ``group_size`` equal environments."""
        return [
            EnvFromMessageEnv(
                self.renderer,
                ForecastEnv(self.example),
                failed_parse_reward=0.0,
                context_overflow_reward=0.0,
            )
            for _ in range(self.group_size)
        ]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Returns the metrics of each forecast, also of truncated ones, and no further reward."""
        names = ("brier_reward", "accuracy", "format_valid")
        found: list[tuple[float, Metrics]] = []
        for trajectory in trajectory_group:
            logs = _forecast_logs(trajectory)
            scores = _scores(None, 0) if logs is None else {n: float(logs[n]) for n in names}
            found.append((0.0, dict(scores)))
        return found

    def logging_tags(self) -> list[str]:
        """Returns the kind of task and the market's category."""
        return ["forecast", self.example.category.casefold().replace(" ", "-")]


def _forecast_logs(trajectory: Trajectory) -> Logs | None:
    return next((t.logs for t in trajectory.transitions if "forecast" in t.logs), None)


def roc_auc(pairs: Sequence[tuple[float, int]]) -> float | None:
    """Returns the area under the ROC curve of ``(score, outcome)`` pairs; ties count half.

    ``None`` if all outcomes are equal.
    """
    value = auc_of([s for s, y in pairs if y == 1], [s for s, y in pairs if y != 1])
    return None if math.isnan(value) else value


@dataclass(frozen=True)
class CalibrationBin:
    """Forecasts that are rounded down to ``low``: number, mean, and the share that came true."""

    low: float
    count: int
    mean_forecast: float
    share_yes: float


def calibration_table(pairs: Sequence[tuple[float, int]]) -> list[CalibrationBin]:
    """Returns the tenths that have forecasts; the last one includes 1.

    For calibrated forecasts mean and share are equal, up to chance.
    """
    forecasts, outcomes = np.array(pairs, dtype=float).reshape(-1, 2).T
    # Rounded first: 0.3 * 10 is slightly below 3, and would be in the bin of 0.2.
    tenths = np.minimum(np.floor((forecasts * 10).round(9)), 9)
    return [
        CalibrationBin(
            low=tenth / 10,
            count=int((tenths == tenth).sum()),
            mean_forecast=float(forecasts[tenths == tenth].mean()),
            share_yes=float(outcomes[tenths == tenth].mean()),
        )
        for tenth in np.unique(tenths).tolist()
    ]


def calibration_error(table: Sequence[CalibrationBin]) -> float:
    """Returns the expected calibration error: the mean of ``|mean - share|`` over forecasts."""
    total = sum(one.count for one in table)
    return sum(one.count * abs(one.mean_forecast - one.share_yes) for one in table) / total


def print_calibration(table: Sequence[CalibrationBin]) -> None:
    """Prints the calibration."""
    lines = ["calibration on the validation markets"]
    lines.append(f"{'forecast':>12}{'number':>9}{'mean':>8}{'resolved YES':>15}")
    for one in table:
        lines.append(
            f"{one.low:5.1f} to {one.low + 0.1:.1f}{one.count:9}{one.mean_forecast:8.2f}"
            f"{one.share_yes:15.2f}"
        )
    get_console().print("\n".join(lines), highlight=False)


class ForecastEvaluator(RLTestSetEvaluator):
    """Evaluation on validation markets, with figures that only all forecasts together have.

    ``NAME/env/all/auc`` is the order (0.5: none), ``NAME/env/all/calibration_error`` the expected
    calibration error; both also for each category. Answers without a forecast are left out of
    them; ``NAME/env/all/format_valid`` is the share of the others. Each evaluation prints the
    calibration.
    """

    async def __call__(self, sampling_client: SamplingClient, **options: Any) -> dict[str, float]:
        """Evaluates the weights of ``sampling_client``; ``options`` as in the base class."""
        self._pairs: dict[int, tuple[list[str], list[tuple[float, int]]]] = {}
        metrics = await super().__call__(sampling_client, **options)
        by_tag: dict[str, list[tuple[float, int]]] = {}
        for _, (tags, pairs) in sorted(self._pairs.items()):
            for tag in ("all", *tags) if pairs else ():
                by_tag.setdefault(tag, []).extend(pairs)
        for tag, pairs in by_tag.items():
            table = calibration_table(pairs)
            metrics[f"{self.name}/env/{tag}/calibration_error"] = calibration_error(table)
            if (auc := roc_auc(pairs)) is not None:
                metrics[f"{self.name}/env/{tag}/auc"] = auc
            if tag == "all":
                print_calibration(table)
        return metrics

    def observe(self, index: int, group: TrajectoryGroup, tags: Sequence[str]) -> None:
        """Keeps the forecasts of a group."""
        logs = [found for t in group.trajectories_G if (found := _forecast_logs(t)) is not None]
        pairs = [
            (float(one["forecast"]), int(one["outcome"]))
            for one in logs
            if one["forecast"] != "invalid"
        ]
        self._pairs[index] = list(tags), pairs


class ForecastRLDataset(EpochCycledRLDataset):
    """Batches of markets in their order, over ``epochs`` passes."""

    def __init__(
        self,
        examples: Sequence[ForecastExample],
        *,
        batch_size: int,
        group_size: int,
        renderer: Renderer,
        epochs: int = 1,
    ) -> None:
        def group(example: ForecastExample) -> ForecastGroupBuilder:
            return ForecastGroupBuilder(example, renderer, group_size)

        super().__init__(ProblemDataset(examples, group, batch_size, shuffle=False), epochs)


@chz.chz
class ProphetArenaRLDatasetBuilder(MarketFile, RLDatasetBuilder):
    """Markets of Prophet Arena, or of a file with its columns, split by time."""

    model_name_for_tokenizer: str = chz.field(doc="Model that has the tokenizer")
    renderer_name: str = chz.field(doc="Chat format")
    groups_per_batch: int = chz.field(doc="Markets per step")
    group_size: int = chz.field(doc="Forecasts per market")
    validation_group_size: int = chz.field(default=8, doc="Forecasts per market in evaluation")
    train_epochs: int = chz.field(default=3, doc="Passes over the training markets")
    include_validation: bool = chz.field(
        default=True, doc="Also return a test set; the recipe uses an evaluator instead"
    )

    def validation(self) -> ForecastRLDataset:
        """Returns the validation markets."""
        return self._dataset(self.split().validation, self.validation_group_size, 1)

    async def __call__(self) -> tuple[ForecastRLDataset, ForecastRLDataset | None]:
        """Loads the markets."""
        train = self._dataset(self.split().train, self.group_size, self.train_epochs)
        return train, self.validation() if self.include_validation else None

    def _dataset(
        self, examples: Sequence[ForecastExample], group_size: int, epochs: int
    ) -> ForecastRLDataset:
        return ForecastRLDataset(
            examples,
            batch_size=self.groups_per_batch,
            group_size=group_size,
            renderer=get_renderer(self.renderer_name, get_tokenizer(self.model_name_for_tokenizer)),
            epochs=epochs,
        )
