"""What the policy said, kept for people (HTML) and machines (JSON lines).

A step leaves in ``log_path/iteration_NNNNNN/``:

- ``train.html``: the first ``num_groups_to_log`` groups in full, and a table of all;
- ``train_logtree.json``: the same page as a tree;
- ``train_rollout_summaries.jsonl``: every episode of every group, one a line.

An evaluation leaves ``eval_LABEL.…`` beside them. Each file is whole or absent.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tinker_cookbook.exceptions import DataValidationError, TinkerCookbookError, TrainingError
from tinker_cookbook.rl.report.transcript_html import transcript_page
from tinker_cookbook.rl.report.transcript_rows import LoggedGroup, plural, summary_row
from tinker_cookbook.rl.report.transcript_text import Piece, TokenText
from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.utils.logtree import (
    Trace,
    init_trace,
    scope_disable,
    scope_div,
    write_trace_json,
)
from tinker_cookbook.utils.logtree.log import Scope
from tinker_cookbook.utils.run_folder.jsonl import encode_row
from tinker_cookbook.utils.run_folder.paths import local_path, write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TranscriptWriter", "group_log", "iteration_dir", "member_log"]

logger = logging.getLogger(__name__)

_MOST_PENDING = 2


@contextmanager
def group_log(enabled: bool = True) -> Iterator[Trace | None]:
    """Collects what the environments of one group write with ``logtree``.

    The rollout of the group runs inside; what comes out goes to the transcript with the group.

    Args:
        enabled: Whether the group will be shown; if not, nothing is kept.
    """
    if not enabled:
        with scope_disable():
            yield None
        return
    with init_trace("group") as trace:
        trace.root.children.clear()  # the page has a heading of its own
        yield trace


def member_log(index: int) -> Scope:
    """Inside, ``logtree`` writes to the log of member ``index`` of the group."""
    return scope_div(data__member=index)


def iteration_dir(log_path: str | os.PathLike[str], iteration: int) -> str:
    """Returns the folder of a step's transcripts."""
    return os.fspath(local_path(log_path) / f"iteration_{iteration:06d}")


class TranscriptWriter:
    """Writes the transcripts of a run, in a thread, one step after the other.

    Args:
        log_path: The run's folder.
        num_groups_to_log: Groups that the HTML shows in full; 0 writes no HTML.
        json_export: Whether to write the JSON files.
        tokenizer: Of the policy; without one, tokens are shown as their numbers.
    """

    def __init__(
        self,
        log_path: str | os.PathLike[str],
        num_groups_to_log: int = 4,
        json_export: bool = True,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.log_path = local_path(log_path)
        self.num_groups_to_log = num_groups_to_log
        self.json_export = json_export
        self.tokenizer = tokenizer
        self._pending: deque[Future[None]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="transcripts")

    def write(
        self,
        iteration: int,
        split: str,
        groups: Sequence[TrajectoryGroup | None],
        tags: Sequence[Sequence[str]],
        advantages: Sequence[Sequence[float] | None] | None = None,
        logs: Sequence[Trace | None] | None = None,
    ) -> Future[None]:
        """Queues a step's transcripts and returns at once, unless two steps already wait.

        Args:
            iteration: Updates done before these groups are trained on.
            split: ``"train"`` or ``"eval_LABEL"``.
            groups: In the order of the batch; ``None`` for one that was not finished. A loop that
                is stopped while it samples writes those that it has, and calls ``flush``.
            tags: Those of each group's builder.
            advantages: For each group one number a member; ``None`` for a group without.
            logs: What each group's ``group_log`` collected.

        Returns:
            Done when the files are there.

        Raises:
            TrainingError: An earlier step's transcripts could not be written.
            DataValidationError: The arguments are not of one length.
        """
        entries = _entries(groups, tags, advantages, logs)
        while self._pending and (self._pending[0].done() or len(self._pending) >= _MOST_PENDING):
            self._pending.popleft().result()
        future = self._thread.submit(self._write, iteration, split, entries, len(groups))
        self._pending.append(future)
        return future

    def flush(self) -> None:
        """Waits until all is written.

        Raises:
            TrainingError: Something could not be written.
        """
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """Waits until all is written and ends the thread."""
        try:
            self.flush()
        finally:
            self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except TinkerCookbookError as second:
            logger.warning("while handling %r: %s", error, second)

    def _write(
        self, iteration: int, split: str, entries: Sequence[LoggedGroup], num_groups: int
    ) -> None:
        text = TokenText(self.tokenizer)
        for entry in entries:
            entry.texts = [text.episode(one) for one in entry.group.trajectories_G]
        base = os.path.join(iteration_dir(self.log_path, iteration), split)
        try:
            os.makedirs(os.path.dirname(base), exist_ok=True)
            if self.json_export:
                self._write_rows(base, iteration, split, entries)
            if self.num_groups_to_log > 0:
                self._write_page(base, iteration, split, entries, num_groups, text)
        except OSError as error:
            raise TrainingError(
                f"{base}.…: transcripts cannot be written: {error.strerror or error}; free some "
                f"space there, or switch them off with num_groups_to_log=0 "
                f"rollout_json_export=False"
            ) from error

    def _write_rows(
        self, base: str, iteration: int, split: str, entries: Sequence[LoggedGroup]
    ) -> None:
        rows = [
            encode_row(summary_row(entry, member, split, iteration))
            for entry in entries
            for member in range(len(entry.texts))
        ]
        path = local_path(f"{base}_rollout_summaries.jsonl")
        write_atomically(path, b"".join(rows))

    def _write_page(
        self,
        base: str,
        iteration: int,
        split: str,
        entries: Sequence[LoggedGroup],
        num_groups: int,
        text: TokenText,
    ) -> None:
        title = f"Iteration {iteration} · {split}"
        what = f"trained by update {iteration + 1}" if split == "train" else "not trained"
        subtitle = f"{self.log_path.name} · {what} · {plural(len(entries), 'group')}"
        if len(entries) < num_groups:
            subtitle += f" of {num_groups}, the others were not finished"
        prompts: dict[int, list[Piece]] = {}
        for entry in entries:
            first = [t.turns[0].prompt if t.turns else None for t in entry.texts]
            if first and first[0] and all(prompt == first[0] for prompt in first):
                prompts[entry.index] = first[0]
        page = transcript_page(title, subtitle, entries, prompts, self.num_groups_to_log)
        page.path = local_path(f"{base}.html")
        page.write()
        if self.json_export:
            write_trace_json(page, f"{base}_logtree.json")


def _entries(
    groups: Sequence[TrajectoryGroup | None],
    tags: Sequence[Sequence[str]],
    advantages: Sequence[Sequence[float] | None] | None,
    logs: Sequence[Trace | None] | None,
) -> list[LoggedGroup]:
    given = {"groups": groups, "tags": tags, "advantages": advantages, "logs": logs}
    lengths = {name: len(values) for name, values in given.items() if values is not None}
    if len(set(lengths.values())) > 1:
        raise DataValidationError(f"transcripts: got {lengths}, expected one entry for each group")
    entries: list[LoggedGroup] = []
    for index, group in enumerate(groups):
        if group is None:
            continue
        mine = None if advantages is None else advantages[index]
        if mine is not None and len(mine) != len(group.trajectories_G):
            raise DataValidationError(
                f"transcripts: group {index} has {len(mine)} advantages for "
                f"{len(group.trajectories_G)} members, expected one each"
            )
        log = None if logs is None else logs[index]
        entries.append(LoggedGroup(index, group, list(tags[index]), mine, log))
    return entries
