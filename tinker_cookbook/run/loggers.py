"""Destinations of a run's metrics and configuration: its folder, and the terminal."""

# ruff: noqa: D102 (the methods of a logger are described in ``Logger``)

from __future__ import annotations

import contextlib
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from rich.console import Console
from rich.table import Table

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.run import replaced_run
from tinker_cookbook.run.code_state import code_state
from tinker_cookbook.run.config import dump_config, lost_fields, write_config
from tinker_cookbook.run.jsonl import append_row, trim_rows
from tinker_cookbook.run.paths import CONFIG_FILE, CONFIG_HISTORY_FILE, METRICS_FILE
from tinker_cookbook.utils.terminal import get_console

logger = logging.getLogger(__name__)

Metrics: TypeAlias = Mapping[str, float | int | str]


class RunStore(Protocol):
    """Keeps the records of one run: in files elsewhere, in a database, in a cloud."""

    def write_config(self, config: dict[str, Any]) -> None:
        """Keeps the run's configuration and drops the previous one."""
        ...

    def write_code_diff(self, diff: str) -> None:
        """Keeps the changes of the code and drops the previous ones."""
        ...

    def write_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Adds one row of metrics."""
        ...

    def truncate_metrics(self, from_step: int) -> int:
        """Drops the rows from this step on and returns their number."""
        ...

    def write_timing_spans(self, step: int, spans: list[dict[str, Any]]) -> None:
        """Adds the spans of one step."""
        ...


class Logger(ABC):
    """A destination of metrics. Only ``log_metrics`` must be implemented."""

    @abstractmethod
    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Logs the metrics of one step, all at once.

        Args:
            metrics: Name to value.
            step: Optimizer updates done; 0 is before training.
        """

    def enable_event_steps(self) -> None:
        """Prepares for ``log_metrics_event``; rows need nothing."""

    def log_metrics_event(
        self,
        metrics: Metrics,
        step: int,
        step_metric: str,
        metric_axes: dict[str, str] | None = None,
    ) -> None:
        """Logs values of concurrent producers, possibly of an earlier step.

        Args:
            metrics: Name to value.
            step: Step of the values.
            step_metric: Name under which the row has this step, too.
            metric_axes: Axes of plots by metric, for loggers that plot.
        """
        self.log_metrics({**metrics, step_metric: step}, step=step)

    def log_summary(self, metrics: Metrics) -> None:
        """Logs totals that belong to no step; by default a row without a step."""
        self.log_metrics(metrics)

    def log_hparams(self, config: Any) -> None:
        """Logs the run's configuration: a chz object or a dict."""

    def log_long_text(self, key: str, text: str) -> None:
        """Logs a text that is too long for a metric."""

    def sync(self) -> None:
        """Waits until everything logged so far is stored."""

    def close(self) -> None:
        """Ends the log; safe to call twice."""

    def get_logger_url(self) -> str | None:
        """Returns the web page of this run, if there is one."""
        return None

    @property
    def store(self) -> RunStore | None:
        """The store of the run's records; None if they are files in the log folder."""
        return None


class MultiplexLogger(Logger):
    """Passes every call to several loggers, in their order.

    Args:
        loggers: The destinations. The first one that fails stops the call, so put the file first.
        on_close: Called after all were closed.
    """

    def __init__(
        self, loggers: Sequence[Logger], on_close: Callable[[], None] | None = None
    ) -> None:
        self.loggers = list(loggers)
        self._on_close = on_close

    def _call(self, method: str, *arguments: Any) -> None:
        for logger in self.loggers:
            getattr(logger, method)(*arguments)

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        self._call("log_metrics", metrics, step)

    def log_summary(self, metrics: Metrics) -> None:
        self._call("log_summary", metrics)

    def log_hparams(self, config: Any) -> None:
        self._call("log_hparams", config)

    def log_long_text(self, key: str, text: str) -> None:
        self._call("log_long_text", key, text)

    def sync(self) -> None:
        self._call("sync")

    def close(self) -> None:
        # All are closed, even if one of them fails.
        with contextlib.ExitStack() as stack:
            # Callbacks run in reverse order: the loggers close first, then ``on_close``.
            if self._on_close is not None:
                stack.callback(self._on_close)
            for logger in reversed(self.loggers):
                stack.callback(logger.close)
        self._on_close = None

    def get_logger_url(self) -> str | None:
        urls = (logger.get_logger_url() for logger in self.loggers)
        return next((url for url in urls if url), None)

    @property
    def store(self) -> RunStore | None:
        stores = (logger.store for logger in self.loggers)
        return next((store for store in stores if store is not None), None)


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
        self._store, self._resume_step = store, resume_step
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
        """Writes ``config.json``; different older ones are kept in ``config.history.jsonl``."""
        path = self.log_dir / CONFIG_FILE
        if self._store is not None:
            data = dump_config(config)
            self._store.write_config(data)
            self._store.write_code_diff(code_state())
            _warn_of_lost(lost_fields(data), path)
            return
        try:
            before = path.read_bytes() if path.exists() else None
            lost = write_config(path, config)
            self._keep_history(before, path.read_bytes())
        except OSError as error:
            raise ConfigurationError(
                f"{path} cannot be written: {error.strerror or error}; choose another log_path=…"
            ) from error
        _warn_of_lost(lost, path)

    def _keep_history(self, before: bytes | None, now: bytes) -> None:
        # The rows so far have the settings of an earlier start. A step has those of the last line
        # that begins before it, also if a run was resumed from ever earlier steps.
        path = self.log_dir / CONFIG_HISTORY_FILE
        if before is None or (before == now and not path.exists()):
            return
        if not path.exists():
            with contextlib.suppress(ValueError):  # a damaged file
                append_row(path, {"after": -1, "config": json.loads(before)})
        append_row(path, {"after": self._resume_step or 0, "config": json.loads(now)})
        if before != now:
            logger.warning("the configuration changed; those before are kept in %s", path)

    def log_long_text(self, key: str, text: str) -> None:
        """Writes the text to a file named after the key."""
        (self.log_dir / f"{key.replace('/', '_')}.txt").write_text(text, encoding="utf-8")

    def sync(self) -> None:
        """Waits until the rows are on the disk."""
        if self.path.exists():
            # fsync writes all pages of the file, including writes through other descriptors.
            with open(self.path, "rb") as file:
                os.fsync(file.fileno())


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


class PrettyPrintLogger(Logger):
    """Prints a table for each step on a terminal, and one line for each step into a file.

    Args:
        console: Where to print; by default the shared one on standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or get_console()

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        if not metrics:
            return
        # Metrics without a group come first.
        ordered = sorted(metrics.items(), key=lambda item: ("/" in item[0], item[0]))
        if self._console.is_terminal:
            table = Table(title=None if step is None else f"step {step}", title_justify="left")
            table.add_column("metric", no_wrap=True)
            table.add_column("value", justify="right", overflow="fold")
            for name, value in ordered:
                table.add_row(name, format_value(value))
            self._console.print(table)
        else:
            head = "" if step is None else f"step {step}  "
            line = head + "  ".join(f"{name}={format_value(value)}" for name, value in ordered)
            # soft_wrap keeps a step on one line, whatever the width of the console is.
            self._console.print(line, markup=False, soft_wrap=True)


def format_value(value: object) -> str:
    """Formats a number: four significant digits, or thousands separators for whole numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        item = getattr(value, "item", None)  # numpy and torch scalars
        return format_value(item()) if callable(item) else str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:#.4g}"
