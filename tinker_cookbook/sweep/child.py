"""Runs a module like ``python -m``, and ends it when its parent process is gone.

    python -m tinker_cookbook.sweep.child SIGNAL MODULE ARGUMENT ...

A sweep that is killed with ``kill -9`` cannot stop its children. They would keep the locks of their
log folders, and the same command could not resume them. The parent therefore holds the other end of
the child's standard input, which the operating system closes when the parent ends in any way.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from tinker_cookbook.utils.command_line.programs import alias_recipes


def start_child(
    module: str, words: list[str], at_death: signal.Signals, **popen: Any
) -> subprocess.Popen[bytes]:
    """Starts ``python -m module words`` as a child that sends itself ``at_death`` when this process
    ends; ``popen`` are further arguments of ``subprocess.Popen``."""
    command = [sys.executable, "-m", "tinker_cookbook.sweep.child", str(int(at_death)), module]
    # In a new session: Ctrl-C on the terminal reaches the sweep only.
    outputs = {"stderr": subprocess.STDOUT, "start_new_session": True, **popen}
    return subprocess.Popen[bytes]([*command, *words], stdin=subprocess.PIPE, **outputs)


def end_children(
    processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals, seconds: float
) -> None:
    """Sends a signal to all processes, and kills those that do not end within ``seconds``."""
    for process in processes:
        process.send_signal(number)
    until = time.monotonic() + seconds
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
    finally:  # Ctrl-C ends the wait
        for process in processes:
            process.kill()
            process.wait()


def main(argv: list[str]) -> None:
    """Watches the parent in a thread and runs the module."""
    at_death, module, words = int(argv[0]), argv[1], argv[2:]
    # The module itself must not read from the pipe, so its standard input is empty.
    pipe = os.dup(0)
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)

    def watch_parent() -> None:
        os.read(pipe, 1)  # blocks until the parent's end of the pipe is closed
        # A signal, not an exception: the main thread may be in a call that does not return soon.
        os.kill(os.getpid(), at_death)

    threading.Thread(target=watch_parent, daemon=True).start()
    # Shells start background jobs with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [module, *words]
    alias_recipes()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
