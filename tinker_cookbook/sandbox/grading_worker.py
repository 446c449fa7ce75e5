"""Threads that grade programs, each with a warm sandbox."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError, SandboxError
from tinker_cookbook.sandbox import launch
from tinker_cookbook.sandbox.inside import channel
from tinker_cookbook.sandbox.inside.remote import WALL_FACTOR
from tinker_cookbook.sandbox.launch import SandboxLimits, SandboxProcess, SandboxTier
from tinker_cookbook.sandbox.sandbox_interface import (
    SandboxInfrastructureError,
    SandboxUnavailableError,
)

logger = logging.getLogger(__name__)

# Time that the host gives a process beyond its own limit to report its end.
_GRACE_SECONDS = 10.0
_STDERR_BYTES = 10_000


@dataclass(frozen=True)
class GraderSettings:
    """Limits of graded programs, and how many run at once."""

    workers: int = 0
    """Programs graded at once; 0 takes one more than there are processors."""
    tier: SandboxTier | str | None = None
    """None takes the strongest that works here."""
    test_seconds: float = 6.0
    """CPU time of one call into the program, and of one run with a text as input. On the clock it
    may take three times as long, so that a busy machine fails no program."""
    total_seconds: float = 60.0
    """Time on the clock of all tests of a program that call its functions."""
    memory_mb: int = 512
    """Address space of a program."""
    disk_mb: int = 16
    """Files in its /tmp (tier ``bubblewrap``; with ``landlock`` it can write no file)."""
    threads: int = 64
    """Threads of a program. It cannot start processes."""
    output_bytes: int = 4 << 20
    """What a program may print; one that prints more has failed."""
    attempts: int = 3
    """How often a program is tried before an infrastructure failure is raised."""
    preload: tuple[str, ...] = ()
    """Further modules that are imported before programs fork, such as ``numpy``."""
    python_path: tuple[str, ...] = ()
    """Host folders of further packages. Programs can read all of each folder."""

    def __post_init__(self) -> None:
        for name in ("test_seconds", "total_seconds", "memory_mb", "disk_mb", "threads"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name}: {getattr(self, name)!r} is not positive")
        if self.tier is not None:
            launch.parse_tier(self.tier)
        if self.attempts < 1 or self.workers < 0:
            raise ConfigurationError("attempts must be at least 1, workers at least 0")
        for path in self.python_path:
            if not os.path.isabs(path) or not os.path.isdir(path):
                raise ConfigurationError(f"python_path: {path!r} is no absolute path of a folder")


@dataclass(frozen=True)
class ProgramRun:
    """How a program ran."""

    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0
    timed_out: bool = False
    truncated: bool = False
    """Whether it printed more than the limit, which ended it."""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    memory_bytes: int = 0


@dataclass(frozen=True)
class JobResult:
    """Per test (why it failed, seconds), an empty text if it passed."""

    tests: list[tuple[str, float]]
    run: ProgramRun
    program_error: str = ""


@dataclass(frozen=True)
class CallsJob:
    """Tests in a second process that call the program's functions."""

    program: str
    tests: list[dict[str, Any]]
    setup: str
    entry_points: list[str] | None


@dataclass(frozen=True)
class StdioJob:
    """Runs the program once; ``same`` compares its output with ``expected``."""

    program: str
    stdin: str
    expected: str = ""
    same: Callable[[str, str], bool] | None = None


Job = CallsJob | StdioJob


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
        tier = self._settings.tier
        return launch.available_tier() if tier is None else launch.parse_tier(tier)

    def submit(self, job: Job) -> Future[JobResult]:
        """Queues a job.

        Raises:
            SandboxInfrastructureError: The pool is closed.
        """
        with self._lock:
            if self._closed:
                raise SandboxInfrastructureError("PythonGrader: it is closed; make a new one")
            if self._process != os.getpid():
                # Threads do not survive a fork: a child makes workers of its own.
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
                continue  # whoever wanted it was cancelled
            try:
                future.set_result(self._try_job(job))
            except BaseException as error:
                future.set_exception(error)
            del item, job, future  # do not keep them while waiting
        self.stop()

    def stop(self) -> None:
        """Ends the sandbox; a job that runs fails."""
        self._stopped = True
        if self._inside is not None:
            self._inside.stop()

    def _try_job(self, job: Job) -> JobResult:
        reasons: list[str] = []
        for attempt in range(self._settings.attempts):
            try:
                inside = self._sandbox()
                if isinstance(job, CallsJob):
                    return _CallsRun(inside, self._settings, job).result()
                return _run_stdio(inside, self._settings, job)
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


