"""Transcripts of the sampled episodes, for people (HTML) and for programs (JSON lines).

A step writes to ``log_path/iteration_NNNNNN/``: ``train.html`` with the first
``num_groups_to_log`` groups in full and a table of all groups, ``train_logtree.json`` with the
same page as a tree, and ``train_rollout_summaries.jsonl`` with a line for each episode. An
evaluation writes ``eval_LABEL.…`` to the same folder. Each file is complete or absent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from tinker_cookbook.exceptions import TrainingError
from tinker_cookbook.rl.report.episode_rows import episode_row, json_value
from tinker_cookbook.rl.report.transcript_html import transcript_page
from tinker_cookbook.rl.report.transcript_text import LoggedGroup, TokenText, plain, plural
from tinker_cookbook.run.background import BackgroundWriter
from tinker_cookbook.run.jsonl import encode_row
from tinker_cookbook.run.paths import local_path, write_atomically
from tinker_cookbook.utils.logtree import (
    Trace,
    init_trace,
    scope_disable,
    write_trace_json,
)

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
        trace.root.children.clear()  # the page has its own heading
        yield trace


def iteration_dir(log_path: str | os.PathLike[str], iteration: int) -> str:
    """Returns the folder of a step's transcripts."""
    return os.fspath(local_path(log_path) / f"iteration_{iteration:06d}")


class TranscriptWriter(BackgroundWriter):
    """Writes the transcripts of a run in a thread, one step after the other.

    ``num_groups_to_log`` groups are shown in full by the HTML; 0 writes no HTML. Without a
    tokenizer, tokens are shown as numbers.
    """

    def __init__(
        self,
        log_path: str | os.PathLike[str],
        num_groups_to_log: int = 4,
        json_export: bool = True,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        super().__init__("transcripts")
        self.log_path = local_path(log_path)
        self.num_groups_to_log = num_groups_to_log
        self.json_export = json_export
        self.tokenizer = tokenizer

    def write(self, iteration: int, split: str, entries: Sequence[LoggedGroup]) -> Future[None]:
        """Queues a step's transcripts; it blocks only while two earlier steps are queued.

        ``iteration`` is the number of updates before these groups are trained on, ``split`` is
        ``"train"`` or ``"eval_LABEL"``. Raises ``TrainingError`` if an earlier step's transcripts
        could not be written.
        """
        return self.submit(partial(self._write, iteration, split, entries))

    def _write(self, iteration: int, split: str, entries: Sequence[LoggedGroup]) -> None:
        # Tokens are decoded here, in the writer's thread, so that training does not wait.
        text = TokenText(self.tokenizer)
        for entry in entries:
            entry.texts = [text.episode(one) for one in entry.group.trajectories_G]
        base = os.path.join(iteration_dir(self.log_path, iteration), split)
        try:
            os.makedirs(os.path.dirname(base), exist_ok=True)
            if self.json_export:
                rows = [
                    encode_row(_summary_row(entry, member, split, iteration))
                    for entry in entries
                    for member in range(len(entry.texts))
                ]
                # Atomic, so that a run that is killed leaves a whole file or none.
                write_atomically(local_path(f"{base}_rollout_summaries.jsonl"), b"".join(rows))
            if self.num_groups_to_log > 0:
                what = f"trained by update {iteration + 1}" if split == "train" else "not trained"
                subtitle = f"{self.log_path.name} · {what} · {plural(len(entries), 'group')}"
                title = f"Iteration {iteration} · {split}"
                page = transcript_page(title, subtitle, entries, self.num_groups_to_log)
                page.path = local_path(f"{base}.html")
                page.write()
                if self.json_export:
                    write_trace_json(page, f"{base}_logtree.json")
        except OSError as error:
            raise TrainingError(
                f"{base}.…: transcripts cannot be written: {error.strerror or error}; free some "
                f"space there, or switch them off with num_groups_to_log=0 "
                f"rollout_json_export=False"
            ) from error


def _summary_row(entry: LoggedGroup, member: int, split: str, iteration: int) -> dict[str, Any]:
    """Returns the row of one episode; ``docs/04-rl-metrics.md`` explains the keys."""
    group, text = entry.group, entry.texts[member]
    trajectory = group.trajectories_G[member]
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
            "prompt_text": plain(turn.prompt),
            "action_text": plain(turn.answer),
        }
    return row | {
        "advantage": entry.advantages[member] if entry.advantages else None,
        "stop_reason": str(trajectory.stop_reason),
        "trajectory_logs": json_value(trajectory.logs),
        "final_text": plain(text.final),
    }
