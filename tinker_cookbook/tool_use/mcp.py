"""Tools of any MCP server, with the ``mcp`` package 1.14 to 2.x (extra ``mcp``).

    async with await mcp_tools("python my_server.py") as tools:
        env = build_agent_tool_env(renderer, tools, messages, reward_fn)

All connections run in one background thread, so they can be opened, used and closed
from any event loop and task.
"""

# The package is optional. Without it, the type checker resolves ``mcp`` to this file.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.renderers.core.arguments import to_json
from tinker_cookbook.rl.rollouts.async_utils import Slots
from tinker_cookbook.tool_use.execution import (
    DEFAULT_MAX_OUTPUT_CHARS,
    CallState,
    ToolSettings,
    ToolUnavailableError,
    guarded,
)
from tinker_cookbook.tool_use.results import simple_tool_result
from tinker_cookbook.tool_use.types import ToolInput, ToolResult, ToolSpec
from tinker_cookbook.utils.imports import missing_extra

Source: TypeAlias = Any
"""A command (text or list), a URL, a server object of the ``mcp`` package, or a single-use
transport: an async context manager that returns two streams."""

T = TypeVar("T")

_CLOSE_SECONDS = 10.0
_STDERR_CHARS = 500


async def mcp_tools(
    source: Source,
    *,
    only: Sequence[str] | None = None,
    prefix: str = "",
    timeout_seconds: float | None = 60.0,
    max_output_chars: int | None = DEFAULT_MAX_OUTPUT_CHARS,
    max_concurrency: int | None = None,
    record: bool = True,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    start_timeout_seconds: float = 60.0,
) -> MCPTools:
    """Connects to a server and returns its tools; close them when they are no longer used.

    If the server ends during a call, the result has ``error_type="unavailable"``; the next call
    starts it again.

    Args:
        source: See ``Source``. A command gets only a few environment variables, such as ``PATH``,
            and the variables of ``env``.
        only: Names of the tools to return; default: all.
        prefix: Prefix of each tool name, to distinguish the tools of several servers.
        timeout_seconds: Time limit of one call.
        max_output_chars: The middle of a longer text is removed.
        max_concurrency: Concurrent calls of one tool.
        record: Whether results are recorded for a resumed run.
        env: Environment variables of a command.
        cwd: Working folder of a command.
        start_timeout_seconds: Time limit of the start.

    Raises:
        ConfigurationError: The package, the command, or a tool of ``only`` is missing.
        ToolUnavailableError: The server did not start; the message ends with its stderr.
    """
    server = _Server(source, dict(env or {}), cwd, start_timeout_seconds)
    server.check()
    declared = await server.open()
    names = [tool.name for tool in declared]
    for name in only or ():
        if name not in names:
            await server.close()
            raise ConfigurationError(
                f"only: the server has no tool {name!r}{nearest(name, names)}; it has "
                f"{', '.join(names) or 'none'}"
            )
    settings = ToolSettings(
        timeout_seconds=timeout_seconds,
        max_output_chars=max_output_chars,
        max_concurrency=max_concurrency,
        record=record,
    )
    chosen = [tool for tool in declared if only is None or tool.name in only]
    return MCPTools(server, [MCPTool(server, tool, prefix, settings) for tool in chosen])


class MCPTools(list["MCPTool"]):
    """Tools of one server; also an async context manager that closes the connection."""

    def __init__(self, server: _Server, tools: Sequence[MCPTool]) -> None:
        super().__init__(tools)
        self._server = server

    async def close(self) -> None:
        """Closes the connection and ends the started server; may be called twice."""
        await self._server.close()

    async def __aenter__(self) -> MCPTools:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class MCPTool:
    """One tool of a server."""

    runs_guarded = True

    def __init__(self, server: _Server, declared: Any, prefix: str, settings: ToolSettings) -> None:
        self._server, self._declared_name = server, str(declared.name)
        self.name = prefix + self._declared_name
        self.description = declared.description or ""
        self.parameters_schema: dict[str, Any] = _either(declared, "input_schema", "inputSchema")
        self.settings = settings
        self._state = CallState(Slots(settings.max_concurrency))

    def to_spec(self) -> ToolSpec:
        """Returns the declaration for the model."""
        return ToolSpec(
            name=self.name, description=self.description, parameters=self.parameters_schema
        )

    async def run(self, input: ToolInput) -> ToolResult:
        """Runs one call; the server checks its arguments."""

        async def call() -> ToolResult:
            return _as_result(await self._server.call(self._declared_name, input.arguments))

        return await guarded(call, self.settings, self.name, input.call_id, self._state)


