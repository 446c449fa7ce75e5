"""Messages of Python's ``logging``: what goes to ``logs.log`` and what to the console."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import sysconfig
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from rich.logging import RichHandler

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.terminal import get_console

FILE_ONLY = "_tinker_cookbook_file_only"
RUN_STOPPED = "the run stopped"
"""Message in ``logs.log`` before the traceback of the error that ended a run."""

# These log every request at INFO level, which hides the run's own messages.
_CHATTY = ("httpx", "httpcore", "urllib3", "filelock", "fsspec")
_OURS = "_tinker_cookbook_handler"


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


def configure_logging_module(
    path: str | os.PathLike[str], level: int = logging.INFO
) -> Callable[[], None]:
    """Sends the messages of Python's ``logging`` to the file ``path`` and to the console.

    Handlers of an earlier call are replaced, other handlers stay. Returns a function that removes
    the handlers.

    Raises:
        ConfigurationError: The file cannot be opened.
    """
    root = logging.getLogger()
    # Two runs in one process must not write into each other's log files.
    _remove_handlers(root)
    try:
        to_file = _LogFile(path, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}") from error
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    to_file.setFormatter(plain)
    console = get_console()
    if console.is_terminal:
        # The shared console prints above a live progress bar instead of through it.
        to_person: logging.Handler = RichHandler(console=console, show_path=False, markup=False)
        to_person.setFormatter(logging.Formatter("%(message)s", datefmt="[%X]"))
    else:
        to_person = logging.StreamHandler(sys.stderr)
        to_person.setFormatter(plain)
    to_person.addFilter(FewOfAKind())
    for handler in (to_file, to_person):
        setattr(handler, _OURS, True)
        root.addHandler(handler)
    root.setLevel(level)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    return lambda: _remove_handlers(root)


class _LogFile(logging.FileHandler):
    """A log file that reports a full disk once and does not end the run.

    Files that a run needs raise such errors themselves. Python's own handler would print a
    traceback for every message, and one more when it closes.
    """

    _reported = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Prints once why messages are missing from the file."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._reported:
            self._reported = True
            why = error.strerror or error
            print(f"{self.baseFilename} misses messages from here on: {why}", file=sys.stderr)

    def close(self) -> None:
        """Closes the file, even if its last lines do not fit on the disk."""
        with contextlib.suppress(OSError):
            super().close()


def _remove_handlers(root: logging.Logger) -> None:
    # By the mark, so that handlers of other code stay.
    for handler in [h for h in root.handlers if getattr(h, _OURS, False)]:
        root.removeHandler(handler)
        handler.close()
