"""The console command: ``tinker-cookbook PROGRAM key=value ...``, as ``python -m`` in any folder.

A program is named by its module without ``tinker_cookbook.`` or ``recipes.``: ``sl_basic``,
``math_rl.train``, ``eval``, ``eval.compare``. Commands that a program prints are in the form in
which it was started.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.command_line.programs import (
    LIBRARY,
    RECIPES,
    module_of,
    recipes_package,
    run_listing,
    short_name,
    with_recipes_of_folder,
)

CONSOLE = "tinker-cookbook"
_MODULE = re.compile(rf"(?<![\w./])python -m ((?:{LIBRARY}|{RECIPES})\b[\w.]*\w)")

# How the console command was typed, and the arguments of the program; empty for ``python -m``.
_typed: list[str] = []
_given: list[str] = []


def main() -> None:
    """Runs the program that the first argument names, or lists the programs."""
    # Imported here: the programs import this module for the commands that they print.
    from tinker_cookbook.utils.command_line.entrypoint import run_program

    # As with `python -m`, the user's own modules are found in the working folder.
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    name, *_given[:] = sys.argv[1:] or ["--help"]
    found = shutil.which(CONSOLE)
    on_path = found is not None and os.path.samefile(found, sys.argv[0])
    _typed[:] = [CONSOLE if on_path else sys.argv[0]]
    if name.startswith("-"):
        packages = (recipes_package(), LIBRARY)
        run_program(lambda: run_listing(packages, sys.argv[1:], _typed[0]))
        return
    try:
        module = module_of(name)
    except ConfigurationError as error:
        sys.exit(f"\nConfigurationError: {error}")
    sys.argv[1:] = _given
    # With ``alter_sys`` the module is ``sys.modules["__main__"]``, as with `python -m`.
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def program_command(module: str, *words: str) -> str:
    """Returns the command line that starts a module of this package or of the recipes."""
    if _typed:
        return shlex.join([*_typed, short_name(module), *words])
    # The same interpreter: another "python" may not have the package.
    python = getattr(sys, "orig_argv", ["python"])[0]
    return with_recipes_of_folder(shlex.join([python, "-m", module, *words]))


def started_as() -> tuple[list[str], list[str]] | None:
    """Returns the words that start the running program, and its arguments; None for a script."""
    if _typed:
        spec = sys.modules["__main__"].__spec__
        return [*_typed, *([short_name(spec.name)] if spec else [])], list(_given)
    program = list(getattr(sys, "orig_argv", sys.argv))
    # The kernel of a notebook is started with -m too, but it is no program.
    if "-m" not in program or "ipykernel_launcher" in program:
        return None
    at = program.index("-m") + 2
    return program[:at], program[at:]


def as_started(text: str) -> str:
    """Returns a text in which the commands ``python -m MODULE`` have the form of this start."""
    text = with_recipes_of_folder(text)
    if not _typed:
        return text
    replace: Callable[[re.Match[str]], str] = lambda found: program_command(found[1])  # noqa: E731
    return _MODULE.sub(replace, text)