class _Process:
    """A process that a zygote forks, seen from the host: it gets a job and reports its end."""

    def __init__(
        self,
        inside: SandboxProcess,
        settings: GraderSettings,
        role: str,
        seconds: float,
        cpu_seconds: float,
        descriptors: list[int],
        job: dict[str, Any],
    ) -> None:
        self.status, theirs = os.pipe()
        ours, job_socket = socket.socketpair()
        request = {
            "role": role,
            "seconds": seconds,
            "disk": settings.disk_mb << 20,
            "limits": {
                "memory": settings.memory_mb << 20,
                "file_size": settings.disk_mb << 20,
                "cpu_seconds": int(cpu_seconds) + 1,
                "processes": settings.threads,
            },
        }
        self.report: dict[str, Any] | None = None
        with ours:
            inside.send(request, [theirs, job_socket.detach(), *descriptors])
            ours.settimeout(_GRACE_SECONDS)
            try:
                channel.send(ours, job)
            except OSError:
                self.wait(_GRACE_SECONDS)  # raises what went wrong in the process
                raise

    def wait(self, seconds: float) -> dict[str, Any]:
        """Returns how the process ended.

        Raises:
            SandboxInfrastructureError: It could not be started, or its sandbox died.
        """
        report = self.report
        if report is None:
            line = _read_pipe(self.status, time.monotonic() + seconds)
            if not line:
                raise SandboxInfrastructureError("a sandboxed process ended without a report")
            report = self.report = json.loads(line.split(b"\n")[0])
        if "error" in report:
            raise SandboxInfrastructureError(f"sandboxed process: {report['error']}")
        return report

    def close(self) -> None:
        """Kills the process if it still runs: its supervisor watches the status pipe."""
        os.close(self.status)


def _read_pipe(descriptor: int, deadline: float) -> bytes:
    """Reads a pipe to its end, or until the deadline."""
    kept = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0 and selector.select(left):
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                break
            kept += piece
    return kept


def _program_run(report: dict[str, Any], **fields: Any) -> ProgramRun:
    names = ("exit_code", "timed_out", "seconds", "cpu_seconds", "memory_bytes")
    return ProgramRun(**{name: report[name] for name in names}, **fields)


def _run_stdio(inside: SandboxProcess, settings: GraderSettings, job: StdioJob) -> JobResult:
    seconds = WALL_FACTOR * settings.test_seconds
    stdout, stdout_theirs = os.pipe()
    stderr, stderr_theirs = os.pipe()
    process = None
    try:
        process = _Process(
            inside,
            settings,
            "stdio",
            seconds,
            settings.test_seconds,
            [stdout_theirs, stderr_theirs],
            {"code": job.program, "stdin": job.stdin},
        )
        deadline = time.monotonic() + seconds + _GRACE_SECONDS
        printed, errors, truncated = _read_outputs(stdout, stderr, settings.output_bytes, deadline)
        if truncated:
            run = ProgramRun(printed, errors, exit_code=1, truncated=True)
            message = f"it printed more than {settings.output_bytes} bytes"
        else:
            run = _program_run(process.wait(_GRACE_SECONDS), stdout=printed, stderr=errors)
            message = _stdio_problem(run, job, settings.test_seconds)
    finally:
        if process is not None:
            process.close()
        os.close(stdout)
        os.close(stderr)
    error = message if run.exit_code or truncated else ""
    return JobResult([(message, run.seconds)], run, error)


def _stdio_problem(run: ProgramRun, job: StdioJob, seconds: float) -> str:
    if run.timed_out or run.cpu_seconds >= seconds:
        return f"it ran longer than {seconds:g} s"
    if run.exit_code:
        last = run.stderr.strip().rpartition("\n")[2][:500]
        return last or f"it ended with status {run.exit_code}"
    if job.same is not None and not job.same(run.stdout, job.expected):
        return "wrong output"
    return ""


