"""The runs as processes: as many at a time as may be, each watched until it ends."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tinker_cookbook.sweep.grid import Run
from tinker_cookbook.sweep.parent_death import tied_to_parent
from tinker_cookbook.sweep.records import METRICS, Record, RecordFolder
from tinker_cookbook.sweep.serving import Server
from tinker_cookbook.sweep.watch import Watch
from tinker_cookbook.utils.run_folder.lock import lock_holder

State = Literal["waiting", "running", "resumed", "done", "failed"]

_POLL_SECONDS = 0.3
_LOCK_SECONDS = 30.0  # for a killed sweep's runs to be gone
_INTERRUPT_SECONDS = 30.0


@dataclass
class Job:
    """A run and its process.

    Attributes:
        run: The point of the grid.
        log_path: Folder of the run.
        record: What is kept of it between sweeps.
        watch: How far it is.
        state: ``resumed`` runs too, and has begun in an earlier sweep.
        log: Where its output goes.
        log_start: Where in that file its last attempt's begins.
        process: While it runs.
    """

    run: Run
    log_path: Path
    record: Record
    watch: Watch
    log: Path
    state: State = "waiting"
    log_start: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def seconds(self) -> float:
        """Of all its attempts, the one in hand included."""
        started = self.record.started
        return self.record.seconds + (time.time() - started if started is not None else 0.0)


class Jobs:
    """All runs of a sweep.

    Args:
        recipe: Module of the recipe.
        jobs: The runs, in the order in which they begin; finished ones are passed over.
        at_once: How many run at a time.
        server: Where they train.
        records: What is kept of each.
    """

    def __init__(
        self, recipe: str, jobs: Sequence[Job], at_once: int, server: Server, records: RecordFolder
    ) -> None:
        self.jobs = list(jobs)
        self._recipe, self._at_once, self._server = recipe, at_once, server
        self._records = records
        self._begun = time.monotonic()

    def work(self, on_change: Callable[[Job], None], on_look: Callable[[], None]) -> None:
        """Runs all to their ends.

        Args:
            on_change: Called with a run that has begun or ended.
            on_look: Called a few times a second, after the files were looked at.

        Raises:
            BackendError: The server has ended.
            KeyboardInterrupt: The user wants to stop; the runs go on until ``stop``.
        """
        while True:
            running = [job for job in self.jobs if job.process is not None]
            for job in running:
                self._look(job, on_change)
            self._begin_next(on_change)
            if all(job.state in ("done", "failed") for job in self.jobs):
                return
            self._server.check_alive()
            on_look()
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Interrupts what runs, as Ctrl-C would, and waits; who does not listen is killed."""
        running = [job for job in self.jobs if job.process is not None]
        for job in running:
            _signal(job, signal.SIGINT)
        until = time.monotonic() + _INTERRUPT_SECONDS
        try:
            for job in running:
                assert job.process is not None
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.process.wait(max(0.0, until - time.monotonic()))
        finally:  # a second Ctrl-C ends the waiting
            for job in running:
                self._end(job, _reap(job))

    def _begin_next(self, on_change: Callable[[Job], None]) -> None:
        free = self._at_once - sum(job.process is not None for job in self.jobs)
        patient = time.monotonic() - self._begun < _LOCK_SECONDS
        for job in self.jobs:
            if free <= 0:
                return
            if job.state != "waiting" or (patient and lock_holder(job.log_path) is not None):
                continue
            self._begin(job)
            on_change(job)
            free -= 1

    def _begin(self, job: Job) -> None:
        words = [f"{key}={value}" for key, value in job.run.settings.items()]
        words += [
            f"log_path={job.log_path}",
            f"backend={self._server.url}",
            "behavior_if_log_dir_exists=resume",
        ]
        job.state = "resumed" if (job.log_path / METRICS).exists() else "running"
        job.record.begin()
        self._records.write(job.run, job.record)
        with job.log.open("ab") as log:
            job.log_start = log.tell()
            job.process = subprocess.Popen(
                tied_to_parent([sys.executable, "-m", self._recipe, *words], signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._server.environment(),
                start_new_session=True,  # a Ctrl-C on the terminal is the sweep's alone
            )

    def _look(self, job: Job, on_change: Callable[[Job], None]) -> None:
        assert job.process is not None
        status = job.process.poll()
        job.watch.look()
        if status is not None:
            self._end(job, status)
            on_change(job)

    def _end(self, job: Job, status: int) -> None:
        job.state = "done" if status == 0 else "failed"
        job.process = None
        job.record.end(done=status == 0)
        self._records.write(job.run, job.record)


def _signal(job: Job, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        assert job.process is not None
        job.process.send_signal(number)


def _reap(job: Job) -> int:
    assert job.process is not None
    if job.process.poll() is None:
        job.process.kill()
    return job.process.wait()
