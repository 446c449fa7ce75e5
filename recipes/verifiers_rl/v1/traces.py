"""Traces of verifiers 0.4: their tokens as trajectories, and the results of their episodes.

A trace is a graph of messages. Each path from its root to a leaf is a branch: token ids, which of
them the model sampled, and their log-probabilities.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import tinker

from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.exceptions import BackendError, DataValidationError
from tinker_cookbook.recipes.verifiers_rl.driven_env import WITHOUT_REWARD, ProgramResult
from tinker_cookbook.rl.types import Metrics, StopReason, Trajectory, Transition

_STOP_REASONS = {
    "agent_completed": StopReason.COMPLETED,
    "max_turns": StopReason.MAX_TURNS,
    "max_output_tokens": StopReason.MAX_SAMPLED_TOKENS,
    "max_total_tokens": StopReason.MAX_TOKENS,
    "agent_timeout": StopReason.ROLLOUT_TIMEOUT,
}


def trajectories_of_trace(trace: Any) -> list[Trajectory]:
    """Returns a trajectory for each branch of a trace that a train client recorded.

    Every sampled span becomes a turn with all tokens before it as its observation. The reward of
    the trace becomes the reward of each branch, on its last turn. A span that two branches share is
    trained in the first one only.

    Raises:
        DataValidationError: A branch has no tokens.
    """
    trajectories, seen = [], set()
    for branch in trace.branches:
        if not branch.trainable:
            continue
        turns: list[Transition] = []
        before: list[int] = []
        for node in branch.nodes:
            spans = _spans(node.token_ids, node.mask)
            logprobs = list(node.logprobs)
            for tokens, is_sampled in spans:
                if is_sampled:
                    here, logprobs = logprobs[: len(tokens)], logprobs[len(tokens) :]
                    action = TokensWithLogprobs(tokens, here)
                    ob = tinker.ModelInput.from_ints(before)
                    turns.append(Transition(ob, action, 0.0, False, masked=id(node) in seen))
                before = [*before, *tokens]
            seen.add(id(node))
        if not turns:
            raise DataValidationError(
                f"trace {trace.id}: a branch has no sampled tokens; only a train client "
                "(TrainClientConfig) records tokens, an eval client does not"
            )
        turns[-1].episode_done = True
        turns[-1].reward = float(trace.reward)
        trajectories.append(Trajectory(turns, tinker.ModelInput.empty(), stop_reason_of(trace)))
    return trajectories


def _spans(tokens: Sequence[int], mask: Sequence[bool]) -> list[tuple[list[int], bool]]:
    """Splits tokens where their mask changes."""
    pairs = groupby(zip(tokens, mask, strict=True), key=lambda pair: bool(pair[1]))
    return [([token for token, _ in group], sampled) for sampled, group in pairs]


def stop_reason_of(trace: Any) -> StopReason | str:
    """Returns why a trace ended, as our loop counts it."""
    condition = trace.stop_condition or "agent_completed"
    return _STOP_REASONS.get(condition, condition)


def metrics_of(trace: Any) -> Metrics:
    """Returns the named metrics and rewards of a trace, except those that were not computed."""
    metrics: Metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    for name, reward in trace.rewards.items():
        if reward is not None:
            metrics[f"reward/{name}"] = reward.score
    return metrics


def result_of_episode(episode: Any, where: str) -> ProgramResult:
    """Returns the result of an episode; its reward is the mean over the trained agents' traces.

    Raises:
        BackendError: The episode failed. The model gave no answer, so there is no reward.
    """
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        last = f"{errors[-1].type}: {errors[-1].message}" if errors else "no error was recorded"
        raise BackendError(f"{where} failed: {last}. {WITHOUT_REWARD}")
    trained = [trace for trace in episode.traces if trace.agent.trainable] or episode.traces
    totals: dict[str, list[float]] = {}
    for trace in trained:
        for name, value in metrics_of(trace).items():
            totals.setdefault(name, []).append(float(value))
    return ProgramResult(
        sum(float(trace.reward) for trace in trained) / len(trained),
        {name: sum(values) / len(values) for name, values in totals.items()},
        stop_reason=stop_reason_of(trained[-1]),
    )
