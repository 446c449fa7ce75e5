"""Metrics and configuration as files in the log folder."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.utils.ml_log.base import Logger, Metrics, RunStore
from tinker_cookbook.utils.run_folder import replaced_run
from tinker_cookbook.utils.run_folder.code_state import code_state
from tinker_cookbook.utils.run_folder.config_io import (
    CONFIG_FILE,
    dump_config,
    lost_fields,
    write_config,
)
from tinker_cookbook.utils.run_folder.jsonl import append_row, trim_rows

METRICS_FILE = "metrics.jsonl"

logger = logging.getLogger(__name__)


class JsonLogger(Logger):
    """Writes ``metrics.jsonl``, ``config.json`` and long texts.

    Each call of ``log_metrics`` writes one whole row of ``metrics.jsonl``.

    Args:
        log_dir: The run's folder.
        resume_step: Updates in the checkpoint that the run continues from. Rows of later steps are
            cut (-1, for a run killed before its first checkpoint, cuts all); a copy is kept as
            ``metrics.jsonl.pre_resume_NNNNNN``. ``None`` keeps all rows.
        store: Keeps metrics, configuration and code changes; no files are written then.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        store: RunStore | None = None,
        *,
        resume_step: int | None = None,
    ) -> None:
        self.log_dir = Path(log_dir)
        self.path = self.log_dir / METRICS_FILE
        self._store = store
        if resume_step is None:
            return
        if store is None:
            cut_later_rows(self.log_dir, resume_step)
        else:
            store.truncate_metrics(resume_step + 1)

    @property
    def store(self) -> RunStore | None:
        """The store that was given."""
        return self._store

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Appends one row.

        Raises:
            TrainingError: It cannot be written; the rows before are intact.
        """
        # Otherwise this value would replace the step of the row.
        if step is not None and metrics.get("step", step) != step:
            raise DataValidationError(
                f"metrics contain step={metrics['step']} but are logged for step={step}; 'step' is "
                f"a key of every row, so use another name"
            )
        if self._store is not None:
            self._store.write_metrics(dict(metrics), step)
            return
        row = metrics if step is None else {"step": step, **metrics}
        # The first row replaces the old run of this folder, so it must be on the disk.
        append_row(self.path, row, durable=replaced_run.is_pending(self.log_dir))
        replaced_run.confirm(self.log_dir)

    def log_hparams(self, config: Any) -> None:
        """Writes ``config.json``; a different older one is kept under another name."""
        path = self.log_dir / CONFIG_FILE
        if self._store is not None:
            data = dump_config(config)
            self._store.write_config(data)
            self._store.write_code_diff(code_state())
            _warn_of_lost(lost_fields(data), path)
            return
        try:
            # The file of an earlier start shows the settings of the rows so far, so it is kept.
            before = path.read_bytes() if path.exists() else None
            lost = write_config(path, config)
            if before is not None and before != path.read_bytes():
                # config.previous.json, or the first free one of config.previous.2.json, …
                kept, number = path.with_name("config.previous.json"), 1
                while kept.exists():
                    number += 1
                    kept = path.with_name(f"config.previous.{number}.json")
                kept.write_bytes(before)
                logger.warning("the configuration changed; the one before is kept in %s", kept)
        except OSError as error:
            raise ConfigurationError(
                f"{path} cannot be written: {error.strerror or error}; choose another log_path=…"
            ) from error
        _warn_of_lost(lost, path)

    def log_long_text(self, key: str, text: str) -> None:
        """Writes the text to a file named after the key."""
        (self.log_dir / f"{key.replace('/', '_')}.txt").write_text(text, encoding="utf-8")

    def sync(self) -> None:
        """Waits until the rows are on the disk."""
        if self.path.exists():
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                # fsync writes all pages of the file, including writes through other descriptors.
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def cut_later_rows(log_dir: Path, step: int) -> None:
    """Cuts the rows after ``step`` from ``metrics.jsonl``; keeps a copy of the whole file."""
    path = log_dir / METRICS_FILE
    copy = f"{path}.pre_resume_{max(step, 0):06d}"
    # A row without a step has no point in time and is never cut.
    dropped = trim_rows(path, lambda row: row.get("step", 0) <= step, copy)
    if dropped:
        message = "resuming after step %d: %d later rows cut from %s, kept in %s"
        logger.info(message, step, dropped, path, copy)


def _warn_of_lost(fields: list[str], path: Path) -> None:
    if fields:
        logger.warning(
            "%s cannot be rebuilt from %s, which only load_config needs; a function or class at "
            "the top level of a module can",
            ", ".join(fields),
            path,
        )
