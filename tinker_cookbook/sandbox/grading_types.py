"""Settings of a grader, and what goes in and out of its worker threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.sandbox import launch
from tinker_cookbook.sandbox.launch import SandboxTier

__all__ = [
    "CallsJob",
    "GraderSettings",
    "Job",
    "JobResult",
    "ProgramRun",
    "RunJob",
    "StdioJob",
]


@dataclass(frozen=True)
class GraderSettings:
    """Limits of graded programs, and how many run at once."""

    workers: int = 0
    """Programs graded at once; 0 takes one more than there are processors."""
    tier: SandboxTier | str | None = None
    """None takes the strongest that works here."""
    test_seconds: float = 6.0
    """CPU time of one call into the program, and of one run with a text as input. On the clock it
    may take three times as long, or ten times if it computes: a busy machine fails no program."""
    total_seconds: float = 60.0
    """The same for all tests of a program; those that it does not reach have failed."""
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
    stop_at_failure: bool = False


@dataclass(frozen=True)
class StdioJob:
    """Runs the program once for each (input, expected output); ``same`` compares outputs."""

    program: str
    cases: list[tuple[str, str]]
    same: Callable[[str, str], bool]
    stop_at_failure: bool = False


@dataclass(frozen=True)
class RunJob:
    """Runs the program once, without a test."""

    program: str
    stdin: str


Job = CallsJob | StdioJob | RunJob
