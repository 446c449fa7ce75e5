"""Interface of a sandbox: run commands, read and write files, heartbeat, cleanup."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import chz

from tinker_cookbook.exceptions import ConfigurationError, SandboxError


@chz.chz
class SandboxResult:
    """Result of a command, a read or a write in a sandbox.

    A command that fails is a result, not an exception: exceptions mean that the sandbox failed.
    """

    stdout: str
    stderr: str
    exit_code: int
    """Exit status of the command; 128 + n if signal n ended it, 124 if it ran out of time."""
    metrics: dict[str, Any] = chz.field(default_factory=dict)
    """Measurements of the run, such as ``seconds``, ``cpu_seconds``, ``timed_out``."""


class SandboxTerminatedError(SandboxError):
    """The sandbox no longer exists: it was released, its lifetime ended, or it died."""


class SandboxInfrastructureError(SandboxError):
    """Code could not be run or graded, for a reason outside the code.

    Such an episode has no reward. Let the exception leave the environment: the rollout strategy
    retries the episode or leaves it out of training. Never turn it into a reward of 0.
    """


class SandboxUnavailableError(ConfigurationError, SandboxError):
    """This machine cannot isolate programs. The message names what to install."""


@runtime_checkable
class SandboxInterface(Protocol):
    """An environment with its own files that runs commands isolated from the host."""

    @property
    def sandbox_id(self) -> str:
        """Name of this sandbox in logs."""
        ...

    async def send_heartbeat(self, timeout: int = 30) -> None:
        """Extends the lifetime of the sandbox, if it is limited.

        Raises:
            SandboxTerminatedError: The sandbox no longer exists.
        """
        ...

    async def run_command(
        self,
        command: str,
        workdir: str | None = None,
        timeout: int = 60,
        max_output_bytes: int | None = None,
    ) -> SandboxResult:
        """Runs a shell command and waits for it.

        Args:
            command: One or more lines of shell.
            workdir: Folder in the sandbox; None: the default work folder.
            timeout: Seconds until the command and all processes that it started are killed.
            max_output_bytes: Bytes that are kept of stdout, and of stderr; the rest is dropped.
                None: the sandbox's default.

        Raises:
            SandboxTerminatedError: The sandbox no longer exists, or died during the command.
        """
        ...

    async def read_file(
        self, path: str, max_bytes: int | None = None, timeout: int = 60
    ) -> SandboxResult:
        """Returns a file's text as ``stdout``, or an error message as ``stderr``.

        Args:
            path: Path in the sandbox. Links are followed inside the sandbox only.
            max_bytes: Maximum bytes to read from the start.
            timeout: Seconds.
        """
        ...

    async def write_file(
        self, path: str, content: str | bytes, executable: bool = False, timeout: int = 60
    ) -> SandboxResult:
        """Writes a file and the folders above it.

        Args:
            path: Path in the sandbox.
            content: Text is written as UTF-8.
            executable: Sets the executable bits.
            timeout: Seconds.
        """
        ...

    async def cleanup(self) -> None:
        """Ends all processes in the sandbox and deletes its files; safe to call twice."""
        ...


class SandboxResource:
    """A sandbox shared by the members of a group or by a tool."""

    def __init__(self, sandbox: SandboxInterface) -> None:
        self.sandbox: SandboxInterface = sandbox

    async def send_heartbeat(self, timeout: int = 30) -> None:
        """Extends the lifetime of the sandbox."""
        await self.sandbox.send_heartbeat(timeout=timeout)

    async def cleanup(self) -> None:
        """Releases the sandbox."""
        await self.sandbox.cleanup()
