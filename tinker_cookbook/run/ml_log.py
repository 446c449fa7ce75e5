"""Logs a run: metrics, configuration, messages and code state, in its folder and elsewhere.

::

    logger = setup_logging(log_dir=config.log_path, config=config)
    logger.log_metrics({"train_mean_nll": 2.1}, step=1)
    logger.close()

leaves ``config.json``, ``metrics.jsonl``, ``logs.log`` and, in a git checkout, ``code.diff``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.code_state import code_diff
from tinker_cookbook.run.config import dump_config
from tinker_cookbook.run.loggers import JsonLogger, Logger, MultiplexLogger, PrettyPrintLogger
from tinker_cookbook.run.paths import CODE_DIFF_FILE, LOG_FILE, ensure_writable_dir
from tinker_cookbook.run.remote_loggers import (
    MlflowLogger,
    NeptuneLogger,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
)
from tinker_cookbook.run.trackers import start_trackers
from tinker_cookbook.utils.error_logs import configure_logging_module

__all__ = [
    "JsonLogger",
    "Logger",
    "MlflowLogger",
    "MultiplexLogger",
    "NeptuneLogger",
    "PrettyPrintLogger",
    "TensorBoardLogger",
    "TrackioLogger",
    "WandbLogger",
    "configure_logging_module",
    "dump_config",
    "setup_logging",
]


def setup_logging(
    log_dir: str | os.PathLike[str],
    wandb_project: str | None = None,
    wandb_name: str | None = None,
    config: Any = None,
    do_configure_logging_module: bool = True,
) -> Logger:
    """Starts the log of a run, as :func:`start_logging` does, whose settings are described there.

    Rows of an earlier run in the folder stay, and metrics are printed.
    """
    return start_logging(log_dir, wandb_project, wandb_name, config, do_configure_logging_module)


def start_logging(
    log_dir: str | os.PathLike[str],
    wandb_project: str | None = None,
    wandb_name: str | None = None,
    config: Any = None,
    do_configure_logging_module: bool = True,
    *,
    trackers: Sequence[str] | None = None,
    resume_step: int | None = None,
    print_metrics: bool = True,
) -> Logger:
    """Starts the log of a run. Call it first: it detects a folder that is not writable.

    Args:
        log_dir: The run's folder; created if it is missing.
        wandb_project: Project of the run in its trackers.
        wandb_name: The run's name there.
        config: Written to ``config.json``.
        do_configure_logging_module: Send Python's log messages to ``logs.log`` and the console.
        trackers: Also log to these: wandb, trackio, tensorboard, mlflow. A folder that is resumed
            continues its runs there. ``None``: wandb if a project is given.
        resume_step: Updates in the checkpoint that the run continues from; rows of later steps are
            cut; -1 (no checkpoint) cuts all, ``None`` keeps all.
        print_metrics: Print metrics too; loops with their own display pass False.

    Raises:
        ConfigurationError: The folder cannot be written, or a tracker's package or account is
            missing. A tracker that cannot be reached raises nothing.
    """
    # First, so that a run does not fail only when it writes its first row.
    path = ensure_writable_dir(log_dir)
    close = configure_logging_module(path / LOG_FILE) if do_configure_logging_module else None
    # The file is first: MultiplexLogger stops at the first logger that fails.
    loggers: list[Logger] = [JsonLogger(path, resume_step=resume_step)]
    if print_metrics:
        loggers.append(PrettyPrintLogger())
    if trackers is None and wandb_project:
        trackers = ["wandb"]
    multiplex = MultiplexLogger(loggers, on_close=close)
    try:
        if trackers:
            multiplex.loggers.append(
                start_trackers(trackers, path, wandb_project, wandb_name, config, resume_step)
            )
        if config is not None:
            multiplex.log_hparams(config)
        _write_code_diff(path)
    except (OSError, ConfigurationError) as error:
        # The log handlers of this run must not stay in the process.
        multiplex.close()
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(
            f"log_path={path} cannot be written: {error.strerror or error}; free some space there "
            "or choose another folder with log_path=…"
        ) from error
    return multiplex


def _write_code_diff(path: Path) -> None:
    import tinker_cookbook

    # The user's own code may be in another checkout, in the current folder.
    diff = code_diff([Path(tinker_cookbook.__file__).parent, Path.cwd()])
    if diff:
        (path / CODE_DIFF_FILE).write_text(diff, encoding="utf-8")
