"""What messages say about errors, and which of them only ``logs.log`` gets."""

from __future__ import annotations

import sysconfig
import traceback
from functools import lru_cache
from pathlib import Path

FILE_ONLY = "_tinker_cookbook_file_only"
RUN_STOPPED = "the run stopped"
"""Message in ``logs.log`` before the traceback of the error that ended a run."""


def only_to_file(yes: bool = True) -> dict[str, bool]:
    """Returns the argument ``extra`` of a log message that ``logs.log`` gets, but no console."""
    return {FILE_ONLY: yes}


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
