"""Sweeps: ``python -m recipes.chat_sl.sweep``, and ``sweep.run(cli_main, CLIConfig(…), …)``."""

from tinker_cookbook.recipes.chat_sl.sweep.grid import default_run_name, grid
from tinker_cookbook.recipes.chat_sl.sweep.results import collect
from tinker_cookbook.recipes.chat_sl.sweep.runner import run

__all__ = ["collect", "default_run_name", "grid", "run"]
