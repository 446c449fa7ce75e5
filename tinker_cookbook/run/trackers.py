"""Sends the log of a run to its trackers, from a thread for each, so that none can stop the run."""

# ruff: noqa: D102 (the methods are described in ``Logger``)

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.loggers import Logger, Metrics
from tinker_cookbook.run.remote_loggers import (
    MlflowLogger,
    RemoteLogger,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
    package_of,
)

logger = logging.getLogger(__name__)

TrackerName = Literal["wandb", "trackio", "tensorboard", "mlflow"]

START_SECONDS = 10.0
"""Longest time that the start of a run waits for its trackers; their rows wait after it."""
CLOSE_SECONDS = 30.0
"""Longest time that the end of a run waits for all of its trackers together."""
_RETRY_SECONDS = 60.0
# About 50 MB for rows of 100 metrics.
_MAX_WAITING = 10_000


def start_trackers(
    names: Sequence[str],
    log_dir: str | os.PathLike[str],
    project: str | None = None,
    name: str | None = None,
    config: Any = None,
    resume_step: int | None = None,
) -> Trackers:
    """Starts trackers of a run, or continues those that the run's folder had.

    Args:
        names: Values of ``TrackerName``.
        log_dir: The run's folder.
        project: Project of the run in each tracker.
        name: Name of the run in each tracker.
        config: The run's configuration.
        resume_step: The last step that is kept, as in :func:`~run.ml_log.start_logging`.

    Raises:
        ConfigurationError: A name is unknown, its package is not installed, or it has no account.
    """
    connect: dict[str, Callable[..., Logger]] = {
        "wandb": partial(WandbLogger, project, None, log_dir, name),
        "trackio": partial(TrackioLogger, project, config, log_dir, name),
        "tensorboard": partial(TensorBoardLogger, log_dir),
        "mlflow": partial(MlflowLogger, project, None, log_dir, name),
    }
    for one in names:
        if one not in connect:
            known = ", ".join(get_args(TrackerName))
            raise ConfigurationError(f"trackers: got {one!r}, expected some of {known}")
        # Here and not in the threads, which could import each other's packages half.
        package_of(one)
    found = {one: partial(connect[one], resume_step=resume_step) for one in names}
    return Trackers(found, resume_step)


class Trackers(Logger):
    """Passes each call to trackers in threads of their own; no call fails or waits.

    The start waits at most ``START_SECONDS`` for their connections, and ``close`` at most
    ``CLOSE_SECONDS`` for what they have not sent. A tracker that cannot be reached is tried again
    every minute; until then its calls wait. A call that fails is left out. The log tells both once.

    Args:
        connect: Makes the logger of each tracker; called in the tracker's thread.
        resume_step: The last step of the run so far.

    Raises:
        ConfigurationError: ``connect`` raised it in time.
    """

    def __init__(
        self, connect: Mapping[str, Callable[[], Logger]], resume_step: int | None = None
    ) -> None:
        begins = -1 if resume_step is None else resume_step
        self.workers = [_Worker(name, make, begins) for name, make in connect.items()]
        self._closed = False
        deadline = time.monotonic() + START_SECONDS
        for worker in self.workers:
            if not worker.tried.wait(max(0.0, deadline - time.monotonic())):
                message = "%s has not answered in %g seconds; the run goes on, and its rows wait"
                logger.warning(message, worker.name, START_SECONDS)
        for worker in self.workers:
            if worker.refusal is not None:
                self.close()
                raise worker.refusal

    def _put(self, method: str, *arguments: Any) -> None:
        for worker in self.workers:
            worker.put(method, *arguments)

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        self._put("log_metrics", dict(metrics), step)

    def log_summary(self, metrics: Metrics) -> None:
        self._put("log_summary", dict(metrics))

    def log_hparams(self, config: Any) -> None:
        self._put("log_hparams", config)

    def log_long_text(self, key: str, text: str) -> None:
        self._put("log_long_text", key, text)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for worker in self.workers:
            worker.end()
        deadline = time.monotonic() + CLOSE_SECONDS
        for worker in self.workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    def get_logger_url(self) -> str | None:
        loggers = [worker.tracker for worker in self.workers if worker.tracker is not None]
        return next((url for one in loggers if (url := one.get_logger_url())), None)


class _Worker:
    """One tracker, its thread and the calls that wait for it."""

    def __init__(self, name: str, connect: Callable[[], Logger], begins: int) -> None:
        self.name, self._connect, self._begins = name, connect, begins
        self.tracker: Logger | None = None
        self.refusal: ConfigurationError | None = None
        self.tried = threading.Event()
        """Set after the first attempt to connect."""
        self._ending = threading.Event()
        self._calls: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._lost = 0
        self._warned = False
        # The thread may hang in the tracker's package, which must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, method: str, *arguments: Any) -> None:
        if self._calls.qsize() < _MAX_WAITING:
            self._calls.put((method, *arguments))
        else:
            self._lost += 1

    def end(self) -> None:
        self._ending.set()
        self._calls.put(None)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        left = self._lost + (self._calls.qsize() if self._thread.is_alive() else 0)
        if (left or self._thread.is_alive()) and self.refusal is None:
            logger.warning(
                "%s did not take %s; the same command sends the rows later",
                self.name,
                f"{left} rows or texts" if left else f"everything within {CLOSE_SECONDS:g} seconds",
            )

    def _work(self) -> None:
        while self.tracker is None and self.refusal is None:
            try:
                self.tracker = self._connect()
            except ConfigurationError as error:
                self.refusal = error
                if self.tried.is_set():
                    # Too late to stop the run.
                    logger.warning("%s", error)
            # Some packages call sys.exit, which would end this thread without a message.
            except (Exception, SystemExit) as error:
                self._warn(error, f"it is tried again every {_RETRY_SECONDS:g} seconds")
                self.tried.set()
                if self._ending.wait(_RETRY_SECONDS):
                    break
            self.tried.set()
        if self.tracker is not None and (url := self.tracker.get_logger_url()):
            logger.info("metrics are at %s", url)
        remote = isinstance(self.tracker, RemoteLogger)
        if remote:
            self._do("catch_up")
        # What follows the kept step is logged again when the run is resumed. Trackio writes twice a
        # second, so a step is kept a second later; a step after a loss is not kept.
        before = last = self._begins
        kept = time.monotonic()
        while (call := self._calls.get()) is not None:
            self._do(*call)
            if call[0] == "log_metrics" and call[2] is not None:
                last, now = call[2], time.monotonic()
                if remote and now - kept > 1 and not self._lost:
                    self._do("keep", before)
                    before, kept = last, now
        if self.tracker is not None:
            self._do("close")
            if remote and not self._lost:
                self._do("keep", last)

    def _do(self, method: str, *arguments: Any) -> None:
        try:
            if self.tracker is None:
                self._lost += 1
            else:
                getattr(self.tracker, method)(*arguments)
        except (Exception, SystemExit) as error:
            self._lost += 1
            self._warn(error, "what it does not take is left out")

    def _warn(self, error: BaseException, then: str) -> None:
        if not self._warned:
            self._warned = True
            what = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
            logger.warning("%s fails: %s; the run goes on, and %s", self.name, what, then)
