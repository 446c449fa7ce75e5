"""What every destination of metrics can do."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Metrics: TypeAlias = Mapping[str, float | int | str]


class Logger(ABC):
    """A destination of metrics. Only ``log_metrics`` must be implemented."""

    store: Any = None
    """A ``TrainingRunStore`` of user code that the logger writes to, if there is one."""

    @abstractmethod
    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Takes the metrics of one step, all at once.

        Args:
            metrics: Name to value.
            step: Optimizer updates done; 0 is before training.
        """

    def log_summary(self, metrics: Metrics) -> None:
        """Takes totals that belong to no step; by default a row without a step."""
        self.log_metrics(metrics)

    def log_hparams(self, config: Any) -> None:
        """Takes the run's configuration: a chz object or a dict."""

    def log_long_text(self, key: str, text: str) -> None:
        """Takes a text that is too long for a metric."""

    def sync(self) -> None:
        """Makes sure that what was logged is where it belongs."""

    def close(self) -> None:
        """Ends the log; safe to call twice."""

    def get_logger_url(self) -> str | None:
        """A web page of this run, where there is one."""
        return None


class MultiplexLogger(Logger):
    """Passes everything on to several loggers, in their order.

    Args:
        loggers: The destinations. The first one to fail stops the call, so put the file first.
        on_close: Called after all were closed.
    """

    def __init__(
        self, loggers: Sequence[Logger], on_close: Callable[[], None] | None = None
    ) -> None:
        self.loggers = list(loggers)
        self._on_close = on_close

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Passes on."""
        for logger in self.loggers:
            logger.log_metrics(metrics, step)

    def log_summary(self, metrics: Metrics) -> None:
        """Passes on."""
        for logger in self.loggers:
            logger.log_summary(metrics)

    def log_hparams(self, config: Any) -> None:
        """Passes on."""
        for logger in self.loggers:
            logger.log_hparams(config)

    def log_long_text(self, key: str, text: str) -> None:
        """Passes on."""
        for logger in self.loggers:
            logger.log_long_text(key, text)

    def sync(self) -> None:
        """Passes on."""
        for logger in self.loggers:
            logger.sync()

    def close(self) -> None:
        """Closes all, also where one of them fails."""
        with contextlib.ExitStack() as stack:
            if self._on_close is not None:
                stack.callback(self._on_close)
            for logger in reversed(self.loggers):
                stack.callback(logger.close)
        self._on_close = None

    def get_logger_url(self) -> str | None:
        """The first web page that a logger has."""
        urls = (logger.get_logger_url() for logger in self.loggers)
        return next((url for url in urls if url), None)
