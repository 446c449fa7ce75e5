"""How a recipe starts: ``key=value`` arguments into a config, errors as sentences."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import chz
from chz.blueprint import (
    ConstructionException,
    ExtraneousBlueprintArg,
    InvalidBlueprintArg,
    MissingBlueprintArg,
)

from tinker_cookbook.exceptions import ConfigurationError, TinkerCookbookError, nearest
from tinker_cookbook.utils.help_text import choices_of, describe_type, help_text, keys_of
from tinker_cookbook.utils.refusals import refusal_of

_SEE_HELP = " (--help lists the keys)"
_HELP = ("--help", "-h")
_WRONG_VALUE = re.compile(r"argument '(?P<got>.*)' provided for param '(?P<key>[^']*)'")
_UNKNOWN_KEY = re.compile(r"Extraneous argument '(?P<key>[^']*)'")
_CHZ_ERRORS = (
    ConstructionException,
    ExtraneousBlueprintArg,
    InvalidBlueprintArg,
    MissingBlueprintArg,
)
_INTERRUPTED = 130  # what shells give a program that Ctrl-C ended


def run_entrypoint(main: Callable[[Any], Any]) -> None:
    """Parses the command line into the config that ``main`` takes, and runs it.

    ``--help`` lists the keys; a misspelt key names the nearest right one. Errors that this package
    raises on purpose, and what a Tinker server refuses, end the program with their sentence and
    exit code 1, Ctrl-C with 130; other errors keep their traceback.
    """
    try:
        result = main(parse_arguments(_config_class(main), sys.argv[1:]))
        if inspect.isawaitable(result):
            asyncio.run(_finish(result))
    except KeyboardInterrupt:
        _leave_at_once()
    except Exception as error:
        said = str(error) if isinstance(error, TinkerCookbookError) else refusal_of(error)
        if said is None:
            raise
        print(f"\n{type(error).__name__}: {said}", file=sys.stderr)
        sys.exit(1)


def parse_arguments(config_class: type[Any], arguments: Sequence[str]) -> Any:
    """The config that ``key=value`` arguments (also ``--key=value``) describe.

    Raises:
        ConfigurationError: An unknown key, a value of another type, a required key left out.
        SystemExit: ``--help`` was asked for, and printed.
    """
    if any(argument in _HELP for argument in arguments):
        _print_help(config_class)
        sys.exit(0)
    for argument in arguments:
        if "=" not in argument:
            raise ConfigurationError(
                f"command line: got {argument!r}, expected key=value"
                f"{nearest(argument.lstrip('-'), [key.name for key in keys_of(config_class)])}"
                f"{_SEE_HELP}"
            )
    try:
        return chz.Blueprint(config_class).make_from_argv(list(arguments), allow_hyphens=True)
    except _CHZ_ERRORS as error:
        raise ConfigurationError(_in_words(str(error), config_class)) from error


def _in_words(message: str, config_class: type[Any]) -> str:
    """chz's message as a sentence of ours where its kind is known, else as it is."""
    keys = {key.name: key for key in keys_of(config_class)}
    if unknown := _UNKNOWN_KEY.search(message):
        name = unknown["key"]
        return f"{name}: there is no such key{nearest(name, keys)}{_SEE_HELP}"
    wrong = _WRONG_VALUE.search(message)
    if wrong and wrong["key"] in keys:
        kind = keys[wrong["key"]].type
        return (
            f"{wrong['key']}: got {wrong['got']!r}, expected {describe_type(kind)}"
            f"{nearest(wrong['got'], choices_of(kind))}"
        )
    return f"command line: {message.strip()}{_SEE_HELP}"


def _config_class(main: Callable[[Any], Any]) -> type[Any]:
    """The annotation of the function's one parameter."""
    name = next(iter(inspect.signature(main).parameters))
    return inspect.get_annotations(main, eval_str=True)[name]


def _command() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {spec.name}" if spec is not None else f"python {Path(sys.argv[0]).name}"


def _print_help(config_class: type[Any]) -> None:
    try:
        print(help_text(config_class, _command()), flush=True)
    except BrokenPipeError:  # `--help | head`; else Python complains once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def _finish(result: Any) -> Any:
    return await result


def _leave_at_once() -> None:
    # The engine's thread may be in the middle of a long step, and a normal exit would wait for it.
    # What it was doing is lost; files are safe, as they are when a run is killed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_INTERRUPTED)