def _as_result(answer: Any) -> ToolResult:
    """Returns the texts of an answer; other content is described in a few words."""
    texts: list[str] = []
    for part in answer.content:
        resource = getattr(part, "resource", None)
        text = getattr(part, "text", None) or getattr(resource, "text", None)
        if text is None:
            size = len(getattr(part, "data", "") or getattr(resource, "blob", "") or "")
            mime = _either(resource or part, "mime_type", "mimeType") or part.type
            text = f"[{mime}, {size} characters of base64]"
        texts.append(text)
    structured = _either(answer, "structured_content", "structuredContent")
    if not texts and structured is not None:
        texts = [to_json(structured)]
    failed = _either(answer, "is_error", "isError")
    return simple_tool_result(
        "\n".join(texts), metadata={"error": "execution_failed"} if failed else {}
    )


def _either(value: Any, new: str, old: str) -> Any:
    """Returns an attribute by its name in mcp 2 or its name in mcp 1."""
    return getattr(value, new, getattr(value, old, None))


# --- one event loop for all connections -----------------------------------------------------------


class _Loop:
    """Event loop in a daemon thread, started at the first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = 0

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine there; cancelling the caller cancels it."""
        with self._lock:
            # After a fork, the child has the loop but not its thread.
            if self._loop is None or self._process != os.getpid():
                self._loop, self._process = asyncio.new_event_loop(), os.getpid()
                threading.Thread(
                    target=self._loop.run_forever, name="mcp-connections", daemon=True
                ).start()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return await asyncio.wrap_future(future)


_loop = _Loop()


