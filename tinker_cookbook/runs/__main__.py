"""Entry point of the commands; ``COMMAND --help`` lists the keys of a command."""

from __future__ import annotations

import sys

from tinker_cookbook.utils.command_line.entrypoint import run_program
from tinker_cookbook.utils.command_line.subcommands import Subcommand, run_subcommand

_SHOW, _REMOVE = "tinker_cookbook.runs.show", "tinker_cookbook.runs.remove"

COMMANDS = {
    "list": Subcommand(_SHOW, "ListSettings", "list_runs", ("folder",), "lists the runs"),
    "show": Subcommand(
        _SHOW, "ShowSettings", "show_run", ("run",),
        "shows settings, checkpoints and metrics of a run, and commands to use it", "LOG_PATH",
    ),
    "compare": Subcommand(
        "tinker_cookbook.runs.compare", "CompareSettings", "compare_runs", ("a", "b"),
        "compares settings and metrics of two runs", "LOG_PATH OTHER_LOG_PATH",
    ),
    "rm": Subcommand(
        _REMOVE, "RemoveSettings", "remove_run", ("run",),
        "removes a run: its log folder and its weights", "LOG_PATH",
    ),
    "prune": Subcommand(
        _REMOVE, "PruneSettings", "prune_runs", ("folder",),
        "removes weights without a log folder, and log folders without a row",
    ),
}  # fmt: skip


if __name__ == "__main__":
    run_program(
        lambda: run_subcommand("tinker_cookbook.runs", COMMANDS, sys.argv[1:], default="list")
    )
