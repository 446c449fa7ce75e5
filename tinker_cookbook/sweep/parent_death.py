"""Starts a program that ends when its parent does, however that ends.

    python -m tinker_cookbook.sweep.parent_death PARENT_PID SIGNAL PROGRAM ARGUMENT ...

A sweep that is killed with -9 can tell nobody. Were its runs to live on, they would hold their log
folders, and the sweep that is started next could not go on with them. Linux sends a signal at the
parent's death to whoever asked for it, and the request outlives ``exec``; elsewhere a small process
stays in between and looks once a second.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from types import FrameType

_PR_SET_PDEATHSIG = 1
_LOOK_EVERY_SECONDS = 1.0


def tied_to_parent(command: list[str], at_death: signal.Signals) -> list[str]:
    """Returns the command line that runs ``command`` as a child that ends with this process.

    It must be started by this process's main thread: Linux takes the end of the thread that forked
    for the parent's death.
    """
    own = [sys.executable, "-m", "tinker_cookbook.sweep.parent_death", str(os.getpid())]
    return [*own, str(int(at_death)), *command]


def main(argv: list[str]) -> int:
    """Becomes the program, or stays beside it."""
    parent, at_death, command = int(argv[0]), int(argv[1]), argv[2:]
    # A shell starts what it puts behind "&" with SIGINT ignored, which would be inherited for good.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not _request_kernel_signal(at_death):
        return watch_parent(parent, at_death, command)
    if os.getppid() != parent:  # it died before the kernel was asked
        return 1
    os.execv(command[0], command)


def watch_parent(parent: int, at_death: int, command: list[str]) -> int:
    """Runs the command as a child, hands signals on, and ends it when ``parent`` is gone."""
    process = subprocess.Popen(command)

    def hand_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, hand_on)
    while process.poll() is None:
        if os.getppid() != parent:
            process.send_signal(at_death)
            return process.wait()
        time.sleep(_LOOK_EVERY_SECONDS)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _request_kernel_signal(at_death: int) -> bool:
    if sys.platform != "linux":
        return False
    try:
        return ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, at_death, 0, 0, 0) == 0
    except (AttributeError, OSError):
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
