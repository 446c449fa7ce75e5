"""A run on a server that does not answer for a while, or that restarts.

The weights of a run in training are lost with its server; its checkpoints are kept. With
``server_wait`` the run waits, and continues from the last of them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tinker_cookbook.backends.connect import Connection, forget_kept, server_url
from tinker_cookbook.backends.hosted import PROBE_SECONDS, why_unreachable
from tinker_cookbook.checkpoint_utils import get_last_checkpoint
from tinker_cookbook.training.commands import continue_command
from tinker_cookbook.utils.command_line.entrypoint import UNREACHABLE
from tinker_cookbook.utils.error_logs import only_to_file
from tinker_cookbook.utils.terminal import get_console

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Awaitable[Any]])

_LOOK_SECONDS = 5.0
_REPEATED = ("Session heartbeat failed", "Dropping telemetry batch", "Exception logged for session")
# A run that is interrupted again and again without a new checkpoint would never end.
_MOST_WITHOUT_PROGRESS = 3


def server_is_gone(error: BaseException | None) -> bool:
    """Returns whether an error comes from a session that its server no longer has, or from a
    server that does not answer."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(server_is_gone, error.exceptions))
    if error is None:
        return False
    body = getattr(error, "body", None)
    # By the name: the SDK is not imported where the backend is local.
    of_sdk = type(error).__module__.partition(".")[0] == "tinker"
    if of_sdk and isinstance(body, dict) and body.get("code") == "session_ended":
        return True
    if of_sdk and type(error).__name__ in UNREACHABLE:
        return True
    return server_is_gone(error.__cause__ or error.__context__)


def watch_server(connection: Connection) -> Callable[[], None]:
    """Prints when a connection's server stops answering and when it answers again; returns a
    function that ends this."""
    stop = threading.Event()
    for name in ("telemetry", "internal_client_holder"):
        logging.getLogger(f"tinker.lib.{name}").addFilter(_not_repeated)
    if connection.url is not None and not connection.is_hosted_service:
        given = connection.url, stop
        threading.Thread(target=_watch, args=given, daemon=True, name="server-watch").start()
    return stop.set


def _not_repeated(record: logging.LogRecord) -> bool:
    """Drops messages that the SDK repeats, with tracebacks, while a server does not answer."""
    return not record.getMessage().startswith(_REPEATED)


def _watch(url: str, stop: threading.Event) -> None:
    since = None
    while not stop.wait(_LOOK_SECONDS):
        reason = why_unreachable(url, PROBE_SECONDS)
        if stop.is_set():
            return
        if reason is not None and since is None:
            since = time.time()
            clock = time.strftime("%H:%M:%S", time.localtime(since))
            _print(f"waiting for the server at {url}: no answer since {clock} ({reason})")
        elif reason is None and since is not None:
            _print(f"the server at {url} answers again, after {time.time() - since:.0f} s")
            since = None


def through_restarts(run: F) -> F:
    """Decorates a loop, whose first argument is its config: with ``server_wait``, it continues
    from the last checkpoint when its server has restarted."""

    @functools.wraps(run)
    async def running(config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.server_wait:
            return await run(config, *args, **kwargs)
        tries, saved = 0, _last_step(config)
        while True:
            try:
                return await run(config, *args, **kwargs)
            except Exception as error:
                if not server_is_gone(error):
                    raise
                step = _last_step(config)
                tries, saved = (0 if step != saved else tries + 1), step
                if tries >= _MOST_WITHOUT_PROGRESS or not await _server_is_back(config):
                    if command := continue_command(config.log_path):
                        _print(f"continue with:\n  {command}")
                    raise
            forget_kept(config)

    return running  # type: ignore[return-value]


async def _server_is_back(config: Any) -> bool:
    """Waits up to ``server_wait`` seconds; returns whether the server answers."""
    url = server_url(config)
    assert url is not None  # the local engine has no such errors
    until = time.monotonic() + config.server_wait
    _print(f"the run has lost its server; waiting up to {config.server_wait:g} s for it")
    while (reason := await asyncio.to_thread(why_unreachable, url, PROBE_SECONDS)) is not None:
        if time.monotonic() > until:
            _print(f"{url} does not answer ({reason}); server_wait={config.server_wait:g} is over")
            return False
        await asyncio.sleep(_LOOK_SECONDS)
    _print("the server answers; continuing from the last checkpoint")
    return True


def _last_step(config: Any) -> int | None:
    try:
        last = get_last_checkpoint(config.log_path)
    except OSError:  # the loop refuses such a folder with a sentence
        return None
    return None if last is None else last.batch


def _print(line: str) -> None:
    get_console().print(line, markup=False, highlight=False, soft_wrap=True)
    logger.info(line, extra=only_to_file())
