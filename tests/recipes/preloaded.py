"""Runs Python programs in forks of a process that has imported the large libraries.

Importing torch, transformers, peft, datasets and the SDK takes 5 s, which is most of the time of a
short program. The package itself is imported by each program anew.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import types
from pathlib import Path

_SECONDS = 240


class Preloaded:
    """The process; all programs run in ``folder`` with one environment."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._outputs = [folder / "preloaded.out", folder / "preloaded.err"]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *map(str, self._outputs)],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        """Runs a program, given as ``-m module …`` or ``-c text``; ends it after four minutes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return subprocess.CompletedProcess(words, code, *(at.read_text() for at in self._outputs))

    def close(self) -> None:
        self._process.communicate(timeout=60)


def serve(outputs: list[str]) -> list[str] | None:
    """Forks for each line of the input; returns the words of a program in its fork, and ``None``
    at the end of the input."""
    # Before torch, as in every program.
    import tinker_cookbook  # noqa: F401, I001
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import tinker  # noqa: F401
    import torch  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    gc.collect()
    gc.freeze()  # so that collections in the forks skip what is imported here
    for line in sys.stdin:
        child = os.fork()
        if not child:
            nothing = os.open(os.devnull, os.O_RDONLY)
            files = [os.open(at, os.O_CREAT | os.O_TRUNC | os.O_WRONLY) for at in outputs]
            for number, file in enumerate([nothing, *files]):
                os.dup2(file, number)
            sys.stdin = os.fdopen(0)
            signal.alarm(_SECONDS)  # it ends the process
            return json.loads(line)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


def execute(words: list[str]) -> None:
    """Runs a program as Python does."""
    if words[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.path[0] = ""
    sys.argv = ["-c"]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(words[1], "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    program = serve(sys.argv[1:])
    if program is not None:
        execute(program)
