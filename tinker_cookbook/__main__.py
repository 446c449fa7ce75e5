"""``python -m tinker_cookbook`` lists the commands of the library and the recipes."""

import sys

from tinker_cookbook.utils.command_line.entrypoint import run_program
from tinker_cookbook.utils.command_line.programs import LIBRARY, recipes_package, run_listing

if __name__ == "__main__":
    run_program(lambda: run_listing((LIBRARY, recipes_package()), sys.argv[1:]))
