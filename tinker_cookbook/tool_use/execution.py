"""Execution of a call: time limit, output limit, limit on concurrent calls."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.exceptions import BackendError, ConfigurationError, SandboxError
from tinker_cookbook.rl.rollouts.async_utils import Slots, bounded, contained
from tinker_cookbook.tool_use.results import as_tool_result, completed, error_tool_result
from tinker_cookbook.tool_use.types import Tool, ToolInput, ToolResult
from tinker_cookbook.utils.activity import activity
from tinker_cookbook.utils.error_logs import where_raised

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_SECONDS = 300.0
DEFAULT_MAX_OUTPUT_CHARS = 16_384
MAX_ABANDONED_CALLS = 32
"""Maximum number of calls of a tool that still run in threads after their timeout."""


class ToolUnavailableError(BackendError):
    """Something that a tool depends on failed, for a reason outside the call.

    A tool may raise it. The call then has ``error_type="unavailable"``, and by default the episode
    fails instead of being scored.
    """


@dataclass(frozen=True)
class ToolSettings:
    """How a tool is run."""

    timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS
    """Time limit of one call; ``None``: no limit."""
    max_output_chars: int | None = DEFAULT_MAX_OUTPUT_CHARS
    """The middle of a longer text is removed; ``None``: no limit."""
    max_concurrency: int | None = None
    """Concurrent calls on one event loop; other calls wait, and waiting does not count as part of
    their timeout. ``None``: no limit, except that sync methods of one object run one after the
    other."""
    record: bool = False
    """Whether results are recorded, so that a resumed run gets the same ones (see
    ``recording``)."""

    def __post_init__(self) -> None:
        for name, low in (("timeout_seconds", 0), ("max_output_chars", 1), ("max_concurrency", 1)):
            value = getattr(self, name)
            if value is not None and (value < low or value == 0):
                expected = "above 0" if low == 0 else f"at least {low}"
                raise ConfigurationError(f"{name}: got {value}, expected {expected}, or None")


def settings_of(tool: Tool) -> ToolSettings:
    """Returns the settings of a tool; the defaults for a class without ``settings``."""
    settings = getattr(tool, "settings", None)
    return settings if isinstance(settings, ToolSettings) else ToolSettings()


class CallState:
    """What the calls of one tool share: the limit on concurrent calls."""

    def __init__(self, slots: Slots | None = None) -> None:
        self.slots = slots or Slots(None)
        self._abandoned: list[threading.Event] = []

    def abandon(self, done: threading.Event) -> None:
        """Counts a call that may still run in a thread after its timeout, until it is done."""
        self._abandoned.append(done)

    @property
    def num_abandoned(self) -> int:
        """Number of calls that still run after their timeout."""
        self._abandoned = [done for done in self._abandoned if not done.is_set()]
        return len(self._abandoned)


async def guarded(
    work: Callable[[], Awaitable[Any]],
    settings: ToolSettings,
    name: str,
    call_id: str | None,
    state: CallState | None = None,
) -> ToolResult:
    """Runs one call within its limits; never raises an error of the tool.

    ``work`` returns what the tool returns. A failure becomes a result with an ``error_type``.
    """
    state = state or CallState()
    seconds = settings.timeout_seconds

    def failed(message: str, error_type: str) -> ToolResult:
        result = error_tool_result(message, error_type=error_type)
        completed(result, name, call_id, settings.max_output_chars)
        return result

    if (stuck := state.num_abandoned) >= MAX_ABANDONED_CALLS:
        message = f"{stuck} earlier calls of tool '{name}' still run after their timeout"
        return failed(message, "unavailable")
    try:
        async with state.slots.one():
            # A tool that calls sys.exit, or whose own work is cancelled, must not end the run.
            with activity().waiting(f"tool {name}"):
                value = await bounded(contained(work()), seconds, _CallTimeoutError)
        result = as_tool_result(value, name)
    except _CallTimeoutError:
        return failed(f"Tool execution timed out after {seconds:g} seconds", "timed_out")
    except (BackendError, SandboxError, ConnectionError) as error:
        logger.warning("tool %s is unavailable: %s", name, error)
        return failed(f"Tool is unavailable: {error}", "unavailable")
    except Exception as error:
        _log_once(name, error)
        return failed(
            f"Tool execution failed: {str(error) or type(error).__name__}", "execution_failed"
        )
    completed(result, name, call_id, settings.max_output_chars)
    return result


class _CallTimeoutError(Exception):
    """Raised at the time limit; a ``TimeoutError`` may come from the tool itself."""


_logged: set[tuple[str, type[Exception]]] = set()


def _log_once(name: str, error: Exception) -> None:
    """Logs the first error of each type and the line that raised it, since it may be a bug."""
    key = (name, type(error))
    if key in _logged:
        return
    _logged.add(key)
    logger.warning(
        "tool %s: %s: %s%s; the model sees this as the result of its call; later errors of this "
        "type are not logged",
        name,
        type(error).__name__,
        error,
        where_raised(error),
    )


async def run_tool(tool: Tool, input: ToolInput) -> ToolResult:
    """Runs one call of any tool; a failure becomes a result with an ``error_type``."""
    if getattr(tool, "runs_guarded", False):
        return await tool.run(input)
    return await guarded(lambda: tool.run(input), settings_of(tool), tool.name, input.call_id)
