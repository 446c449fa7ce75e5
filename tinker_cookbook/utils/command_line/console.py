"""The console command: ``tinker-cookbook PROGRAM key=value ...``, as ``python -m`` in any folder.

A program is named by its module without ``tinker_cookbook.`` or ``recipes.``: ``sl_basic``,
``math_rl.train``, ``eval``, ``eval.compare``.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.command_line.entrypoint import run_program
from tinker_cookbook.utils.command_line.programs import (
    LIBRARY,
    module_of,
    print_whole,
    recipes_package,
    run_listing,
)


def main() -> None:
    """Runs the program that the first argument names, or lists the programs."""
    # As with `python -m`, the user's own modules are found in the working folder.
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    name, *given = sys.argv[1:] or ["--help"]
    if name.startswith("-"):
        packages = (recipes_package(), LIBRARY)
        run_program(lambda: run_listing(packages, sys.argv[1:], "tinker-cookbook"))
        return
    if name == "completion":
        completion = importlib.import_module("tinker_cookbook.utils.command_line.completion")
        run_program(lambda: print_whole(completion.completion(*given[:1] or [""])))
        return
    try:
        module = module_of(name)
    except ConfigurationError as error:
        sys.exit(f"\nConfigurationError: {error}")
    sys.argv[1:] = given
    # With ``alter_sys`` the module is ``sys.modules["__main__"]``, as with `python -m`.
    runpy.run_module(module, run_name="__main__", alter_sys=True)
