"""Finds the checkpoint that a run resumes from."""

from __future__ import annotations

from collections.abc import Sequence

from tinker_cookbook.backends import ServiceClient
from tinker_cookbook.checkpoint_utils import CheckpointRecord, load_checkpoints_file
from tinker_cookbook.exceptions import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
)
from tinker_cookbook.run.jsonl import trim_rows
from tinker_cookbook.run.loggers import cut_later_rows
from tinker_cookbook.run.paths import CHECKPOINTS_FILE, local_path


async def newest_saved(service: ServiceClient, log_path: str) -> tuple[CheckpointRecord, list[str]]:
    """Returns the newest listed checkpoint that the backend still has, and lines to print.

    Later ones have expired or were deleted: their lines and the metrics after the returned
    checkpoint are cut. Copies of both files are kept.

    Raises:
        CheckpointError: The backend has none of them.
    """
    record, gone = await last_existing(service, load_checkpoints_file(log_path))
    if record is not None:
        return record, _cut_later(log_path, record.batch or 0, gone) if gone else []
    raise CheckpointError(
        f"log_path={log_path}: none of its {len(gone)} checkpoints exists any more; the last one: "
        f"{next(iter(gone.values()))} Start over with behavior_if_log_dir_exists=delete, or give "
        "another log_path=…"
    )


async def last_existing(
    service: ServiceClient, listed: Sequence[CheckpointRecord]
) -> tuple[CheckpointRecord | None, dict[str, Exception]]:
    """Returns the last listed checkpoint that the backend still has, and why later paths are gone.

    ``None`` if it has none of them.
    """
    import tinker

    rest = service.create_rest_client()
    gone: dict[str, Exception] = {}
    for record in reversed(listed):
        path = record.state_path
        if path is None:
            continue
        try:
            await rest.get_weights_info_by_tinker_path(path)
        # Other errors, such as a lost connection, do not show that the checkpoint is gone.
        except (CheckpointNotFoundError, tinker.NotFoundError) as error:
            gone[path] = error
        else:
            return record, gone
    return None, gone


def check_not_passed(last: CheckpointRecord, total_steps: int) -> None:
    """Raises ConfigurationError if an unfinished run has more steps than it is to have in all."""
    done = last.batch or 0
    if done > total_steps and not last.final:
        raise ConfigurationError(
            f"this run has {done} steps and is not finished, but its settings and data make "
            f"{total_steps} steps, expected at least {done}; set max_steps={done} to end it at its "
            "newest checkpoint, or a larger number to continue it"
        )


def _cut_later(log_path: str, step: int, gone: dict[str, Exception]) -> list[str]:
    folder = local_path(log_path)
    cut_later_rows(folder, step)
    # Cut last, so that a run killed in between does both again.
    file = folder / CHECKPOINTS_FILE
    trim_rows(file, lambda row: row.get("state_path") not in gone, f"{file}.pre_resume_{step:06d}")
    reason = next(iter(gone.values()))
    return [f"later checkpoints that no longer exist: {len(gone)}; the last one: {reason}"]
