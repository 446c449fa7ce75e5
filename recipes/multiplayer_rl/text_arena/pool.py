"""Opponent pool of a self-play run: earlier weights of the policy.

Every ``snapshot_every`` steps the current weights are saved for sampling, and ``opponents.jsonl``
in the run's folder gets a line with their path. The opponents of batch b are snapshots of the first
b updates. The choice depends only on the seed and on b, so a run that was killed and resumed gets
the same opponents.
"""

from __future__ import annotations

from tinker_cookbook.backends import TrainingClient
from tinker_cookbook.eval.evaluators import TrainingClientEvaluator
from tinker_cookbook.run.current import current_step
from tinker_cookbook.run.jsonl import encode_row, read_rows
from tinker_cookbook.run.paths import local_path, write_atomically

OPPONENTS_FILE = "opponents.jsonl"


class Snapshots(TrainingClientEvaluator):
    """Adds the current weights to the pool of the run in ``log_path``; returns no metrics."""

    def __init__(self, log_path: str) -> None:
        self._log_path = log_path

    async def __call__(self, training_client: TrainingClient) -> dict[str, float]:
        """Saves the weights."""
        step = current_step()
        saved = await training_client.save_weights_for_sampler(f"opponent-{step:06d}")
        # The line is written last: it proves that the weights can be opened. It replaces those of a
        # run that was killed later on.
        file = local_path(self._log_path) / OPPONENTS_FILE
        rows = [row for row in read_rows(file) if row["step"] < step]
        rows.append({"step": step, "path": saved.path})
        write_atomically(file, b"".join(map(encode_row, rows)))
        return {}


def snapshots(log_path: str, step: int, size: int) -> list[str]:
    """Returns the paths of at most ``size`` snapshots of the first ``step`` updates: the first and
    the newest ones."""
    rows = read_rows(local_path(log_path) / OPPONENTS_FILE)
    paths = [row["path"] for row in rows if row["step"] <= step]
    return paths if len(paths) <= size else [paths[0], *paths[len(paths) - size + 1 :]]
