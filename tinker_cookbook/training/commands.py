"""The commands a person types next: to continue a run, and to plot it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from tinker_cookbook.utils.entrypoint import program_takes

_BEHAVIOR = "behavior_if_log_dir_exists="


def continue_command(log_path: str) -> str | None:
    """The command line that continues this run, or ``None`` where no recipe was started."""
    program = list(getattr(sys, "orig_argv", sys.argv))
    if "-m" not in program:
        return None
    at = program.index("-m")
    # The interpreter as it was called: another "python" may not have the package.
    words = program[: at + 2]
    words += [w for w in program[at + 2 :] if not w.startswith((_BEHAVIOR, "log_path="))]
    words.append(f"log_path={log_path}")
    # The loops of the library continue the run in log_path without being asked.
    if program_takes(_BEHAVIOR.rstrip("=")):
        words.append(f"{_BEHAVIOR}resume")
    return shlex.join(words)


def plot_command(log_path: str) -> str:
    """The command line that draws the curves of a run."""
    python = getattr(sys, "orig_argv", ["python"])[0]
    return shlex.join([python, "-m", "tinker_cookbook.plot", f"log_path={Path(log_path)}"])
