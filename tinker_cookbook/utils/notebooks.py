"""Output and threads in notebooks: kernels of Jupyter, and marimo."""

from __future__ import annotations

import sys
import threading
from typing import Any


def in_jupyter() -> bool:
    """Returns whether this process is a kernel of Jupyter."""
    return "ipykernel" in sys.modules


def in_marimo() -> bool:
    """Returns whether a marimo notebook runs, and not as a script."""
    return "marimo" in sys.modules and sys.modules["marimo"].running_in_notebook()


def in_notebook() -> bool:
    """Returns whether a notebook runs the program."""
    return in_jupyter() or in_marimo()


def thread_class() -> type[threading.Thread]:
    """Returns the class of threads whose output belongs to the cell that starts them."""
    return sys.modules["marimo"].Thread if in_marimo() else threading.Thread


class CellLine:
    """A line in the output of a cell, which later calls replace."""

    def __init__(self) -> None:
        self._display: Any = None

    def show(self, line: str) -> None:
        """Shows the line."""
        if in_marimo():
            marimo = sys.modules["marimo"]
            marimo.output.replace(marimo.plain_text(line))
            return
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        data = {"text/plain": line}
        if self._display is None:
            self._display = display(data, raw=True, display_id=True)
        else:
            self._display.update(data, raw=True)
