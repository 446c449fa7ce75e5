"""``python -m recipes`` lists the recipes."""

import sys

from tinker_cookbook.utils.command_line.entrypoint import run_program
from tinker_cookbook.utils.command_line.programs import RECIPES, run_listing

if __name__ == "__main__":
    run_program(lambda: run_listing((RECIPES,), sys.argv[1:]))
