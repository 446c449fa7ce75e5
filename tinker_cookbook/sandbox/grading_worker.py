"""Threads that grade programs, each with a warm sandbox."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tinker_cookbook.exceptions import DataValidationError, SandboxError
from tinker_cookbook.sandbox import launch
from tinker_cookbook.sandbox.grading_runs import GraderSettings, JobResult
from tinker_cookbook.sandbox.launch import SandboxLimits, SandboxProcess, SandboxTier
from tinker_cookbook.sandbox.sandbox_interface import (
    SandboxInfrastructureError,
    SandboxUnavailableError,
)

logger = logging.getLogger(__name__)

Job = Callable[[SandboxProcess, GraderSettings], JobResult]
"""Grades a program in a warm sandbox."""


class WorkerPool:
    """Starts worker threads when the first job comes."""

    def __init__(self, settings: GraderSettings) -> None:
        self._settings = settings
        self._jobs: queue.SimpleQueue[tuple[Job, Future[JobResult]] | None] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._closed = False

    @property
    def tier(self) -> SandboxTier:
        """How programs are isolated."""
        return launch.parse_tier(self._settings.tier)

    def submit(self, job: Job) -> Future[JobResult]:
        """Queues a job.

        Raises:
            SandboxInfrastructureError: The pool is closed.
        """
        with self._lock:
            if self._closed:
                raise SandboxInfrastructureError("PythonGrader: it is closed; make a new one")
            if self._process != os.getpid():
                # Threads do not survive a fork, so a child process starts its own workers.
                self._workers, self._process = [], os.getpid()
                self._jobs = queue.SimpleQueue()
            if not self._workers:
                count = self._settings.workers or (os.cpu_count() or 1) + 1
                self._workers = [_Worker(self._settings, self._jobs) for _ in range(count)]
        future: Future[JobResult] = Future()
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        """Ends the workers and their sandboxes."""
        with self._lock:
            self._closed = True
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.stop()
            self._jobs.put(None)
        for worker in workers:
            worker.join(10)
        with contextlib.suppress(queue.Empty):
            while True:
                waiting = self._jobs.get_nowait()
                if waiting is not None and waiting[1].set_running_or_notify_cancel():
                    waiting[1].set_exception(SandboxInfrastructureError("the grader was closed"))


class _Worker(threading.Thread):
    def __init__(self, settings: GraderSettings, jobs: queue.SimpleQueue[Any]) -> None:
        super().__init__(name="sandbox-grader", daemon=True)
        self._settings = settings
        self._jobs = jobs
        self._inside: SandboxProcess | None = None
        self._stopped = False
        self.start()

    def run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            if not future.set_running_or_notify_cancel():
                continue  # the caller was cancelled
            try:
                future.set_result(self._try_job(job))
            except BaseException as error:
                future.set_exception(error)
            del item, job, future  # do not keep them while waiting
        self.stop()

    def stop(self) -> None:
        """Ends the sandbox; the running job fails."""
        self._stopped = True
        if self._inside is not None:
            self._inside.stop()

    def _try_job(self, job: Job) -> JobResult:
        reasons: list[str] = []
        for attempt in range(self._settings.attempts):
            try:
                return job(self._sandbox(), self._settings)
            except (SandboxUnavailableError, DataValidationError):
                raise
            except (SandboxError, OSError, EOFError) as error:
                reasons.append(str(error) or repr(error))
                if self._stopped:
                    break
                logger.warning("a program could not be graded, attempt %d: %s", attempt + 1, error)
                # The next attempt gets a new sandbox.
                if self._inside is not None:
                    self._inside.stop()
                    self._inside = None
        raise SandboxInfrastructureError(
            f"a program could not be graded in {len(reasons)} attempts: {reasons[-1]}"
        )

    def _sandbox(self) -> SandboxProcess:
        if self._inside is None:
            settings = self._settings
            limits = SandboxLimits(
                memory_mb=settings.memory_mb, disk_mb=settings.disk_mb, file_mb=settings.disk_mb
            )
            own = {"preload": settings.preload, "python_path": settings.python_path}
            self._inside = launch.start(
                "zygote",
                limits,
                settings.tier,
                settings=own,
                read_only=settings.python_path,
                writable_root=False,
            )
        return self._inside
