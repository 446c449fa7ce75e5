"""How a recipe starts: ``key=value`` arguments into a config, errors as sentences."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from typing import Any

import chz

from tinker_cookbook.exceptions import TinkerCookbookError


def run_entrypoint(main: Callable[[Any], Any]) -> None:
    """Parses the command line into the config that ``main`` takes, and runs it.

    ``--help`` lists the keys; a misspelt key names the nearest right one. Errors that this package
    raises on purpose end the program with their sentence; others keep their traceback.
    """

    def call(config: Any) -> None:
        result = main(config)
        if inspect.isawaitable(result):
            asyncio.run(_finish(result))

    try:
        chz.nested_entrypoint(_with_signature_of(main, call))
    except TinkerCookbookError as error:
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


async def _finish(result: Any) -> Any:
    return await result


def _with_signature_of(main: Callable[[Any], Any], call: Callable[[Any], None]) -> Any:
    """chz reads the config's class from the annotation of the function's one parameter."""
    call.__annotations__ = dict(inspect.get_annotations(main, eval_str=True), **{"return": None})
    name = next(iter(inspect.signature(main).parameters))
    call.__annotations__ = {"config": call.__annotations__[name], "return": None}
    call.__doc__ = main.__doc__
    return call
