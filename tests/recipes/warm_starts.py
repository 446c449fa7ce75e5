"""Starts recipes in forks of one process that has done the imports.

    python warm_starts.py

A start of a recipe spends most of its time on imports, and a fork skips them. The process reads one
JSON object a line (``arguments``, ``kill``, ``env``, ``cwd``, ``stdout``, ``stderr``), runs the
recipe in a fork to its end or to the point of ``kill``, and writes the return code on a line. The
fork is a real process: SIGKILL ends it, and the next one knows nothing of it.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SECONDS = 300.0

# Imports alone: a torch operation would start threads, which a fork does not have.
PRELOADED = (
    "tinker_cookbook",  # its process settings come before torch
    "tinker_cookbook.engine.engine",
    "tinker_cookbook.backends.local",
    "tinker_cookbook.supervised.train",
    "tinker_cookbook.preference.train_dpo",
    "tinker_cookbook.rl.train",
    "tinker_cookbook.distillation.train_on_policy",
    "transformers.models.llama.modeling_llama",
    "transformers.integrations.sdpa_attention",
    "datasets",
    "peft",
)


class WarmStarts:
    """Runs recipes in forks, one at a time."""

    def __init__(self) -> None:
        # In a new session, so that one signal reaches it and its fork.
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(
        self, arguments: list[str], kill: list[str] | None, env: Mapping[str, str], cwd: Path
    ) -> subprocess.CompletedProcess[str]:
        """Runs ``python -m`` with ``arguments``; ``kill`` has the first arguments of kill_at.py."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            request: dict[str, Any] = {"arguments": arguments, "kill": kill, "env": dict(env)}
            request |= {"cwd": str(cwd), "stdout": str(out), "stderr": str(err)}
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            # A recipe that does not end is killed together with the process that started it.
            limit = threading.Timer(_SECONDS, os.killpg, (self._server.pid, signal.SIGKILL))
            limit.start()
            status = self._server.stdout.readline()
            limit.cancel()
            assert status, f"the recipe took longer than {_SECONDS} s, or its parent has ended"
            return subprocess.CompletedProcess(
                arguments, int(status), out.read_text("utf-8"), err.read_text("utf-8")
            )

    def close(self) -> None:
        """Ends the process with the imports."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(30)


def serve() -> dict[str, Any] | None:
    """Forks for every request; returns the request in the fork, ``None`` when there are no more."""
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return request
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(code, flush=True)
    return None


def become(request: dict[str, Any]) -> None:
    """Gives the fork the environment, the folder and the output files of the request."""
    os.environ.clear()
    os.environ.update(request["env"])
    # Python reads this variable at its start only.
    sys.path[:0] = request["env"].get("PYTHONPATH", "").split(os.pathsep)
    os.chdir(request["cwd"])
    for name, number, flags in (
        (os.devnull, 0, os.O_RDONLY),
        (request["stdout"], 1, os.O_WRONLY | os.O_CREAT),
        (request["stderr"], 2, os.O_WRONLY | os.O_CREAT),
    ):
        descriptor = os.open(name, flags)
        os.dup2(descriptor, number)
        os.close(descriptor)


if __name__ == "__main__":
    import importlib

    for module in PRELOADED:
        importlib.import_module(module)
    if (request := serve()) is not None:
        become(request)
        if request["kill"] is not None:
            from kill_at import kill_at

            point, count, when = request["kill"]
            kill_at(point, int(count), when)
        sys.argv = list(request["arguments"])
        # The end of this script is the end of the recipe, with its exit code and its atexit calls.
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