def _read_outputs(stdout: int, stderr: int, limit: int, deadline: float) -> tuple[str, str, bool]:
    """Reads both pipes to their ends, or until stdout exceeds the limit."""
    kept = {stdout: bytearray(), stderr: bytearray()}
    with selectors.DefaultSelector() as selector:
        for descriptor in kept:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                piece = os.read(key.fd, 1 << 16)
                if not piece:
                    selector.unregister(key.fd)
                elif key.fd == stdout or len(kept[stderr]) < _STDERR_BYTES:
                    kept[key.fd] += piece
            if len(kept[stdout]) > limit:
                break
    texts = [kept[stdout][:limit], kept[stderr][-_STDERR_BYTES:]]
    printed, errors = (text.decode(errors="replace") for text in texts)
    return printed, errors, len(kept[stdout]) > limit


class _CallsRun:
    """A program and its tests, each in a process; the host collects what the tests report."""

    def __init__(self, inside: SandboxProcess, settings: GraderSettings, job: CallsJob) -> None:
        self._settings = settings
        self._job = job
        # Exists here and in the process of the tests. A report without it is no report.
        self._token = secrets.token_hex(16)
        self._reports: dict[int, tuple[str, float]] = {}
        self._lost = ""
        self._done = False
        seconds = settings.total_seconds
        program_peer, tests_peer = socket.socketpair()
        self._host, tests_host = socket.socketpair()
        self._tests: _Process | None = None
        timing = {"call_seconds": settings.test_seconds}
        self._program = _Process(
            inside,
            settings,
            "calls",
            seconds,
            seconds,
            [program_peer.detach()],
            {"code": job.program, **timing},
        )
        try:
            self._tests = _Process(
                inside,
                settings,
                "tests",
                seconds,
                seconds,
                [tests_peer.detach(), tests_host.detach()],
                {
                    "tests": job.tests,
                    "setup": job.setup,
                    "entry_points": job.entry_points,
                    "token": self._token,
                    **timing,
                },
            )
        except BaseException:
            self._close()
            raise

    def result(self) -> JobResult:
        """Waits for the tests.

        Raises:
            SandboxInfrastructureError: One of the processes did not run as it should.
            DataValidationError: ``setup`` fails by itself.
        """
        assert self._tests is not None
        try:
            self._collect()
            late = False
            if not self._done:
                # The tests say so when they are done; otherwise their supervisor ended them.
                report = self._tests.wait(_GRACE_SECONDS)
                late = report["timed_out"]
                if not late:
                    raise SandboxInfrastructureError(
                        f"the process of the tests ended with status {report['exit_code']}"
                    )
            if self._lost:
                # Not the program's fault if its process was never started.
                self._program.wait(_GRACE_SECONDS)
            return self._make_result(late)
        finally:
            self._close()

    def _collect(self) -> None:
        self._host.settimeout(self._settings.total_seconds + _GRACE_SECONDS)
        while not self._done:
            try:
                report, _ = channel.receive(self._host)
            except (EOFError, OSError):
                return
            if not secrets.compare_digest(str(report.get("token")), self._token):
                raise SandboxInfrastructureError("a report without the token of its job")
            if "setup_error" in report:
                raise DataValidationError(f"setup: it fails: {report['setup_error']}")
            self._done = bool(report.get("done"))
            if self._done:
                self._lost = report["lost"]
            else:
                self._reports[report["index"]] = (report["message"], report["seconds"])

    def _make_result(self, late: bool) -> JobResult:
        limit = f"all tests together ran longer than {self._settings.total_seconds:g} s"
        tests = [self._reports.get(i, (limit, 0.0)) for i in range(len(self._job.tests))]
        run = ProgramRun(timed_out=late)
        if self._program.report is not None:
            run = _program_run(self._program.report)
        seconds = sum(seconds for _, seconds in tests)
        error = self._lost or (limit if late else "")
        return JobResult(tests, run if run.seconds else ProgramRun(seconds=seconds), error)

    def _close(self) -> None:
        self._host.close()
        for process in (self._program, self._tests):
            if process is not None:
                process.close()
