"""Runs one program in a warm sandbox: its processes, their jobs and their reports."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import socket
import time
from typing import Any

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.sandbox.grading_types import (
    CallsJob,
    GraderSettings,
    JobResult,
    ProgramRun,
    StdioJob,
)
from tinker_cookbook.sandbox.inside import channel
from tinker_cookbook.sandbox.inside.budget import MOST_WALL_FACTOR, WALL_FACTOR
from tinker_cookbook.sandbox.launch import SandboxProcess
from tinker_cookbook.sandbox.sandbox_interface import SandboxInfrastructureError

__all__ = ["CallsRun", "run_program", "run_stdio"]

# Time that the host gives a process beyond its own limit to report its end.
_GRACE_SECONDS = 10.0
_STDERR_BYTES = 10_000
# Share of the limit of CPU time after which a killed process counts as killed by that limit.
_KILLED_SHARE = 0.5
NOT_RUN = "not run: an earlier test failed"


class GradedProcess:
    """The host's side of a process that a zygote forked: sends its job and reads its report."""

    def __init__(
        self,
        inside: SandboxProcess,
        settings: GraderSettings,
        role: str,
        cpu_seconds: float,
        descriptors: list[int],
        job: dict[str, Any],
    ) -> None:
        self.status, theirs = os.pipe()
        ours, job_socket = socket.socketpair()
        request = {
            "role": role,
            "seconds": WALL_FACTOR * cpu_seconds,
            "most_seconds": MOST_WALL_FACTOR * cpu_seconds,
            "disk": settings.disk_mb << 20,
            "limits": {
                "memory": settings.memory_mb << 20,
                "file_size": settings.disk_mb << 20,
                "cpu_seconds": int(cpu_seconds) + 1,
                "processes": settings.threads + 1,  # the main thread
                # Of the main thread: calls of C functions, such as those of functools.cache.
                "stack": 64 << 20,
            },
        }
        self.report: dict[str, Any] | None = None
        with ours:
            inside.send(request, [theirs, job_socket.detach(), *descriptors])
            ours.settimeout(_GRACE_SECONDS)
            try:
                channel.send(ours, job)
            except OSError:
                self.wait(_GRACE_SECONDS)  # raises the error of the process
                raise

    def wait(self, seconds: float) -> dict[str, Any]:
        """Waits for the end of the process and returns its report.

        Raises:
            SandboxInfrastructureError: The process could not be started, or its sandbox died.
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


def _program_run(report: dict[str, Any], settings: GraderSettings, **fields: Any) -> ProgramRun:
    names = ("exit_code", "seconds", "cpu_seconds", "memory_bytes")
    # The kernel enforces the limit on CPU time, the supervisor the limit on wall-clock time.
    late = report["timed_out"] or report["cpu_seconds"] >= settings.test_seconds
    return ProgramRun(timed_out=late, **{name: report[name] for name in names}, **fields)


def run_stdio(inside: SandboxProcess, settings: GraderSettings, job: StdioJob) -> JobResult:
    """Runs the cases one after the other, until their total time limit is reached."""
    tests: list[tuple[str, float]] = []
    run, error, skip, used = ProgramRun(), "", "", 0.0
    for stdin, expected in job.cases:
        if skip:
            tests.append((skip, 0.0))
            continue
        # A right output is as long as the expected one, up to white space.
        most = max(settings.output_bytes, 2 * len(expected.encode(errors="replace")))
        run = run_program(inside, settings, job.program, stdin, most)
        message = _stdio_problem(run, settings)
        error = error or message
        if not message:
            message = _difference(job, run.stdout, expected)
        tests.append((message, run.seconds))
        if message and job.stop_at_failure:
            skip = NOT_RUN
        used += max(run.cpu_seconds, run.seconds / WALL_FACTOR)
        if used > job.total_seconds:
            skip = skip or _total_limit(job.total_seconds)
    return JobResult(tests, run, error)


def _difference(job: StdioJob, printed: str, expected: str) -> str:
    """Returns why an output is wrong; empty if it is right."""
    try:
        return "" if job.same(printed, expected) else "wrong output"
    except Exception as error:
        # The program chose the output, so it is the program that fails.
        return f"its output cannot be compared: {type(error).__name__}"


def run_program(
    inside: SandboxProcess,
    settings: GraderSettings,
    program: str,
    stdin: str,
    output_bytes: int,
) -> ProgramRun:
    """Runs the whole program with a text as its input."""
    stdout, stdout_theirs = os.pipe()
    stderr, stderr_theirs = os.pipe()
    process = None
    try:
        process = GradedProcess(
            inside,
            settings,
            "stdio",
            settings.test_seconds,
            [stdout_theirs, stderr_theirs],
            {"code": program, "stdin": stdin},
        )
        seconds = MOST_WALL_FACTOR * settings.test_seconds + _GRACE_SECONDS
        deadline = time.monotonic() + seconds
        printed, errors, truncated = _read_outputs(stdout, stderr, output_bytes, deadline)
        if truncated:
            return ProgramRun(printed, errors, exit_code=1, truncated=True)
        report = process.wait(_GRACE_SECONDS)
        return _program_run(report, settings, stdout=printed, stderr=errors)
    finally:
        if process is not None:
            process.close()
        os.close(stdout)
        os.close(stderr)


def _total_limit(seconds: float) -> str:
    return f"all tests together ran longer than {seconds:g} s"


def _stdio_problem(run: ProgramRun, settings: GraderSettings) -> str:
    """Returns why the output of a run does not count; empty if it does."""
    if run.truncated:
        return "it printed too much"  # the limit depends on the expected output
    if run.timed_out:
        return f"it ran longer than {settings.test_seconds:g} s"
    if run.exit_code:
        last = run.stderr.strip().rpartition("\n")[2][:500]
        return last or f"it ended with status {run.exit_code}"
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


class CallsRun:
    """A program and its tests, each in a process; the host collects what the tests report."""

    def __init__(self, inside: SandboxProcess, settings: GraderSettings, job: CallsJob) -> None:
        self._settings = settings
        self._job = job
        # Known to the host and to the process of the tests only. A report without it is rejected.
        self._token = secrets.token_hex(16)
        self._reports: dict[int, tuple[str, float]] = {}
        self._lost = ""
        self._done = False
        seconds = job.total_seconds
        program_peer, tests_peer = socket.socketpair()
        self._host, tests_host = socket.socketpair()
        self._tests: GradedProcess | None = None
        timing = {"call_seconds": settings.test_seconds}
        self._program = GradedProcess(
            inside,
            settings,
            "calls",
            seconds + 1,  # so that the tests' process is the first to notice
            [program_peer.detach()],
            {"code": job.program, **timing},
        )
        try:
            self._tests = GradedProcess(
                inside,
                settings,
                "tests",
                seconds,
                [tests_peer.detach(), tests_host.detach()],
                {
                    "tests": job.tests,
                    "setup": job.setup,
                    "entry_points": job.entry_points,
                    "stop_at_failure": job.stop_at_failure,
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
            SandboxInfrastructureError: One of the processes failed for a reason outside the
                program.
            DataValidationError: ``setup`` fails without the program, or a test passes a value that
                cannot be sent.
        """
        assert self._tests is not None
        try:
            self._collect()
            late = False
            if not self._done:
                # The tests report when they are done; without that report, their supervisor ended
                # them.
                report = self._tests.wait(_GRACE_SECONDS)
                # If the tests need long to rebuild returned values, that is the program's fault.
                late = report["timed_out"] or self._used_its_time(report)
                if not late:
                    raise SandboxInfrastructureError(
                        f"the process of the tests ended with status {report['exit_code']}"
                    )
            if self._lost:
                # If the program's process never started, that is not the program's fault.
                self._program.wait(_GRACE_SECONDS)
            return self._make_result(late)
        finally:
            self._close()

    def _used_its_time(self, report: dict[str, Any]) -> bool:
        """Returns whether the kernel ended the process of the tests at its limit of CPU time."""
        # On a busy machine the kernel's clock of this limit runs ahead of the reported time, by a
        # sixth and more.
        killed = report["exit_code"] == 128 + signal.SIGKILL
        share = _KILLED_SHARE if killed else 1.0
        return report["cpu_seconds"] >= share * self._job.total_seconds

    def _collect(self) -> None:
        most = MOST_WALL_FACTOR * self._job.total_seconds
        self._host.settimeout(most + _GRACE_SECONDS)
        while not self._done:
            try:
                report, _ = channel.receive(self._host)
            except (EOFError, OSError):
                return
            if not secrets.compare_digest(str(report.get("token")), self._token):
                raise SandboxInfrastructureError("a report without the token of its job")
            if "setup_error" in report:
                raise DataValidationError(f"setup: it fails: {report['setup_error']}")
            if "test_error" in report:
                raise DataValidationError(f"tests: {report['test_error']}")
            self._done = bool(report.get("done"))
            if self._done:
                self._lost = report["lost"]
            else:
                self._reports[report["index"]] = (report["message"], report["seconds"])

    def _make_result(self, late: bool) -> JobResult:
        limit = _total_limit(self._job.total_seconds)
        tests = [self._reports.get(i, (limit, 0.0)) for i in range(len(self._job.tests))]
        run = ProgramRun(timed_out=late)
        if self._program.report is not None:
            run = _program_run(self._program.report, self._settings)
        seconds = sum(seconds for _, seconds in tests)
        error = self._lost or (limit if late else "")
        return JobResult(tests, run if run.seconds else ProgramRun(seconds=seconds), error)

    def _close(self) -> None:
        self._host.close()
        for process in (self._program, self._tests):
            if process is not None:
                process.close()
