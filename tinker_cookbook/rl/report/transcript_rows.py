"""Episodes as rows of ``…_rollout_summaries.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinker_cookbook.rl.report.transcript_text import EpisodeText, plain
from tinker_cookbook.rl.types import TrajectoryGroup, Transition
from tinker_cookbook.utils.logtree import Trace

SCHEMA_VERSION = 1


@dataclass
class LoggedGroup:
    """A finished group as a transcript shows it.

    Attributes:
        index: Its place in the batch.
        group: The group.
        tags: Of its builder.
        advantages: One for each member; ``None`` where there are none (evaluation).
        log: What its environments wrote.
        texts: One for each member; filled in when written.
    """

    index: int
    group: TrajectoryGroup
    tags: list[str] = field(default_factory=list)
    advantages: Sequence[float] | None = None
    log: Trace | None = None
    texts: list[EpisodeText] = field(default_factory=list)

    def advantage(self, member: int) -> float | None:
        """Returns the advantage of one member."""
        return None if self.advantages is None else float(self.advantages[member])


def summary_row(entry: LoggedGroup, member: int, split: str, iteration: int) -> dict[str, Any]:
    """One episode; the keys are told in ``docs/04-rl-metrics.md``."""
    group, text = entry.group, entry.texts[member]
    trajectory = group.trajectories_G[member]
    return {
        "schema_version": SCHEMA_VERSION,
        "split": split,
        "iteration": iteration,
        "group_idx": entry.index,
        "traj_idx": member,
        "tags": list(entry.tags),
        "sampling_client_step": group.sampling_client_step,
        "total_reward": trajectory.reward + group.final_rewards_G[member],
        "final_reward": group.final_rewards_G[member],
        "advantage": entry.advantage(member),
        "stop_reason": str(trajectory.stop_reason),
        "trajectory_metrics": _writable(group.metrics_G[member]),
        "trajectory_logs": _writable(trajectory.logs),
        "steps": [
            _step_row(index, transition, text)
            for index, transition in enumerate(trajectory.transitions)
        ],
        "final_ob_len": trajectory.final_ob.length,
        "final_text": plain(text.final),
    }


def _step_row(index: int, transition: Transition, text: EpisodeText) -> dict[str, Any]:
    turn = text.turns[index]
    return {
        "step_idx": index,
        "ob_len": transition.ob.length,
        "ob_new_len": turn.num_new_tokens,
        "ac_len": len(transition.ac.tokens),
        "reward": transition.reward,
        "episode_done": transition.episode_done,
        "stop_reason": transition.ac.stop_reason,
        "masked": transition.masked,
        "prompt_text": plain(turn.prompt),
        "action_text": plain(turn.answer),
        "metrics": _writable(transition.metrics),
        "logs": _writable(transition.logs),
    }


def _writable(values: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON can hold it. What an environment logs is shown, never a reason to end a run."""
    return {str(key): _writable_value(value) for key, value in values.items()}


def _writable_value(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return _writable(value)
    if isinstance(value, (list, tuple)):
        return [_writable_value(item) for item in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def number(value: float, sign: bool = False) -> str:
    """Returns a reward for people: ``0.500``, ``1,234.5``."""
    if not math.isfinite(value):
        return str(value)
    plus = "+" if sign else ""
    return format(value, f"{plus}.3f" if abs(value) < 100 else f"{plus},.1f")


def plural(count: int, noun: str) -> str:
    """Returns ``1 token``, ``1,200 tokens``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
