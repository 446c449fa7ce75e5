"""Programs in forks of one process that has done the imports.

Starting a program of this package takes 3 to 5 s of CPU for imports, and a fork skips them. A fork
is a real process: SIGKILL ends it, and the next one knows nothing of it. ``subprocess`` starts
programs whose imports are tested.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
# Imports alone: a torch operation would start threads, which a fork does not have.
PRELOADED = (
    "tinker_cookbook",  # its process settings come before torch
    "tinker_cookbook.engine.engine",
    "tinker_cookbook.backends.local",
    "tinker_cookbook.supervised.train",
    "tinker_cookbook.preference.train_dpo",
    "tinker_cookbook.rl.train",
    "tinker_cookbook.distillation.train_on_policy",
    "tinker_cookbook.server.app",
    "tinker.cli",
    "transformers.models.llama.modeling_llama",
    "transformers.integrations.sdpa_attention",
    "datasets",
    "peft",
    "uvicorn",
)


@cache
def _server(python: str) -> socket.socket:
    """The socket of the process with the imports, of which each test process has one for each
    Python that it uses."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [python, __file__, str(theirs.fileno())],
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": str(REPO)},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for the tests
        )
    atexit.register(lambda: (ours.close(), process.wait(30)))
    return ours


class Popen(subprocess.Popen[str]):
    """``subprocess.Popen`` of ``[python, "-m", module, …]`` or ``[python, "-c", text, …]``."""

    def __init__(self, args: Sequence[str], **settings: Any) -> None:
        self._status = -1
        super().__init__(args, text=True, **settings)

    def _execute_child(  # type: ignore[override]
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
        creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *others,
    ) -> None:  # fmt: skip
        python, kind, *_ = args
        assert kind in ("-m", "-c"), kind
        request = {"words": args[1:], "cwd": str(cwd or Path.cwd()), "env": dict(env or os.environ)}
        given = (p2cread, c2pwrite, errwrite)
        files = [number if file == -1 else file for number, file in enumerate(given)]
        self._status, status = os.pipe()
        socket.send_fds(_server(python), [json.dumps(request).encode() + b"\n"], [*files, status])
        os.close(status)
        self.pid = int(os.read(self._status, 20))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        wait = 0 if wait_flags & os.WNOHANG else None
        if not select.select([self._status], [], [], wait)[0]:
            return 0, 0
        said = os.read(self._status, 20)
        os.close(self._status)
        return self.pid, int(said)

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self.returncode is None and self._status >= 0 and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run(
    args: Sequence[str], *, input: str = "", timeout: float = 300, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` in a fork, with the outputs; ends a program that takes too long."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with Popen(args, **{**pipes, **settings}) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, out, err)


# --- the process that forks ----------------------------------------------------------------------


def _serve(connection: socket.socket) -> list[str] | None:
    """Forks for every request; returns the words of a program in its fork, and ``None`` at the end.

    Between the two is a process that waits for the program, and says its number and its end.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that wait are not waited for
    while True:
        text, received, _, _ = socket.recv_fds(connection, 1 << 16, 4)
        if not text:
            return None
        while not text.endswith(b"\n"):
            text += connection.recv(1 << 16)
        *files, status = received
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            if not (program := os.fork()):
                os.close(status)
                return _become(json.loads(text), files)
            for file in files:
                os.close(file)
            os.write(status, b"%d" % program)
            code = os.waitpid(program, 0)[1]
            os.write(status, b"%d" % code)
            os._exit(0)
        for file in received:
            os.close(file)


def _become(request: Mapping[str, Any], files: Sequence[int]) -> list[str]:
    """Gives a fork what the request names: files, environment and folder."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in set(files) - {0, 1, 2}:
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    # Python reads these variables at its start only.
    sys.path[1:1] = request["env"].get("PYTHONPATH", "").split(os.pathsep)
    if "PYTHONUNBUFFERED" in request["env"]:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(request["cwd"])
    importlib.invalidate_caches()
    importlib.import_module("tinker_cookbook").prepare_process()
    return request["words"]


def _execute(kind: str, program: str, *words: str) -> None:
    """Runs a program as Python does; an error that it raises is an error of this script."""
    sys.orig_argv = [sys.executable, kind, program, *words]
    if kind == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = [program, *words]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    sys.path[0] = ""
    sys.argv = ["-c", *words]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(program, "<string>", "exec"), main.__dict__)


def _leave(code: int) -> None:
    """Ends the process as Python does, but without freeing 400,000 objects (0.4 s of CPU)."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # so that collections in the forks skip what is imported here
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        program = _serve(listening)
    if program is not None:
        code: Any = None
        try:
            _execute(*program)
        except SystemExit as end:
            code = end.code
        if code is not None and not isinstance(code, int):
            raise SystemExit(code)
        _leave(code or 0)
