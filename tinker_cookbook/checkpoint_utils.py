"""The checkpoints of a run, by their official names; see ``run.checkpoints``."""

from __future__ import annotations

from tinker_cookbook.run.checkpoints import (
    CheckpointKind,
    CheckpointRecord,
    PendingCheckpoint,
    RunCheckpoints,
    SavePolicy,
    SaveReason,
    get_last_checkpoint,
    load_checkpoints_file,
    save_checkpoint,
    save_checkpoint_async,
    submit_checkpoint,
)
from tinker_cookbook.run.paths import CHECKPOINTS_FILE as CHECKPOINTS_BASE_NAME
from tinker_cookbook.run.renderer_names import (
    RENDERER_NAME_METADATA_KEY,
    get_renderer_name_from_checkpoint_async,
)
from tinker_cookbook.utils.imports import official_names

__getattr__ = official_names(__name__)

__all__ = [
    "CHECKPOINTS_BASE_NAME",
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
