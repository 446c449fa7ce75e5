"""Settings of a grader, and the results of its worker threads."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.sandbox import launch
from tinker_cookbook.sandbox.launch import SandboxTier


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
