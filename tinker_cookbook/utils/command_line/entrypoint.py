"""Starts a program: parses ``key=value`` arguments into a config and prints errors as sentences."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import chz

from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.utils.command_line.arguments import parse_arguments
from tinker_cookbook.utils.command_line.keys import also_named

__all__ = [
    "also_named",
    "parse_arguments",
    "program_takes",
    "run_entrypoint",
    "run_program",
    "server_error_message",
]

_FRAME = re.compile(r"^Request failed: (.*) for self\.request_id=.*$", re.DOTALL)
"""What the SDK puts around the words of a request that failed later."""


def server_error_message(error: BaseException) -> str | None:
    """Returns the server's words, or the whole error where it gave none; None for errors of
    other kinds.

    Goes by the attributes of the SDK's errors, as who asks may not have loaded it.
    """
    if type(error).__module__.partition(".")[0] != "tinker":
        return None
    status = getattr(error, "status_code", None)
    if isinstance(status, int) and 400 <= status < 500:
        body = getattr(error, "body", None)
        said = body.get("detail") if isinstance(body, dict) else None
        return said if isinstance(said, str) else str(error)
    if str(getattr(error, "category", None)) == "user":
        return _FRAME.sub(r"\1", str(error))
    return None


_INTERRUPTED = 130  # what shells give a program that Ctrl-C ended


def run_entrypoint(main: Callable[[Any], Any]) -> None:
    """Parses the command line into the config that ``main`` takes, and runs it.

    ``--help`` lists the keys; a misspelt key names the nearest right one. Errors that this package
    raises on purpose, and what a Tinker server refuses, end the program with their sentence and
    exit code 1, Ctrl-C with 130; other errors keep their traceback.
    """

    def program() -> Any:
        imported = _imported(main)
        return imported(parse_arguments(_config_class(imported), sys.argv[1:]))

    run_program(program)


def run_program(program: Callable[[], Any]) -> None:
    """Calls ``program``, awaits what it returns, and ends as ``run_entrypoint`` does."""
    try:
        result = program()
        if inspect.isawaitable(result):
            asyncio.run(_finish(result))
    except KeyboardInterrupt:
        _leave_at_once()
    except Exception as error:
        said = str(error) if isinstance(error, TinkerCookbookError) else server_error_message(error)
        if said is None:
            raise
        print(f"\n{type(error).__name__}: {said}", file=sys.stderr)
        sys.exit(1)


def _imported(main: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns ``main`` of the module under its own name, where ``python -m`` runs it as
    ``__main__``.

    So the classes of a saved config are those that another program imports.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if main.__module__ != "__main__" or spec is None or spec.name.endswith("__main__"):
        return main
    return getattr(importlib.import_module(spec.name), main.__name__)


def program_takes(key: str) -> bool:
    """Returns whether the program that runs has this key; true where it cannot be told."""
    main: Any = getattr(sys.modules["__main__"], "main", None)
    try:
        return key in chz.chz_fields(_config_class(main))
    except (TypeError, ValueError, StopIteration, NameError, KeyError, AttributeError):
        return True  # a script of another form


def _config_class(main: Callable[[Any], Any]) -> type[Any]:
    """Returns the annotation of the function's one parameter."""
    name = next(iter(inspect.signature(main).parameters))
    return inspect.get_annotations(main, eval_str=True)[name]


async def _finish(result: Any) -> Any:
    return await result


def _leave_at_once() -> None:
    # The engine's thread may be in the middle of a long step, and a normal exit would wait for it.
    # What it was doing is lost; files are safe, as they are when a run is killed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_INTERRUPTED)
