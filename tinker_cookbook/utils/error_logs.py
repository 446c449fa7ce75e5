"""What messages say about errors, and which of them only ``logs.log`` gets."""

from __future__ import annotations

import logging
import sysconfig
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

FILE_ONLY = "_tinker_cookbook_file_only"
RUN_STOPPED = "the run stopped"
"""Message in ``logs.log`` before the traceback of the error that ended a run."""


def only_to_file(yes: bool = True) -> dict[str, bool]:
    """Returns the argument ``extra`` of a log message that ``logs.log`` gets, but no console."""
    return {FILE_ONLY: yes}


class FewOfAKind(logging.Filter):
    """Filter of a console: of messages of one kind, three in ten seconds are shown.

    A kind is the logger and the message before its arguments are filled in. ``logs.log`` has all.
    """

    _SHOWN, _SECONDS = 3, 10.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, str], deque[float]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the console shows the message."""
        if getattr(record, FILE_ONLY, False):
            return False
        now = self._clock()
        seen = self._seen.setdefault((record.name, str(record.msg)), deque(maxlen=self._SHOWN))
        if len(seen) == self._SHOWN and now - seen[0] < self._SECONDS:
            return False
        seen.append(now)
        return True


def where_raised(error: BaseException) -> str:
    """Returns ``" (raised at FILE:LINE)"``, or ``""`` for an error without a traceback.

    If a library raised it, the text also names the line of the user's code that called it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    raised = f"raised at {frames[-1].filename}:{frames[-1].lineno}"
    own = next((frame for frame in reversed(frames) if not is_library(frame.filename)), None)
    if own is None or own is frames[-1]:
        return f" ({raised})"
    return f" (at {own.filename}:{own.lineno}, {raised})"


@lru_cache(maxsize=1024)
def is_library(filename: str) -> bool:
    """Returns whether a source file is of Python, an installed package or this package."""
    # Code without a file, such as a text passed to exec, is neither; its caller is named.
    if filename.startswith("<"):
        return True
    paths = sysconfig.get_paths()
    libraries = [paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]]
    libraries.append(str(Path(__file__).parent.parent))  # this package
    return any(Path(filename).is_relative_to(folder) for folder in libraries)
