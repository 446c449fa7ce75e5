"""Logs a run: metrics, configuration, messages and code state, in its folder and elsewhere.

::

    logger = setup_logging(log_dir=config.log_path, config=config)
    logger.log_metrics({"train_mean_nll": 2.1}, step=1)
    logger.close()

leaves ``config.json``, ``metrics.jsonl``, ``logs.log`` and, in a git checkout, ``code.diff``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.logging import RichHandler

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.error_logs import FewOfAKind
from tinker_cookbook.utils.ml_log.base import Logger, MultiplexLogger
from tinker_cookbook.utils.ml_log.json_logger import JsonLogger
from tinker_cookbook.utils.ml_log.other_loggers import NeptuneLogger, TrackioLogger
from tinker_cookbook.utils.ml_log.pretty_print import PrettyPrintLogger
from tinker_cookbook.utils.ml_log.wandb_logger import WandbLogger
from tinker_cookbook.utils.run_folder.code_state import code_diff
from tinker_cookbook.utils.run_folder.config_io import dump_config
from tinker_cookbook.utils.run_folder.paths import ensure_writable_dir
from tinker_cookbook.utils.terminal import get_console

__all__ = [
    "JsonLogger",
    "Logger",
    "MultiplexLogger",
    "NeptuneLogger",
    "PrettyPrintLogger",
    "TrackioLogger",
    "WandbLogger",
    "configure_logging_module",
    "dump_config",
    "setup_logging",
    "start_logging",
]

LOG_FILE = "logs.log"
DIFF_FILE = "code.diff"

# These log every request at INFO level, which hides the run's own messages.
_CHATTY = ("httpx", "httpcore", "urllib3", "filelock", "fsspec")
_OURS = "_tinker_cookbook_handler"


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
    resume_step: int | None = None,
    print_metrics: bool = True,
) -> Logger:
    """Starts the log of a run. Call it first: it detects a folder that is not writable.

    Args:
        log_dir: The run's folder; created if it is missing.
        wandb_project: Also log to this project of Weights & Biases; the same run there is
            continued when the folder is resumed.
        wandb_name: The run's name there.
        config: Written to ``config.json``.
        do_configure_logging_module: Send Python's log messages to ``logs.log`` and the console.
        resume_step: Updates in the checkpoint that the run continues from; rows of later steps are
            cut; -1 (no checkpoint) cuts all, ``None`` keeps all.
        print_metrics: Print metrics too; loops with their own display pass False.

    Raises:
        ConfigurationError: The folder cannot be written, or Weights & Biases cannot start.
    """
    # First, so that a run does not fail only when it writes its first row.
    path = ensure_writable_dir(log_dir)
    stop_logging: Callable[[], None] | None = None
    if do_configure_logging_module:
        stop_logging = configure_logging_module(path / LOG_FILE)
    # The file is first: MultiplexLogger stops at the first logger that fails.
    loggers: list[Logger] = [JsonLogger(path, resume_step=resume_step)]
    if print_metrics:
        loggers.append(PrettyPrintLogger())
    if wandb_project:
        loggers.append(WandbLogger(wandb_project, log_dir=path, wandb_name=wandb_name))
    multiplex = MultiplexLogger(loggers, on_close=stop_logging)
    try:
        if config is not None:
            multiplex.log_hparams(config)
        _write_code_diff(path)
    except OSError as error:
        # The log handlers of this run must not stay in the process.
        multiplex.close()
        raise ConfigurationError(
            f"log_path={path} cannot be written: {error.strerror or error}; free some space there "
            "or choose another folder with log_path=…"
        ) from error
    url = multiplex.get_logger_url()
    if url:
        logging.getLogger(__name__).info("metrics are at %s", url)
    return multiplex


def configure_logging_module(
    path: str | os.PathLike[str], level: int = logging.INFO
) -> Callable[[], None]:
    """Sends the messages of Python's ``logging`` to the file ``path`` and to the console.

    Handlers of an earlier call are replaced, other handlers stay. Returns a function that removes
    the handlers.

    Raises:
        ConfigurationError: The file cannot be opened.
    """
    root = logging.getLogger()
    # Two runs in one process must not write into each other's log files.
    _remove_handlers(root)
    try:
        to_file = _LogFile(path, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}") from error
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    to_file.setFormatter(plain)
    console = get_console()
    if console.is_terminal:
        # The shared console prints above a live progress bar instead of through it.
        to_person: logging.Handler = RichHandler(console=console, show_path=False, markup=False)
        to_person.setFormatter(logging.Formatter("%(message)s", datefmt="[%X]"))
    else:
        to_person = logging.StreamHandler(sys.stderr)
        to_person.setFormatter(plain)
    to_person.addFilter(FewOfAKind())
    for handler in (to_file, to_person):
        setattr(handler, _OURS, True)
        root.addHandler(handler)
    root.setLevel(level)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    return lambda: _remove_handlers(root)


class _LogFile(logging.FileHandler):
    """A log file that reports a full disk once and does not end the run.

    Files that a run needs raise such errors themselves. Python's own handler would print a
    traceback for every message, and one more when it closes.
    """

    _reported = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Prints once why messages are missing from the file."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._reported:
            self._reported = True
            why = error.strerror or error
            print(f"{self.baseFilename} misses messages from here on: {why}", file=sys.stderr)

    def close(self) -> None:
        """Closes the file, even if its last lines do not fit on the disk."""
        with contextlib.suppress(OSError):
            super().close()


def _remove_handlers(root: logging.Logger) -> None:
    # By the mark, so that handlers of other code stay.
    for handler in [h for h in root.handlers if getattr(h, _OURS, False)]:
        root.removeHandler(handler)
        handler.close()


def _write_code_diff(path: Path) -> None:
    import tinker_cookbook

    # The user's own code may be in another checkout, in the current folder.
    diff = code_diff([Path(tinker_cookbook.__file__).parent, Path.cwd()])
    if diff:
        (path / DIFF_FILE).write_text(diff, encoding="utf-8")
