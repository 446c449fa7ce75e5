"""Checkpoints of a run: saving in the right order, and the list on disk.

A checkpoint is complete when its line is in ``log_path/checkpoints.jsonl``: the weights are saved
first, then the line is appended. A run killed in between leaves saved weights without a line,
which the resumed run overwrites.

``"batch": k`` means that exactly k optimizer updates are in the checkpoint. Operations of a
training client run in the order in which they were *submitted*, so a save must be submitted right
after the last update that it includes and before the next batch: :meth:`RunCheckpoints.due` returns
whether one is due after an update that has been submitted, :meth:`RunCheckpoints.submit` submits
it, and :meth:`RunCheckpoints.commit` waits for it and appends the line. The loops of this package
use these. A loop that waits for each step is simpler with ``CheckpointManager``.
"""

from __future__ import annotations

from tinker_cookbook.utils.checkpoints.manager import (
    FINAL_NAME,
    RunCheckpoints,
    SavePolicy,
    SaveReason,
)
from tinker_cookbook.utils.checkpoints.renderer_names import (
    RENDERER_NAME_METADATA_KEY,
    get_renderer_name_from_checkpoint_async,
)
from tinker_cookbook.utils.checkpoints.saving import (
    CHECKPOINTS_FILE,
    CheckpointKind,
    CheckpointRecord,
    PendingCheckpoint,
    get_last_checkpoint,
    load_checkpoints_file,
    save_checkpoint,
    save_checkpoint_async,
    submit_checkpoint,
)
from tinker_cookbook.utils.imports import official_names

__getattr__ = official_names(__name__)

CHECKPOINTS_BASE_NAME = CHECKPOINTS_FILE

__all__ = [
    "CHECKPOINTS_BASE_NAME",
    "CHECKPOINTS_FILE",
    "FINAL_NAME",
    "RENDERER_NAME_METADATA_KEY",
    "CheckpointKind",
    "CheckpointRecord",
    "PendingCheckpoint",
    "RunCheckpoints",
    "SavePolicy",
    "SaveReason",
    "get_last_checkpoint",
    "get_renderer_name_from_checkpoint_async",
    "load_checkpoints_file",
    "save_checkpoint",
    "save_checkpoint_async",
    "submit_checkpoint",
]
