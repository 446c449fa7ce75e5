"""Runs one program in a warm sandbox: its processes, their jobs and their reports."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.sandbox import launch
from tinker_cookbook.sandbox.inside import channel
from tinker_cookbook.sandbox.inside.budget import MOST_WALL_FACTOR, WALL_FACTOR
from tinker_cookbook.sandbox.launch import SandboxProcess, SandboxTier
from tinker_cookbook.sandbox.sandbox_interface import SandboxInfrastructureError

# Time that the host gives a process beyond its own limit to report its end.
_GRACE_SECONDS = 10.0
_STDERR_BYTES = 10_000
# Share of the limit of CPU time after which a killed process counts as killed by that limit.
_KILLED_SHARE = 0.5


@dataclass(frozen=True)
class GraderSettings:
    """Limits of graded programs, and how many run at once."""

    workers: int = 0
    """Programs graded at once; 0: the number of processors plus one."""
    tier: SandboxTier | str | None = None
    """None: the strongest tier that works on this machine."""
    test_seconds: float = 6.0
    """CPU time of all calls of one test into the program, and of one run with a text as input. The
    wall-clock time may be three times as long, or ten times if it computes, so a busy machine fails
    no program."""
    total_seconds: float = 60.0
    """Time limit of all tests of a program; tests that were not reached count as failed."""
    memory_mb: int = 512
    """Address space of a program."""
    disk_mb: int = 16
    """Size of its files in /tmp (tier ``bubblewrap``; with ``landlock`` it cannot write files)."""
    threads: int = 64
    """Threads of a program. A program cannot start processes."""
    output_bytes: int = 4 << 20
    """Maximum output of a program, which fails if it prints more. At least twice the expected
    output is allowed."""
    attempts: int = 3
    """Attempts at grading a program before an infrastructure error is raised."""
    preload: tuple[str, ...] = ()
    """Modules that are imported before programs are forked, such as ``numpy``."""
    python_path: tuple[str, ...] = ()
    """Host folders with further packages. Programs can read these folders completely."""

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
                raise ConfigurationError(
                    f"python_path: {path!r} is not an absolute path of a folder"
                )


@dataclass(frozen=True)
class ProgramRun:
    """Output, exit status and cost of one run of a program."""

    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0
    timed_out: bool = False
    truncated: bool = False
    """Whether it was killed because it printed more than the limit."""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    memory_bytes: int = 0


@dataclass(frozen=True)
class JobResult:
    """For each test: why it failed (empty if it passed), and its seconds."""

    tests: list[tuple[str, float]]
    run: ProgramRun
    program_error: str = ""


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


def run_stdio(
    inside: SandboxProcess,
    settings: GraderSettings,
    program: str,
    cases: Sequence[tuple[str, str]],
    same: Callable[[str, str], bool],
    total_seconds: float,
    stop_at_failure: bool,
) -> JobResult:
    """Runs the program for each (input, expected output), until the total time limit is reached."""
    tests: list[tuple[str, float]] = []
    run, error, skip, used = ProgramRun(), "", "", 0.0
    for stdin, expected in cases:
        if skip:
            tests.append((skip, 0.0))
            continue
        # A right output is as long as the expected one, up to white space.
        most = max(settings.output_bytes, 2 * len(expected.encode(errors="replace")))
        run = run_program(inside, settings, program, stdin, most)
        message = _stdio_problem(run, settings)
        error = error or message
        if not message:
            try:
                message = "" if same(run.stdout, expected) else "wrong output"
            except Exception as failure:
                # The program chose the output, so it is the program that fails.
                message = f"its output cannot be compared: {type(failure).__name__}"
        tests.append((message, run.seconds))
        if message and stop_at_failure:
            skip = "not run: an earlier test failed"
        used += max(run.cpu_seconds, run.seconds / WALL_FACTOR)
        if used > total_seconds:
            skip = skip or _total_limit(total_seconds)
    return JobResult(tests, run, error)


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
    outputs, job = [stdout_theirs, stderr_theirs], {"code": program, "stdin": stdin}
    seconds = settings.test_seconds
    try:
        with closing(GradedProcess(inside, settings, "stdio", seconds, outputs, job)) as process:
            deadline = time.monotonic() + MOST_WALL_FACTOR * seconds + _GRACE_SECONDS
            printed, errors, truncated = _read_outputs(stdout, stderr, output_bytes, deadline)
            if truncated:
                return ProgramRun(printed, errors, exit_code=1, truncated=True)
            report = process.wait(_GRACE_SECONDS)
            return _program_run(report, settings, stdout=printed, stderr=errors)
    finally:
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


def run_calls(
    inside: SandboxProcess,
    settings: GraderSettings,
    program: str,
    tests: list[dict[str, Any]],
    setup: str,
    entry_points: list[str] | None,
    total_seconds: float,
    stop_at_failure: bool,
) -> JobResult:
    """Runs a program and its tests, each in a process; the host collects what the tests report.

    Raises:
        SandboxInfrastructureError: One of the processes failed for a reason outside the program.
        DataValidationError: ``setup`` fails without the program, or a test passes a value that
            cannot be sent.
    """
    # Known to the host and to the process of the tests only. A report without it is rejected.
    token = secrets.token_hex(16)
    program_peer, tests_peer = socket.socketpair()
    host, tests_host = socket.socketpair()
    timing = {"call_seconds": settings.test_seconds}
    served = {"code": program, **timing}
    job = {
        "tests": tests,
        "setup": setup,
        "entry_points": entry_points,
        "stop_at_failure": stop_at_failure,
        "token": token,
        **timing,
    }
    peers, more = [program_peer.detach()], total_seconds + 1  # the tests' process notices first
    with (
        host,
        closing(GradedProcess(inside, settings, "calls", more, peers, served)) as called,
        closing(
            GradedProcess(
                inside, settings, "tests", total_seconds,
                [tests_peer.detach(), tests_host.detach()], job,
            )
        ) as testing,
    ):  # fmt: skip
        host.settimeout(MOST_WALL_FACTOR * total_seconds + _GRACE_SECONDS)
        reports, lost = _collect(host, token)
        late = False
        if lost is None:
            # The tests report when they are done; without that report, their supervisor ended
            # them.
            report = testing.wait(_GRACE_SECONDS)
            # If the tests need long to rebuild returned values, that is the program's fault.
            late = report["timed_out"] or _used_its_time(report, total_seconds)
            if not late:
                raise SandboxInfrastructureError(
                    f"the process of the tests ended with status {report['exit_code']}"
                )
        if lost:
            # If the program's process never started, that is not the program's fault.
            called.wait(_GRACE_SECONDS)
        limit = _total_limit(total_seconds)
        results = [reports.get(i, (limit, 0.0)) for i in range(len(tests))]
        run = ProgramRun(timed_out=late)
        if called.report is not None:
            run = _program_run(called.report, settings)
        if not run.seconds:
            run = ProgramRun(seconds=sum(seconds for _, seconds in results))
        return JobResult(results, run, lost or (limit if late else ""))


def _collect(host: socket.socket, token: str) -> tuple[dict[int, tuple[str, float]], str | None]:
    """Returns what the tests report, and why the program was lost; None if they do not end."""
    reports: dict[int, tuple[str, float]] = {}
    while True:
        try:
            report, _ = channel.receive(host)
        except (EOFError, OSError):
            return reports, None
        if not secrets.compare_digest(str(report.get("token")), token):
            raise SandboxInfrastructureError("a report without the token of its job")
        if "setup_error" in report:
            raise DataValidationError(f"setup: it fails: {report['setup_error']}")
        if "test_error" in report:
            raise DataValidationError(f"tests: {report['test_error']}")
        if report.get("done"):
            return reports, report["lost"]
        reports[report["index"]] = (report["message"], report["seconds"])


def _used_its_time(report: dict[str, Any], limit: float) -> bool:
    """Returns whether the kernel ended the process of the tests at its limit of CPU time."""
    # On a busy machine the kernel's clock of this limit runs ahead of the reported time, by a sixth
    # and more.
    killed = report["exit_code"] == 128 + signal.SIGKILL
    return report["cpu_seconds"] >= (_KILLED_SHARE if killed else 1.0) * limit
