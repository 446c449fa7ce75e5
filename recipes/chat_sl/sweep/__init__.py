"""Sweeps from Python: ``sweep.run(cli_main, CLIConfig(…), learning_rate=[1e-4, 3e-4])``."""

from tinker_cookbook.recipes.chat_sl.sweep.grid import default_run_name, grid
from tinker_cookbook.recipes.chat_sl.sweep.results import collect
from tinker_cookbook.recipes.chat_sl.sweep.runner import run

__all__ = ["collect", "default_run_name", "grid", "run"]
