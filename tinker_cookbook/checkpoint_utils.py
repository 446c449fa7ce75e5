"""Checkpoints of a run: saving them in the right order, and the list of them on disk.

A checkpoint counts once its line stands in ``log_path/checkpoints.jsonl``: the weights are saved
first, then the line is appended. A run killed between the two leaves saved weights that no line
names; the resumed run saves over them.

``"batch": k`` means that exactly k optimizer updates are in the checkpoint. Operations of a
training client run in the order in which they were *submitted*, so a save belongs right after the
update it closes and before the next batch: :meth:`CheckpointManager.due` says whether one is due
after an update that has only been submitted yet, :meth:`CheckpointManager.submit` puts it into the
queue, and :meth:`CheckpointManager.commit` waits for it and appends the line.
"""

from __future__ import annotations

from tinker_cookbook.utils.checkpoints.manager import (
    FINAL_NAME,
    CheckpointManager,
    SavePolicy,
    SaveReason,
)
from tinker_cookbook.utils.checkpoints.records import (
    CHECKPOINTS_FILE,
    CheckpointRecord,
    get_last_checkpoint,
    load_checkpoints_file,
)
from tinker_cookbook.utils.checkpoints.saving import (
    CheckpointKind,
    PendingCheckpoint,
    save_checkpoint,
    save_checkpoint_async,
    submit_checkpoint,
)

__all__ = [
    "CHECKPOINTS_FILE",
    "FINAL_NAME",
    "CheckpointKind",
    "CheckpointManager",
    "CheckpointRecord",
    "PendingCheckpoint",
    "SavePolicy",
    "SaveReason",
    "get_last_checkpoint",
    "load_checkpoints_file",
    "save_checkpoint",
    "save_checkpoint_async",
    "submit_checkpoint",
]
