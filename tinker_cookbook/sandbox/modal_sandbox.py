"""Sandboxes in Modal's cloud. They need ``pip install -e '.[modal]'`` and an account.

MODAL_POOL_SIZE sets the size of a pool, MODAL_CREATION_RATE_LIMIT the number of sandboxes that it
creates per second.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import posixpath
import shlex
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

from tinker_cookbook.exceptions import SandboxError
from tinker_cookbook.sandbox.sandbox_interface import SandboxResult, SandboxTerminatedError
from tinker_cookbook.utils.imports import missing_extra

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
_PIECE = 1 << 20
_RETRY_SECONDS = 1.0


def _modal() -> Any:
    try:
        import modal  # type: ignore[import-not-found]
    except ImportError as error:
        raise missing_extra("Modal sandboxes", error, "modal") from error
    return modal


def _is_gone(error: BaseException) -> bool:
    """Whether Modal's error means that the sandbox no longer exists."""
    text = str(error).lower()
    return type(error).__name__ in ("NotFoundError", "SandboxTerminatedError") or any(
        word in text for word in ("terminated", "not found", "died")
    )


def _ends_with_sandbox(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Makes errors that mean the end of the sandbox ``SandboxTerminatedError``."""

    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await function(*args, **kwargs)
        # Modal cancels our calls when it reclaims a sandbox. CancelledError is not an Exception: it
        # would end the whole training step.
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the caller itself was cancelled
            raise SandboxTerminatedError("Modal cancelled a call of its sandbox") from None
        except Exception as error:
            if _is_gone(error):
                raise SandboxTerminatedError(f"sandbox: {error}") from error
            raise

    return call


class ModalSandbox:
    """A sandbox in Modal's cloud."""

    def __init__(
        self,
        timeout: int,
        image: Any,
        app: Any,
        sandbox: Any,
        max_stream_output_bytes: int = 128 * 1024,
    ) -> None:
        self._sandbox = sandbox
        self._output_bytes = max_stream_output_bytes

    @classmethod
    @_ends_with_sandbox
    async def create(
        cls,
        app_name: str = "tinker-cookbook-runner",
        timeout: int = 600,
        image: Any = None,
        max_stream_output_bytes: int = 128 * 1024,
    ) -> ModalSandbox:
        """Makes a sandbox.

        Args:
            app_name: Modal app of the sandbox; created if missing.
            timeout: Lifetime in seconds.
            image: A ``modal.Image``; Debian slim if None.
            max_stream_output_bytes: Maximum bytes that are kept of stdout, and of stderr.

        Raises:
            ConfigurationError: The package ``modal`` is not installed.
        """
        modal = _modal()
        chosen = image if image is not None else modal.Image.debian_slim()
        app = await modal.App.lookup.aio(app_name, create_if_missing=True)
        sandbox = await modal.Sandbox.create.aio(app=app, image=chosen, timeout=timeout)
        return cls(timeout, chosen, app, sandbox, max_stream_output_bytes)

    @property
    def sandbox_id(self) -> str:
        """Modal's id of this sandbox."""
        return self._sandbox.object_id

    @_ends_with_sandbox
    async def send_heartbeat(self, timeout: int = 30) -> None:
        """Checks that the sandbox exists.

        Raises:
            SandboxTerminatedError: The sandbox no longer exists.
        """
        await asyncio.wait_for(self._sandbox.exec.aio("true"), timeout)

    async def _run(
        self, script: str, workdir: str | None, timeout: int, limit: int, stdin: bytes | None = None
    ) -> SandboxResult:
        try:
            process = await self._sandbox.exec.aio(
                "bash", "-lc", script, timeout=timeout, workdir=workdir
            )
            if stdin is not None:
                for start in range(0, len(stdin), _PIECE):
                    process.stdin.write(stdin[start : start + _PIECE])
                    await process.stdin.drain.aio()
                process.stdin.write_eof()
                await process.stdin.drain.aio()
            stdout, stderr, code = await asyncio.gather(
                _first_bytes(process.stdout, limit),
                _first_bytes(process.stderr, limit),
                process.wait.aio(),
            )
        except Exception as error:
            if _is_gone(error):
                raise
            return SandboxResult(stdout="", stderr=f"{type(error).__name__}: {error}", exit_code=-1)
        return SandboxResult(stdout=stdout, stderr=stderr, exit_code=code)

    @_ends_with_sandbox
    async def run_command(
        self,
        command: str,
        workdir: str | None = None,
        timeout: int = 60,
        max_output_bytes: int | None = None,
    ) -> SandboxResult:
        """Runs a command with bash; see ``SandboxInterface``."""
        limit = self._output_bytes if max_output_bytes is None else max_output_bytes
        return await self._run(command, workdir, timeout, limit)

    @_ends_with_sandbox
    async def read_file(
        self, path: str, max_bytes: int | None = None, timeout: int = 60
    ) -> SandboxResult:
        """Returns a file's text."""
        target = shlex.quote(path)
        script = f"cat {target}" if max_bytes is None else f"head -c {max_bytes} {target}"
        return await self._run(script, None, timeout, max_bytes or self._output_bytes)

    @_ends_with_sandbox
    async def write_file(
        self, path: str, content: str | bytes = "", executable: bool = False, timeout: int = 60
    ) -> SandboxResult:
        """Writes a file and the folders above it."""
        data = content.encode() if isinstance(content, str) else content
        target, folder = shlex.quote(path), shlex.quote(posixpath.dirname(path) or ".")
        script = f"mkdir -p {folder} && cat > {target}"
        script += f" && chmod +x {target}" if executable else ""
        return await self._run(script, None, timeout, self._output_bytes, data)

    @_ends_with_sandbox
    async def cleanup(self) -> None:
        """Ends the sandbox and waits until it is gone."""
        await self._sandbox.terminate.aio()
        with contextlib.suppress(_modal().exception.SandboxTimeoutError):
            await self._sandbox.wait.aio(raise_on_termination=False)


async def _first_bytes(stream: Any, limit: int) -> str:
    """Reads a stream to its end, so that the process can end, and keeps its first bytes."""
    kept = bytearray()
    # Modal would decode the output itself, and fail on bytes that are not UTF-8.
    with contextlib.suppress(UnicodeDecodeError):
        async for piece in stream:
            data = piece.encode() if isinstance(piece, str) else piece
            kept += data[: limit - len(kept)]
    return kept.decode(errors="replace")


class ModalSandboxPool:
    """Runs each command in a fresh Modal sandbox, with ``pool_size`` sandboxes started in advance.

    Create the pool inside a running event loop. Environment variables set its defaults.
    """

    def __init__(
        self,
        *,
        pool_size: int | None = None,
        sandbox_timeout_secs: int = 1200,
        image: Any = None,
        app_name: str = "tinker-cookbook-runner",
    ) -> None:
        self._size = pool_size or int(os.environ.get("MODAL_POOL_SIZE", "32"))
        self._rate = int(os.environ.get("MODAL_CREATION_RATE_LIMIT", "4"))
        self._timeout = sandbox_timeout_secs
        self._image = image
        self._app_name = app_name
        self._ready: asyncio.Queue[ModalSandbox] = asyncio.Queue()
        self._used: list[ModalSandbox] = []
        self._active = 0
        self._terminated = False
        _modal()  # raise for a missing package here: later calls would wait forever
        self._keeper = asyncio.create_task(self._keep_ready())

    async def _keep_ready(self) -> None:
        while not self._terminated:
            try:
                await self._refill()
            except Exception:
                logger.exception("ModalSandboxPool: sandboxes cannot be made; trying again")
            await asyncio.sleep(_RETRY_SECONDS)

    async def _refill(self) -> None:
        used, self._used = self._used, []
        await asyncio.gather(*(sandbox.cleanup() for sandbox in used), return_exceptions=True)
        missing = self._size - self._ready.qsize() - self._active
        made = await asyncio.gather(
            *(
                ModalSandbox.create(self._app_name, self._timeout, self._image)
                for _ in range(min(self._rate, missing))
            ),
            return_exceptions=True,
        )
        for sandbox in made:
            if isinstance(sandbox, BaseException):
                logger.error("ModalSandboxPool: a sandbox was not made: %r", sandbox)
            else:
                self._ready.put_nowait(sandbox)

    async def run_in_workdir(
        self,
        files: dict[str, str],
        command: list[str],
        timeout: int | None = None,
        max_output_bytes: int | None = None,
    ) -> SandboxResult:
        """Writes ``files`` into an empty work folder and runs ``command`` there.

        ``max_output_bytes`` of stdout, and of stderr, are kept; default: those of a sandbox.

        Raises:
            SandboxError: The pool was terminated.
            SandboxTerminatedError: Modal ended the sandbox.
        """
        if self._terminated:
            raise SandboxError("ModalSandboxPool: it was terminated; make a new one")
        sandbox = await self._ready.get()
        self._active += 1
        try:
            folder = "/workspace/task"
            made = await sandbox.run_command(f"mkdir -p {folder}", timeout=timeout or 60)
            if made.exit_code:
                raise SandboxError(f"{folder}: cannot be made: {made.stderr}")
            for name, content in files.items():
                written = await sandbox.write_file(f"{folder}/{name}", content)
                if written.exit_code:
                    raise SandboxError(f"{name}: cannot be written: {written.stderr}")
            return await sandbox.run_command(
                shlex.join(command),
                workdir=folder,
                timeout=timeout or self._timeout,
                max_output_bytes=max_output_bytes,
            )
        finally:
            self._active -= 1
            self._used.append(sandbox)

    async def terminate(self) -> None:
        """Waits for running commands, and ends all sandboxes."""
        self._terminated = True
        self._keeper.cancel()
        while self._active:
            await asyncio.sleep(0.1)
        sandboxes = [*self._used, *(self._ready.get_nowait() for _ in range(self._ready.qsize()))]
        self._used = []
        await asyncio.gather(*(s.cleanup() for s in sandboxes), return_exceptions=True)
