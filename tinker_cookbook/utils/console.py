"""The one rich console: a live progress bar and log lines must share it to not overwrite each
other."""

from __future__ import annotations

from functools import cache

from rich.console import Console


@cache
def get_console() -> Console:
    """The console on standard output; it follows ``sys.stdout`` when that is replaced."""
    return Console(soft_wrap=False, highlight=False)


def is_terminal() -> bool:
    """Whether a person watches standard output."""
    return get_console().is_terminal
