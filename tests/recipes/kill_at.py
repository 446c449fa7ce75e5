"""Runs a recipe and kills its own process, without warning, at one exact point.

    python kill_at.py MODULE:NAME COUNT before|after RECIPE key=value ...

The process gets SIGKILL before or after the COUNT-th call of MODULE:NAME.
"""

import functools
import importlib
import os
import runpy
import signal
import sys


def kill_at(point: str, count: int, when: str) -> None:
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
    point, count, when, recipe, *arguments = sys.argv[1:]
    import tinker_cookbook  # noqa: F401  (its process settings come before torch)

    kill_at(point, int(count), when)
    sys.argv = [recipe, *arguments]
    runpy.run_module(recipe, run_name="__main__", alter_sys=True)
