"""Process 1 of a command sandbox: starts commands, enforces limits, ends with the host process.

A command cannot harm process 1: it ignores signals from inside its namespace, its memory is
protected, and it reads nothing that a command writes.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

from tinker_cookbook.sandbox.inside import channel, folders, kernel

_POLL_SECONDS = 0.1
_MOST_FILES = 200_000
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class _Command:
    pid: int
    status: int  # descriptor for the result
    deadline: float
    started: float = field(default_factory=time.monotonic)
    timed_out: bool = False
    over_limit: str = ""  # the limit of the whole sandbox that killed it
    peak: int = 0  # bytes of memory


class Agent:
    """Runs the commands that arrive on ``control`` until the host closes it."""

    def __init__(self, control: socket.socket, settings: dict[str, Any]) -> None:
        self._control = control
        self._settings = settings
        self._commands: dict[int, _Command] = {}
        self._next_check = 0.0

    def run(self) -> None:
        """Serves requests; kills everything and returns when the host is gone."""
        kernel.protect_process()
        kernel.adopt_orphans()
        # A byte arrives here for each SIGCHLD.
        wake, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(wake, selectors.EVENT_READ)
            while True:
                wait = _POLL_SECONDS if self._commands else 1.0
                ready = {key.fd for key, _ in selector.select(wait)}
                if wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 4096)
                if self._control.fileno() in ready and not self._serve_request():
                    return
                self._reap()
                self._check_limits()

    def _serve_request(self) -> bool:
        try:
            request, descriptors = channel.receive(self._control)
        except (EOFError, OSError):
            return False
        if "kill" in request:
            self._kill_command(request["kill"])
        else:
            self._start(request, descriptors)
        return True

    def _start(self, request: dict[str, Any], descriptors: list[int]) -> None:
        *standard, status = descriptors
        try:
            pid = os.fork()
        except OSError as error:
            channel.write_and_close(status, {"error": f"fork: {error}"})
        else:
            if pid == 0:
                self._become_command(request, standard, status)
            deadline = time.monotonic() + request["timeout"]
            self._commands[request["id"]] = _Command(pid, status, deadline)
        for descriptor in standard:
            os.close(descriptor)

    def _become_command(self, request: dict[str, Any], standard: list[int], status: int) -> None:
        # Runs in the child, which must never return to the loop above.
        try:
            os.setsid()
            for number, descriptor in enumerate(standard):
                os.dup2(descriptor, number)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            settings = self._settings
            # Without its own network namespace, a command must not create any socket.
            kernel.restrict_process(
                settings,
                settings["limits"],
                settings["uid"],
                settings["writable"],
                forks=True,
                sockets=not settings["landlock"],
            )
            os.makedirs(request["workdir"], exist_ok=True)
            os.chdir(request["workdir"])
            os.closerange(3, 256)
            os.execvpe(request["argv"][0], request["argv"], request["env"])
        except OSError as error:
            os.write(2, f"{request['argv'][0]}: {error}\n".encode())
            os._exit(127 if isinstance(error, FileNotFoundError) else 126)
        except BaseException:
            channel.write_and_close(status, {"error": traceback.format_exc()})
            os._exit(1)

    def _reap(self) -> None:
        while True:
            try:
                pid, code, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            found = next((i for i, c in self._commands.items() if c.pid == pid), None)
            if found is None:
                continue  # an orphan of a command
            command = self._commands.pop(found)
            if command.timed_out:
                _kill_all(self._descendants(pid))
            result = kernel.exit_report(code, usage, command.started)
            result["memory_bytes"] = max(result["memory_bytes"], command.peak)
            result |= {"timed_out": command.timed_out, "over_limit": command.over_limit}
            channel.write_and_close(command.status, result)

    def _check_limits(self) -> None:
        now = time.monotonic()
        for number, command in self._commands.items():
            if now >= command.deadline and not command.timed_out:
                command.timed_out = True
                self._kill_command(number)
        if now < self._next_check:
            return
        if self._commands or self._has_orphans():
            self._check_totals()
        # The checks use at most a tenth of a core.
        ended = time.monotonic()
        self._next_check = ended + max(_POLL_SECONDS, 10 * (ended - now))

    def _has_orphans(self) -> bool:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def _check_totals(self) -> None:
        """Kills all commands if together they exceed a limit."""
        ours = self._descendants(os.getpid())
        used = sum(rss for pid, _, _, rss in _processes() if pid in ours)
        broken = "memory" if used > self._settings["memory"] else self._disk_problem()
        for command in self._commands.values():
            command.peak = max(command.peak, used)
            command.over_limit = command.over_limit or broken
        if broken:
            _kill_all(ours)

    def _disk_problem(self) -> str:
        if self._settings["landlock"]:
            work = self._settings["writable"][0]
            size, files = folders.folder_use(work, self._settings["disk"], _MOST_FILES)
        else:
            # The mount limits the size, but not the number of files.
            disk = os.statvfs("/")
            size, files = 0, disk.f_files - disk.f_ffree
        return "disk" if files > _MOST_FILES or size > self._settings["disk"] else ""

    def _kill_command(self, number: int) -> None:
        command = self._commands.get(number)
        if command is not None:
            _kill_all([command.pid, *self._descendants(command.pid)])

    def _descendants(self, root: int) -> set[int]:
        """Returns the descendants of ``root`` and the processes of its session."""
        table = list(_processes())
        found = {pid for pid, _, session, _ in table if session == root and pid != root}
        while True:
            more = {p for p, parent, _, _ in table if parent in found or parent == root} - found
            if not more:
                return found
            found |= more

    def end(self) -> None:
        """Kills everything, and deletes a work folder on the host's disk."""
        for _ in range(50):
            running = self._descendants(os.getpid())
            _kill_all(running)
            kernel.reap_children()
            if not running:
                break
            time.sleep(0.01)
        if self._settings["landlock"]:
            for folder in self._settings["writable"]:
                folders.remove_folder(folder)


def _kill_all(pids: Any) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _processes() -> Any:
    """Yields (pid, parent, session, bytes in memory) of each process that /proc shows."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The program's name, in parentheses, may contain anything.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it has ended
        yield int(name), int(fields[1]), int(fields[3]), int(fields[21]) * _PAGE


def main(control: socket.socket, settings: dict[str, Any]) -> None:
    """Runs an agent until the host is gone."""
    agent = Agent(control, settings)
    channel.send(control, {"ready": sys.version.split()[0]})
    try:
        agent.run()
    finally:
        agent.end()
