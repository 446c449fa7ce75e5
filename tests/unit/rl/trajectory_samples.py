"""Ways to write trajectories down in a line."""

from __future__ import annotations

import tinker

from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.types import StopReason, Trajectory, TrajectoryGroup, Transition


def prompt(*parts) -> tinker.ModelInput:
    """Token ids and chunks, in order."""
    chunks = []
    for part in parts:
        chunks.append(part if not isinstance(part, list) else tinker.EncodedTextChunk(tokens=part))
    return tinker.ModelInput(chunks=chunks)


def action(tokens, logprobs=None, **extra) -> TokensWithLogprobs:
    """Token i has log-probability -(i + 1) / 10 unless given."""
    if logprobs is None:
        logprobs = [-(i + 1) / 10 for i in range(len(tokens))]
    return TokensWithLogprobs(list(tokens), logprobs, **extra)


def turn(ob, ac, reward=0.0, *, done=True, metrics=None, masked=False) -> Transition:
    """``ob`` and ``ac`` are token ids, or what ``prompt`` and ``action`` make."""
    return Transition(
        ob=prompt(ob) if isinstance(ob, list) else ob,
        ac=action(ac) if isinstance(ac, list) else ac,
        reward=reward,
        episode_done=done,
        metrics=metrics or {},
        masked=masked,
    )


def episode(*turns, stop_reason=StopReason.COMPLETED) -> Trajectory:
    return Trajectory(list(turns), prompt([]), stop_reason)


def group(*trajectories, final=None, metrics=None, **extra) -> TrajectoryGroup:
    size = len(trajectories)
    return TrajectoryGroup(
        list(trajectories), final or [0.0] * size, metrics or [{} for _ in range(size)], **extra
    )


def group_of_rewards(*rewards, **extra) -> TrajectoryGroup:
    return group(*(episode(turn([1, 2], [3], reward)) for reward in rewards), **extra)


def fields(datum) -> dict[str, list]:
    """All of a datum as lists; a chunk that is not text by its content."""
    out = {name: value.to_numpy().tolist() for name, value in datum.loss_fn_inputs.items()}
    out["input"] = []
    for chunk in datum.model_input.chunks:
        out["input"] += chunk.tokens if chunk.type == "encoded_text" else [chunk]
    return out
