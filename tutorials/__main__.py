"""``python -m tinker_cookbook.tutorials`` lists the tutorials; it also runs and opens them."""

import sys

from tinker_cookbook.utils.command_line.entrypoint import run_program
from tinker_cookbook.utils.command_line.subcommands import Subcommand, run_subcommand

_MODULE = "tinker_cookbook.tutorials.commands"

COMMANDS = {
    "list": Subcommand(_MODULE, "ListSettings", "list_tutorials", (), "lists the tutorials"),
    "run": Subcommand(
        _MODULE, "OneSettings", "run_tutorial", ("number",), "runs one in the terminal", "101"
    ),
    "open": Subcommand(
        _MODULE, "OneSettings", "open_tutorial", ("number",), "opens one as a notebook", "101"
    ),
    "render": Subcommand(
        _MODULE, "RenderSettings", "render_tutorials", ("output",),
        "writes pages with outputs and pictures", "pages only=101",
    ),
}  # fmt: skip

if __name__ == "__main__":
    run_program(
        lambda: run_subcommand("tinker_cookbook.tutorials", COMMANDS, sys.argv[1:], default="list")
    )
