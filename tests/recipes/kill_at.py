"""Kills the process itself, without warning, at one exact point.

python -m kill_at MODULE:NAME COUNT before|after PROGRAM …
"""

import functools
import importlib
import os
import runpy
import signal
import sys


def kill_at(point: str, count: int, when: str) -> None:
    """The process gets SIGKILL before or after the ``count``-th call of ``MODULE:NAME``."""
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

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == count and when == "before":
            die()
        result = original(*args, **kwargs)
        if calls == count and when == "after":
            die()
        return result

    setattr(owner, name, wrapped)


if __name__ == "__main__":
    where, number, moment, program, *words = sys.argv[1:]
    kill_at(where, int(number), moment)
    sys.argv = [program, *words]
    runpy.run_module(program, run_name="__main__", alter_sys=True)
