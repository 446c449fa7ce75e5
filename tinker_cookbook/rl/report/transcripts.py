"""Files of the sampled episodes that readers of the official cookbook expect.

A step writes to ``log_path/iteration_NNNNNN/``: ``train_rollout_summaries.jsonl`` with a line for
each episode, and ``train_logtree.json`` with the conversations and the logs of the environments of
the first ``num_groups_to_log`` groups. An evaluation writes ``eval_LABEL_…`` to the same folder.
Each file is complete or absent. The page of ``tinker_cookbook.view`` shows them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinker_cookbook.exceptions import TrainingError
from tinker_cookbook.record.episodes import RecordedGroup
from tinker_cookbook.rl.report.episode_rows import episode_row
from tinker_cookbook.rl.report.transcript_text import EpisodeText, TokenText, number
from tinker_cookbook.rl.types import Trajectory
from tinker_cookbook.run.jsonl import encode_row, json_value
from tinker_cookbook.run.paths import local_path, write_atomically
from tinker_cookbook.utils.logtree import Node, Trace, init_trace, scope_disable
from tinker_cookbook.utils.logtree.nodes import Child

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@contextmanager
def group_log(enabled: bool = True) -> Iterator[Trace | None]:
    """Collects what the environments of one group log with ``logtree``, if ``enabled``."""
    if not enabled:
        # Environments must not write into a report that the caller has open.
        with scope_disable():
            yield None
        return
    with init_trace("group") as trace:
        trace.root.children.clear()  # the tree of the step has its own headings
        yield trace


@dataclass(frozen=True)
class TranscriptFiles:
    """Files of a run.

    ``num_groups_to_log`` groups are in the tree; 0 writes no tree. ``json_export`` writes a row for
    each episode. Without a tokenizer, tokens are shown as numbers.
    """

    log_path: str
    num_groups_to_log: int = 4
    json_export: bool = True
    tokenizer: PreTrainedTokenizerBase | None = None

    def write(self, iteration: int, split: str, entries: Sequence[RecordedGroup]) -> None:
        """Writes the files of a step.

        ``iteration`` is the number of updates before these groups are trained on, ``split`` is
        ``"train"`` or ``"eval_LABEL"``.

        Raises:
            TrainingError: They cannot be written.
        """
        text = TokenText(self.tokenizer)
        groups = [
            (entry, [text.episode(one) for one in entry.group.trajectories_G]) for entry in entries
        ]
        folder = local_path(self.log_path) / f"iteration_{iteration:06d}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.json_export:
                rows = [
                    encode_row(_summary_row(entry, member, text, split, iteration))
                    for entry, texts in groups
                    for member, text in enumerate(texts)
                ]
                # Atomic, so that a run that is killed leaves a whole file or none.
                write_atomically(folder / f"{split}_rollout_summaries.jsonl", b"".join(rows))
            if self.num_groups_to_log > 0:
                tree = Trace(f"Iteration {iteration} · {split}")
                shown = [one for one in groups if one[0].index < self.num_groups_to_log]
                tree.root.add(*(_group_node(*one) for one in shown))
                write_atomically(folder / f"{split}_logtree.json", encode_row(tree.to_json()))
        except OSError as error:
            raise TrainingError(
                f"{folder}: transcripts cannot be written: {error.strerror or error}; free some "
                f"space there, or switch them off with num_groups_to_log=0 "
                f"rollout_json_export=False"
            ) from error


def _summary_row(
    entry: RecordedGroup, member: int, text: EpisodeText, split: str, iteration: int
) -> dict[str, Any]:
    """Returns the row of one episode; ``docs/rl-metrics.md`` explains the keys."""
    group, trajectory = entry.group, entry.group.trajectories_G[member]
    row = episode_row(
        group,
        member,
        split=split,
        iteration=iteration,
        group_idx=entry.index,
        tags=entry.tags,
        sampling_client_step=group.sampling_client_step,
    )
    for step, transition, turn in zip(
        row["steps"], trajectory.transitions, text.turns, strict=True
    ):
        step |= {
            "ob_new_len": turn.num_new_tokens,
            "stop_reason": transition.ac.stop_reason,
            "masked": transition.is_masked,
            "prompt_text": turn.prompt,
            "action_text": turn.answer,
        }
    return row | {
        "advantage": _advantage(entry, member),
        "stop_reason": str(trajectory.stop_reason),
        "trajectory_logs": json_value(trajectory.logs),
        "final_text": text.final,
    }


def _advantage(entry: RecordedGroup, member: int) -> float | None:
    """Returns the advantage of an episode; ``None`` in an evaluation."""
    return entry.advantages_G[member] if entry.advantages_G else None


def _group_node(entry: RecordedGroup, texts: Sequence[EpisodeText]) -> Node:
    """Returns a section with the episodes of a group and what their environments logged."""
    group, rewards = entry.group, entry.group.get_total_rewards()
    data = {"group_idx": entry.index, "tags": list(entry.tags), "rewards": list(rewards)}
    title = " · ".join([f"Group {entry.index}", *entry.tags])
    node = Node("section", {}, [Node("h2", {}, [title])], data)
    node.add(*(Node("p", {}, [f"while sampling: {error}"]) for error in group.rollout_errors))
    node.add(*_logged(entry.log, None))
    for member, trajectory in enumerate(group.trajectories_G):
        advantage = _advantage(entry, member)
        facts = [f"Sample {member}", f"reward {number(rewards[member])}"]
        facts += [] if advantage is None else [f"advantage {number(advantage, sign=True)}"]
        heading = Node("h3", {}, [" · ".join([*facts, str(trajectory.stop_reason)])])
        data = {"traj_idx": member, "total_reward": rewards[member], "advantage": advantage}
        shown = [heading, _conversation(trajectory, texts[member]), *_logged(entry.log, member)]
        node.add(Node("section", {}, shown, data))
    return node


def _conversation(trajectory: Trajectory, text: EpisodeText) -> Node:
    """Returns the messages of an episode; of an environment without messages, its text."""
    messages = json.loads(trajectory.messages) if trajectory.messages else []
    if not messages:
        for turn in text.turns:
            messages.append({"role": "environment", "content": turn.prompt})
            messages.append({"role": "assistant", "content": turn.answer})
        if text.final:
            messages.append({"role": "environment", "content": text.final})
    return Node("div", data={"type": "conversation", "messages": messages})


def _logged(trace: Trace | None, member: int | None) -> list[Child]:
    """Returns what was logged in the scope of one member, or outside of all such scopes."""
    found: list[Child] = []
    for child in [] if trace is None else list(trace.root.children):
        # ``RolloutStrategy`` marks the scope of a member by this attribute.
        scope = child.attrs.get("data-member") if isinstance(child, Node) else None
        # A member that logged nothing has an empty scope.
        is_empty = scope is not None and isinstance(child, Node) and not child.children
        if scope == (None if member is None else str(member)) and not is_empty:
            found.append(child)
    return found