@dataclass
class _Server:
    """A server and its connection; reconnects after the server has ended."""

    source: Source
    env: dict[str, str]
    cwd: str | None
    start_timeout_seconds: float
    _connection: _Connection | None = field(default=None, init=False)
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _closed: bool = field(default=False, init=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the source: another process opens its own connection."""
        return _Server, (self.source, self.env, self.cwd, self.start_timeout_seconds)

    @property
    def description(self) -> str:
        """The source, for error messages."""
        command = self.command
        if command is not None:
            return shlex.join(command)
        return self.source if isinstance(self.source, str) else type(self.source).__name__

    @property
    def command(self) -> list[str] | None:
        """Program and arguments; ``None`` for other sources."""
        if isinstance(self.source, str):
            is_url = self.source.startswith(("http://", "https://"))
            return None if is_url else shlex.split(self.source)
        return list(self.source) if isinstance(self.source, list | tuple) else None

    def check(self) -> None:
        """Raises ``ConfigurationError`` if the package or the command is missing."""
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise missing_extra("mcp_tools: MCP servers", error, "mcp") from error
        command = self.command
        if command is not None and (not command or shutil.which(command[0]) is None):
            raise ConfigurationError(
                f"source: got {self.source!r}, expected a command whose program is installed, a "
                "URL with http:// or https://, or a server object"
            )

    async def open(self) -> list[Any]:
        """Connects, if there is no connection, and returns the declared tools."""
        return await _loop.run(self._open())

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Returns the answer of a tool; raises ``ToolUnavailableError``."""
        return await _loop.run(self._call(name, arguments))

    async def close(self) -> None:
        """Ends the connection and the server."""
        self._closed = True
        await _loop.run(self._close())

    async def _open(self) -> list[Any]:
        async with self._opening:
            if self._connection is None or self._connection.is_over:
                connection = _Connection(self)
                await connection.start()
                self._connection = connection
            return self._connection.tools

    async def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        if self._closed:
            raise ToolUnavailableError(f"the connection to {self.description} is closed")
        await self._open()
        assert self._connection is not None
        return await self._connection.call(name, arguments)

    async def _close(self) -> None:
        async with self._opening:
            if self._connection is not None:
                await self._connection.close()
                self._connection = None


class _Connection:
    """One session with a server, from its start to its end."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self.tools: list[Any] = []
        self._session: Any = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the session ends
        self._asked_to_close = asyncio.Event()
        self._ready = asyncio.Event()
        # The end of the session; its result is the reason.
        self.ended: asyncio.Task[str] = asyncio.create_task(self._run())

    @property
    def is_over(self) -> bool:
        """Whether the session has ended, or is about to."""
        return self.ended.done() or self._asked_to_close.is_set()

    async def start(self) -> None:
        """Waits until the server has listed its tools."""
        ready = asyncio.create_task(self._ready.wait())
        seconds = self._server.start_timeout_seconds
        await asyncio.wait({ready, self.ended}, timeout=seconds, return_when="FIRST_COMPLETED")
        if not ready.done():
            ready.cancel()
            timed_out = not self.ended.done()
            reason = f"no answer within {seconds:g} s" if timed_out else self.ended.result()
            message = self._failure("did not start", reason)
            await self.close()
            raise ToolUnavailableError(message)

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Returns the answer; raises ``ToolUnavailableError`` if the server ends meanwhile."""
        work = asyncio.ensure_future(self._session.call_tool(name, arguments))
        try:
            await asyncio.wait({work, self.ended}, return_when="FIRST_COMPLETED")
            # Lets the session task notice a closed connection before the call is blamed for it.
            await asyncio.sleep(0)
        finally:
            work.cancel()
        error = work.exception() if work.done() and not work.cancelled() else None
        if work.done() and not work.cancelled() and error is None:
            return work.result()
        if error is not None and not self.ended.done() and not _is_closed(error):
            raise error
        self._asked_to_close.set()  # a connection without its server is useless
        raise ToolUnavailableError(self._failure("ended during the call", str(error or "")))

    async def close(self) -> None:
        """Ends the session; one that does not end is cancelled."""
        self._asked_to_close.set()
        if self._ready.is_set():
            await asyncio.wait({self.ended}, timeout=_CLOSE_SECONDS)
        if not self.ended.done():
            self.ended.cancel()
            await asyncio.wait({self.ended}, timeout=_CLOSE_SECONDS)

    async def _run(self) -> str:
        try:
            async with _session(self._server, self._stderr) as session:
                self._session = session
                page = await session.list_tools()
                self.tools += page.tools
                while cursor := _either(page, "next_cursor", "nextCursor"):
                    page = await session.list_tools(cursor=cursor)
                    self.tools += page.tools
                self._ready.set()
                await self._asked_to_close.wait()
            return "closed"
        except asyncio.CancelledError:
            return "cancelled"
        except BaseException as error:
            return _reason(error)

    def _failure(self, what: str, reason: str) -> str:
        with suppress(OSError, ValueError):
            size = self._stderr.seek(0, os.SEEK_END)
            self._stderr.seek(max(0, size - _STDERR_CHARS))
            text = self._stderr.read().decode("utf-8", "replace")
            stderr = " | ".join(filter(None, map(str.strip, text.splitlines()[-3:])))
            reason = f"{reason}; its stderr ends with: {stderr}" if stderr else reason
        return f"the MCP server {self._server.description} {what}" + (
            f" ({reason})" if reason else ""
        )


def _reason(error: BaseException) -> str:
    """Returns the innermost error of exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _is_closed(error: BaseException) -> bool:
    """Returns whether the connection failed, and not the call."""
    names = ("ClosedResourceError", "BrokenResourceError", "EndOfStream", "ConnectError")
    text = f"{type(error).__name__}: {error}".lower()
    return type(error).__name__ in names or "connection closed" in text


@asynccontextmanager
async def _session(server: _Server, stderr: Any) -> AsyncIterator[Any]:
    """Yields an initialised ``ClientSession``; the differences between mcp 1 and 2 are here."""
    from mcp import ClientSession, StdioServerParameters
    from mcp.client import streamable_http
    from mcp.client.sse import sse_client
    from mcp.client.stdio import get_default_environment, stdio_client

    source, command = server.source, server.command
    async with AsyncExitStack() as stack:
        if command is not None:
            env = {**get_default_environment(), **server.env}
            parameters = StdioServerParameters(
                command=command[0], args=command[1:], env=env, cwd=server.cwd
            )
            transport: Any = stdio_client(parameters, errlog=stderr)
        elif isinstance(source, str) and source.rstrip("/").endswith("/sse"):
            transport = sse_client(source)
        elif isinstance(source, str):
            # The newer name first, which mcp 1.14 lacks; mcp 2 lacks the older one.
            names = ("streamable_http_client", "streamablehttp_client")
            found = [getattr(streamable_http, n) for n in names if hasattr(streamable_http, n)]
            transport = found[0](source)
        elif hasattr(source, "__aenter__"):
            transport = source
        else:
            yield await stack.enter_async_context(_in_memory(source))
            return
        # mcp 1 yields a third value for HTTP.
        read, write, *_ = await stack.enter_async_context(transport)
        session = await stack.enter_async_context(ClientSession(read, write))
        await session.initialize()
        yield session


@asynccontextmanager
async def _in_memory(source: Any) -> AsyncIterator[Any]:
    """Yields a session with a server object in this process."""
    try:
        from mcp import Client  # mcp 2
    except ImportError:
        from mcp.shared.memory import create_connected_server_and_client_session

        inner = getattr(source, "_mcp_server", source)
        async with create_connected_server_and_client_session(inner) as session:
            yield session
    else:
        async with Client(source) as client:
            yield client.session
