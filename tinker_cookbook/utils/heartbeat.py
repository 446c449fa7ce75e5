"""A line a minute about what a run waits for, and a warning if code blocks its event loop."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinker_cookbook.utils.activity import Activity, new_activity
from tinker_cookbook.utils.error_logs import is_library, only_to_file
from tinker_cookbook.utils.terminal import get_console

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 60.0
TICK_SECONDS = 0.1
BLOCKED_SECONDS = 0.3
"""Shortest time for which the event loop counts as blocked."""
WARN_SECONDS = 1.0
"""Blocked time of one function, in all, after which a warning names it."""


@contextmanager
def reporting_activity() -> Iterator[Activity]:
    """Gives the block an activity, and prints it once a minute while nothing else is printed.

    Nothing is printed while a live display shows the activity. Code of the user that blocks the
    event loop during rollouts is named in a warning.
    """
    stop = threading.Event()
    with new_activity() as shown:
        # One thread, because blocked code would also block a task of the loop.
        heartbeat = _Heartbeat(shown, stop)
        threading.Thread(target=heartbeat.run, name="heartbeat", daemon=True).start()
        try:
            yield shown
        finally:
            stop.set()


class _Heartbeat:
    def __init__(self, shown: Activity, stop: threading.Event) -> None:
        self._shown, self._stop = shown, stop
        self._console = get_console()
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._asked: float | None = None
        self._culprit: str | None = None
        self._blocked: defaultdict[str, float] = defaultdict(float)
        self._warned: set[str] = set()

    def run(self) -> None:
        quiet_since = self._shown.clock()
        while not self._stop.wait(TICK_SECONDS):
            now = self._shown.clock()
            self._watch_loop(now)
            quiet_since = now if self._shown.shown else max(quiet_since, self._console.printed_at)
            if now - quiet_since < INTERVAL_SECONDS:
                continue
            quiet_since = now
            if sentence := self._shown.sentence():
                self._console.print(f"waiting: {sentence}", markup=False, soft_wrap=True)
                logger.info(sentence, extra=only_to_file())

    def _watch_loop(self, now: float) -> None:
        if self._asked is None:
            self._asked, self._culprit = now, None
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # the loop is closed
                self._stop.set()
        elif now - self._asked >= BLOCKED_SECONDS and self._shown.has_episodes():
            self._culprit = _running_code(self._loop_thread) or self._culprit

    def _answer(self) -> None:
        """Runs on the event loop, late if it was blocked."""
        asked, self._asked = self._asked, None
        culprit = self._culprit
        if asked is None or culprit is None:
            return
        seconds = self._shown.clock() - asked
        self._shown.blocked_seconds += seconds
        self._blocked[culprit] += seconds
        if self._blocked[culprit] >= WARN_SECONDS and culprit not in self._warned:
            self._warned.add(culprit)
            logger.warning(
                "%s blocked the event loop for %.1f s, and with it all other episodes; use "
                "asyncio, or await asyncio.to_thread(...) for code that computes or waits",
                culprit,
                seconds,
            )


def _running_code(thread: int) -> str | None:
    """Returns the innermost function of the user that runs in a callback of the loop."""
    frame = sys._current_frames().get(thread)
    found: str | None = None
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib"):
            return None  # an import takes long only once
        # The cell of a notebook is below everything that its loop runs.
        user = code.co_name != "<module>" and not is_library(code.co_filename)
        if found is None and user:
            found = f"{code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})"
        if code.co_name == "_run" and code.co_filename.endswith("events.py"):
            return found
        frame = frame.f_back
    return None  # the loop does not run a callback
