"""Process 1 of a grading sandbox: does the imports once and forks a process for each program.

It never reads a program or a test: its children read them from sockets that it passes on.
Each child is put into namespaces (or a Landlock domain) and limited before it reads anything.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any

from tinker_cookbook.sandbox.inside import channel, folders, kernel, roles
from tinker_cookbook.sandbox.inside.budget import BUSY_SHARE

# Modules imported before the fork. Rare ones are left out: each makes every fork slower.
_PRELOAD = (
    "abc", "array", "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal",
    "enum", "fractions", "functools", "hashlib", "heapq", "io", "itertools", "json", "math",
    "numbers", "operator", "queue", "random", "re", "statistics", "string", "struct", "textwrap",
    "threading", "time", "typing",
)  # fmt: skip
_ROLES = {"stdio": roles.StdioProgram, "calls": roles.CalledProgram, "tests": roles.Tests}


class Zygote:
    """Serves requests until the host closes ``control``."""

    def __init__(self, control: socket.socket, settings: dict[str, Any]) -> None:
        self._control = control
        self._settings = settings

    def run(self) -> None:
        """Forks a supervisor for each request."""
        kernel.protect_process()
        while True:
            try:
                request, descriptors = channel.receive(self._control)
            except (EOFError, OSError):
                return
            status = descriptors[0]
            kernel.reap_children()
            try:
                pid = os.fork()
            except OSError as error:
                os.write(status, b'{"error": "fork: %d"}\n' % (error.errno or 0))
            else:
                if pid == 0:
                    self._control.close()
                    self._supervise(request, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)

    def _supervise(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """Starts a program's process, kills it at its time limit, and reports how it ended."""
        status = descriptors[0]
        try:
            if self._settings["landlock"]:
                kernel.adopt_orphans()
            elif request["role"] != "tests":
                # The next child is process 1 of a namespace, so its own children end with it.
                kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC)
                kernel.mount_tmpfs("/tmp", request["disk"], 1000)
                # Semaphores, as in ``multiprocessing.pool.ThreadPool``, are files in /dev/shm.
                kernel.mount_again("/tmp", "/dev/shm")
            pid = os.fork()
            if pid == 0:
                self._become_program(request, descriptors)
            for descriptor in descriptors[1:]:
                os.close(descriptor)
            started = time.monotonic()
            timed_out = _wait(pid, status, request["seconds"], request["most_seconds"])
            _, code, usage = os.wait4(pid, 0)
            result = kernel.exit_report(code, usage, started)
            channel.write_and_close(status, {**result, "timed_out": timed_out})
        except BaseException:
            channel.write_and_close(status, {"error": traceback.format_exc()[-1000:]})
        os._exit(0)

    def _become_program(self, request: dict[str, Any], descriptors: list[int]) -> None:
        status, job_socket, *others = descriptors
        code = 1
        try:
            os.setsid()
            with socket.socket(fileno=job_socket) as job_channel:
                job, _ = channel.receive(job_channel)
            role = _ROLES[request["role"]](job, others)
            del job
            settings = self._settings
            # The tests have another user than the program, so that it cannot reach them.
            uid = settings["uid"] and settings["uid"] + (request["role"] == "tests")
            kernel.restrict_process(
                settings, request["limits"], uid, [], forks=False, sockets=False
            )
            if not settings["landlock"]:
                os.chdir("/tmp")
        except BaseException:
            channel.write_and_close(status, {"error": traceback.format_exc()[-1000:]})
            os._exit(1)
        kept = sorted(role.kept)
        for low, high in zip([2, *kept], [*kept, 256], strict=True):
            os.closerange(low + 1, high)
        try:
            code = role.run()
        finally:
            os._exit(code)


def _wait(pid: int, status: int, seconds: float, most_seconds: float) -> bool:
    """Waits for the program, and kills it after its time, or when the host is gone.

    After ``seconds`` it continues only while it computes, up to ``most_seconds``.
    """
    program = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(program, select.POLLIN)
    poll.register(status, 0)  # reports when the host closes the other end
    ready = poll.poll(seconds * 1000)
    # Number of the clock that shows the CPU time of another process, as in the C library.
    clock = (~pid << 3) | 2
    if not ready and time.clock_gettime(clock) > BUSY_SHARE * seconds:
        ready = poll.poll((most_seconds - seconds) * 1000)
    ended = any(descriptor == program for descriptor, _ in ready)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    os.close(program)
    return not ready


def main(control: socket.socket, settings: dict[str, Any]) -> None:
    """Imports the usual modules, and serves until the host is gone."""
    kernel.share_heap()
    sys.path[:] = [path for path in sys.path if path] + settings["python_path"]
    for name in (*_PRELOAD, *settings["preload"]):
        importlib.import_module(name)
    # Otherwise a garbage collection in a child would touch, and thereby copy, every page.
    gc.collect()
    gc.freeze()
    channel.send(control, {"ready": sys.version.split()[0]})
    try:
        Zygote(control, settings).run()
    finally:
        if settings["landlock"]:
            for folder in settings["writable"]:
                folders.remove_folder(folder)
