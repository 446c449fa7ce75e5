"""Kills the process itself, without warning, or pauses it, at one exact point.

python -m kill_at MODULE:NAME COUNT before|after|FILE PROGRAM …
"""

import functools
import importlib
import os
import runpy
import signal
import sys
import time
from pathlib import Path


def kill_at(point: str, count: int, when: str) -> None:
    """The process gets SIGKILL before or after the ``count``-th call of ``MODULE:NAME``.

    With a file, it writes the file after the call, and goes on once the file is removed.
    """
    module_name, _, path = point.partition(":")
    owner = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)
    calls = 0

    def die() -> None:
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def pause() -> None:
        Path(when).touch()
        while Path(when).exists():
            time.sleep(0.01)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == count and when == "before":
            die()
        result = original(*args, **kwargs)
        if calls == count and when == "after":
            die()
        if calls == count and when not in ("before", "after"):
            pause()
        return result

    setattr(owner, name, wrapped)


if __name__ == "__main__":
    where, number, moment, program, *words = sys.argv[1:]
    kill_at(where, int(number), moment)
    sys.argv = [program, *words]
    runpy.run_module(program, run_name="__main__", alter_sys=True)
