"""Computes a benchmark's result from its answers, with intervals, pass@k and maj@k."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tinker_cookbook.eval.benchmarks._types import BenchmarkResult, Metrics, StoredTrajectory
from tinker_cookbook.eval.statistics import (
    majority_at_k,
    mean_pass_at_k,
    mixed_share,
    score_interval,
)

ANSWER_LOG = "extracted"
"""Key of the log with a response's final answer: its vote in maj@k."""

ACC_NORM = "acc_norm"
"""Metric of an answer: whether the choice with the highest log-probability per byte is right."""

Aggregate: TypeAlias = Callable[[list[float], list[Metrics]], BenchmarkResult]


def summarize(
    name: str,
    rows: Sequence[StoredTrajectory],
    aggregate: Aggregate | None = None,
    time_seconds: float = 0.0,
) -> BenchmarkResult:
    """Returns the result of answers; ``aggregate`` gets rewards and metrics of graded answers.

    Metrics: ``ci_low`` and ``ci_high``, unless ``aggregate`` computes a score other than the mean
    reward; ``score_completed``; with several answers to a problem ``num_problems``, ``maj@K``,
    ``mixed_share`` (problems with right and wrong answers), ``never_solved`` and ``always_solved``.
    """
    graded = [row for row in rows if row.error is None]
    rewards = [row.reward for row in graded]
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    result = BenchmarkResult(name, mean, 0, 0)
    if aggregate is not None:
        result = aggregate(rewards, [row.metrics for row in graded])
    # Only the runner knows errors and truncated answers, so it always sets these counts.
    result.name, result.time_seconds = name, time_seconds
    result.num_examples, result.num_errors = len(rows), len(rows) - len(graded)
    result.num_correct = sum(row.correct for row in graded)
    result.num_truncated = sum(row.truncated for row in graded)
    whole = [row.reward for row in graded if not row.truncated]
    result.metrics["score_completed"] = sum(whole) / len(whole) if whole else 0.0
    normalized = [row.metrics[ACC_NORM] for row in graded if ACC_NORM in row.metrics]
    if normalized:
        result.metrics[ACC_NORM] = sum(normalized) / len(normalized)

    problems: dict[str, list[StoredTrajectory]] = defaultdict(list)
    for row in graded:
        problems[row.example_id].append(row)
    groups = list(problems.values())
    # The interval is valid only for the mean reward.
    if groups and math.isclose(result.score, mean, abs_tol=1e-9):
        low, high = score_interval([[row.reward for row in group] for group in groups])
        result.metrics.update(ci_low=low, ci_high=high)
    if len(groups) < len(graded):
        correct = [[row.correct for row in group] for group in groups]
        result.pass_at_k = mean_pass_at_k(correct)
        result.metrics.update(
            num_problems=len({row.example_id for row in rows}),
            mixed_share=mixed_share(correct),
            never_solved=sum(not any(answers) for answers in correct),
            always_solved=sum(all(answers) for answers in correct),
        )
        result.metrics.update(_majority_metrics(groups))
    return result


def _majority_metrics(groups: Sequence[Sequence[StoredTrajectory]]) -> Metrics:
    """Returns ``maj@K`` for powers of 2 and all answers, if graders report what they read."""
    if not any(ANSWER_LOG in row.logs for group in groups for row in group):
        return {}
    most = min(len(group) for group in groups)
    sizes = {2**power for power in range(1, most.bit_length())} | {most}
    found: Metrics = {}
    for k in sorted(size for size in sizes if 1 < size <= most):
        values = [
            majority_at_k([_vote(row) for row in g], [row.reward for row in g], k) for g in groups
        ]
        found[f"maj@{k}"] = sum(values) / len(values)
    return found


def _vote(row: StoredTrajectory) -> str | None:
    # Graders write "" if a response has no final answer.
    extracted = row.logs.get(ANSWER_LOG)
    return None if extracted in (None, "") else str(extracted)
