"""Interfaces of loggers and of stores for a run's records."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

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

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Calls it on all loggers."""
        self._call("log_metrics", metrics, step)

    def log_summary(self, metrics: Metrics) -> None:
        """Calls it on all loggers."""
        self._call("log_summary", metrics)

    def log_hparams(self, config: Any) -> None:
        """Calls it on all loggers."""
        self._call("log_hparams", config)

    def log_long_text(self, key: str, text: str) -> None:
        """Calls it on all loggers."""
        self._call("log_long_text", key, text)

    def sync(self) -> None:
        """Calls it on all loggers."""
        self._call("sync")

    def _call(self, method: str, *arguments: Any) -> None:
        for logger in self.loggers:
            getattr(logger, method)(*arguments)

    def close(self) -> None:
        """Closes all, even if one of them fails."""
        with contextlib.ExitStack() as stack:
            # Callbacks run in reverse order: the loggers close first, then ``on_close``.
            if self._on_close is not None:
                stack.callback(self._on_close)
            for logger in reversed(self.loggers):
                stack.callback(logger.close)
        self._on_close = None

    def get_logger_url(self) -> str | None:
        """Returns the first web page that a logger has."""
        urls = (logger.get_logger_url() for logger in self.loggers)
        return next((url for url in urls if url), None)

    @property
    def store(self) -> RunStore | None:
        """The first store that a logger has."""
        stores = (logger.store for logger in self.loggers)
        return next((store for store in stores if store is not None), None)
