"""Sandboxes on this machine, without Docker and without a cloud account."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import shlex
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

from tinker_cookbook.exceptions import SandboxError
from tinker_cookbook.sandbox import launch
from tinker_cookbook.sandbox.launch import SandboxLimits, SandboxProcess, SandboxTier
from tinker_cookbook.sandbox.sandbox_interface import SandboxResult, SandboxTerminatedError

_GRACE_SECONDS = 5.0
# A background process of a command may keep its output open; it is not waited for any longer.
_DRAIN_SECONDS = 0.2
_FILE_BYTES = 64 << 20
_BASH = ("bash", "--noprofile", "--norc", "-c")
TIMED_OUT = 124


class LocalSandbox:
    """A sandbox in which commands run, also concurrently, and share files.

    Files persist between commands until ``cleanup``, the end of the lifetime, or the end of this
    process (even by ``kill -9``). Then all processes in the sandbox end and its files are deleted.

        sandbox = await LocalSandbox.create()
        await sandbox.write_file("/workspace/hello.py", "print('hello')")
        result = await sandbox.run_command("python3 hello.py")
        await sandbox.cleanup()
    """

    def __init__(self, inside: SandboxProcess, limits: SandboxLimits, lifetime: float) -> None:
        self._inside = inside
        self._limits = limits
        self._lifetime = lifetime
        self._expires = time.monotonic() + lifetime
        self._running = 0
        self._id = f"local-{uuid.uuid4().hex[:12]}"
        self._numbers = itertools.count()
        self._ended = ""
        self._timer: asyncio.TimerHandle | None = None
        self._environment = launch.environment(
            inside.python,
            inside.work_folder,
            "/home/sandbox" if inside.tier is SandboxTier.BUBBLEWRAP else inside.work_folder,
        )

    @classmethod
    async def create(
        cls,
        timeout: float = 3600,
        *,
        limits: SandboxLimits | None = None,
        tier: SandboxTier | str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> LocalSandbox:
        """Makes a sandbox.

        Args:
            timeout: Lifetime in seconds. It does not pass while commands run, and starts again
                when they end; ``send_heartbeat`` is a command, too.
            limits: Resource limits of its programs.
            tier: ``bubblewrap`` or ``landlock``; None: the strongest that works on this machine.
            environment: Further environment variables.

        Raises:
            SandboxUnavailableError: This machine cannot isolate programs.
            SandboxError: The sandbox did not start.
        """
        limits = limits or SandboxLimits()
        inside = await asyncio.to_thread(launch.start, "agent", limits, tier)
        sandbox = cls(inside, limits, timeout)
        sandbox._environment.update(environment or {})
        sandbox._extend()
        return sandbox

    @property
    def sandbox_id(self) -> str:
        """Name of this sandbox in logs."""
        return self._id

    @property
    def tier(self) -> SandboxTier:
        """How its programs are isolated."""
        return self._inside.tier

    @property
    def workdir(self) -> str:
        """Folder in which commands run by default; the host's path in the tier ``landlock``."""
        return self._inside.work_folder

    def _extend(self) -> None:
        """Restarts the lifetime."""
        self._expires = time.monotonic() + self._lifetime
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._lifetime, self._end, "its lifetime is over")

    def _suspend(self) -> None:
        """Stops the lifetime while a command runs."""
        self._running += 1
        self._expires = math.inf
        if self._timer is not None:
            self._timer.cancel()

    def _resume(self) -> None:
        """Restarts the lifetime if no other command runs."""
        self._running -= 1
        if not self._running and not self._ended:
            self._extend()

    def _end(self, reason: str) -> None:
        if not self._ended:
            self._ended = reason
            # ``stop`` waits for the processes, which would block the event loop.
            threading.Thread(target=self._inside.stop, daemon=True).start()

    def _check_alive(self) -> None:
        if not self._ended and time.monotonic() >= self._expires:
            self._end("its lifetime is over")
        if not self._ended and self._inside.process.poll() is not None:
            self._end("its first process has ended")
        if self._ended:
            raise SandboxTerminatedError(f"sandbox {self._id}: {self._ended}")

    async def send_heartbeat(self, timeout: int = 30) -> None:
        """Restarts the lifetime.

        Raises:
            SandboxTerminatedError: The sandbox no longer exists.
        """
        await self._execute(["true"], timeout=timeout)

    async def run_command(
        self,
        command: str,
        workdir: str | None = None,
        timeout: int = 60,
        max_output_bytes: int | None = None,
    ) -> SandboxResult:
        """Runs a command with bash; see ``SandboxInterface``.

        ``metrics`` has ``seconds``, ``cpu_seconds``, ``memory_bytes``, ``timed_out``, ``tier``,
        ``stdout_truncated``, ``stderr_truncated`` and ``over_limit`` ("memory" or "disk" where a
        limit of the whole sandbox ended it). Background processes of the command keep running.
        """
        stdout, stderr, result = await self._execute(
            [*_BASH, command],
            workdir=workdir,
            timeout=timeout,
            max_bytes=max_output_bytes or self._limits.output_bytes,
        )
        return _result(stdout, stderr, result)

    async def read_file(
        self, path: str, max_bytes: int | None = None, timeout: int = 60
    ) -> SandboxResult:
        """Returns a file's text; bytes that are not UTF-8 are replaced. See ``read_bytes``."""
        stdout, stderr, result = await self._read(path, max_bytes, timeout)
        return _result(stdout, stderr, result)

    async def read_bytes(self, path: str, max_bytes: int | None = None, timeout: int = 60) -> bytes:
        """Returns a file's bytes.

        Raises:
            FileNotFoundError: The file does not exist or cannot be read.
            SandboxTerminatedError: The sandbox no longer exists.
        """
        stdout, stderr, result = await self._read(path, max_bytes, timeout)
        if result["exit_code"]:
            raise FileNotFoundError(f"{path}: {stderr.decode(errors='replace').strip()}")
        return stdout

    async def _read(
        self, path: str, max_bytes: int | None, timeout: int
    ) -> tuple[bytes, bytes, dict[str, Any]]:
        limit = _FILE_BYTES if max_bytes is None else max_bytes
        # A program in the sandbox opens the file, so that a link cannot lead out of it.
        argv = ["head", "-c", str(limit), "--", path]
        return await self._execute(argv, timeout=timeout, max_bytes=limit)

    async def write_file(
        self, path: str, content: str | bytes, executable: bool = False, timeout: int = 60
    ) -> SandboxResult:
        """Writes a file and the folders above it."""
        data = content.encode() if isinstance(content, str) else content
        target = shlex.quote(path)
        script = f'mkdir -p -- "$(dirname -- {target})" && cat > {target}'
        if executable:
            script += f" && chmod +x -- {target}"
        stdout, stderr, result = await self._execute([*_BASH, script], stdin=data, timeout=timeout)
        return _result(stdout, stderr, result)

    async def export_folder(self, path: str, timeout: int = 60) -> bytes:
        """Returns a folder as a tar archive, for ``import_folder`` of another sandbox.

        Raises:
            SandboxError: The folder cannot be read, or has more than 64 MB.
        """
        stdout, stderr, result = await self._execute(
            ["tar", "-c", "-C", path, "."], timeout=timeout, max_bytes=_FILE_BYTES
        )
        if result["exit_code"] or result["stdout_truncated"]:
            reason = stderr.decode(errors="replace").strip() or f"more than {_FILE_BYTES} bytes"
            raise SandboxError(f"{path}: cannot be exported: {reason}")
        return stdout

    async def import_folder(self, archive: bytes, path: str, timeout: int = 60) -> None:
        """Unpacks an archive of ``export_folder``; it is only opened inside the sandbox.

        Raises:
            SandboxError: The archive cannot be unpacked.
        """
        target = shlex.quote(path)
        script = f"mkdir -p -- {target} && tar -x --no-same-owner -C {target}"
        _, stderr, result = await self._execute([*_BASH, script], stdin=archive, timeout=timeout)
        if result["exit_code"]:
            reason = stderr.decode(errors="replace").strip()
            raise SandboxError(f"{path}: the archive cannot be unpacked: {reason}")

    async def cleanup(self) -> None:
        """Ends all processes in the sandbox and deletes its files; safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._ended:
            self._ended = "it was released"
            await asyncio.to_thread(self._inside.stop)

    async def _execute(
        self,
        argv: list[str],
        *,
        workdir: str | None = None,
        timeout: float = 60,
        max_bytes: int = 128 * 1024,
        stdin: bytes = b"",
    ) -> tuple[bytes, bytes, dict[str, Any]]:
        """Returns stdout, stderr and the metrics of a program."""
        self._check_alive()
        number = next(self._numbers)
        pipes = [os.pipe() for _ in range(3)]
        theirs = [launch.memory_file(stdin), *(pipe[1] for pipe in pipes)]
        request = {
            "id": number,
            "argv": argv,
            "workdir": workdir or self.workdir,
            "env": self._environment,
            "timeout": timeout,
        }
        limits = (max_bytes, max_bytes, 1 << 20)
        readers = [_Pipe(pipe[0], limit) for pipe, limit in zip(pipes, limits, strict=True)]
        self._suspend()
        try:
            self._inside.send(request, theirs)
            status = await asyncio.wait_for(readers[2].read(), timeout + _GRACE_SECONDS)
            if not status:
                self._end("its first process has ended")
                raise SandboxTerminatedError(f"sandbox {self._id}: it died during a command")
            await asyncio.wait([r.done for r in readers[:2]], timeout=_DRAIN_SECONDS)
        except (OSError, TimeoutError) as error:
            self._end(f"it does not answer: {error!r}")
            raise SandboxTerminatedError(f"sandbox {self._id}: {self._ended}") from error
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                self._inside.send({"kill": number}, [])
            raise
        finally:
            self._resume()
            for reader in readers:
                reader.close()
        result = json.loads(status)
        if "error" in result:
            raise SandboxError(f"sandbox {self._id}: {result['error']}")
        result |= {
            "stdout_truncated": readers[0].truncated,
            "stderr_truncated": readers[1].truncated,
            "tier": str(self.tier),
        }
        if result["timed_out"]:
            result["exit_code"] = TIMED_OUT
            readers[1].kept += f"\nkilled: it ran longer than {timeout:g} s\n".encode()
        return bytes(readers[0].kept), bytes(readers[1].kept), result


def _result(stdout: bytes, stderr: bytes, result: dict[str, Any]) -> SandboxResult:
    metrics = {key: value for key, value in result.items() if key != "exit_code"}
    return SandboxResult(
        stdout=stdout.decode(errors="replace"),
        stderr=stderr.decode(errors="replace"),
        exit_code=result["exit_code"],
        metrics=metrics,
    )


class _Pipe:
    """Reads a pipe to its end on the running event loop, and keeps its first bytes."""

    def __init__(self, descriptor: int, limit: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self.kept = bytearray()
        self.truncated = False
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(descriptor, self._readable)

    def _readable(self) -> None:
        try:
            piece = os.read(self._descriptor, 1 << 16)
        except BlockingIOError:
            return
        room = self._limit - len(self.kept)
        self.kept += piece[:room]
        self.truncated |= len(piece) > room
        if not piece:
            self._loop.remove_reader(self._descriptor)
            if not self.done.done():
                self.done.set_result(None)

    async def read(self) -> bytes:
        await asyncio.shield(self.done)
        return bytes(self.kept)

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.done.cancel()
