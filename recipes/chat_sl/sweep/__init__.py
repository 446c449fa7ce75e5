"""Sweeps over learning rates and LoRA ranks, from the command line or from Python.

The command is ``python -m recipes.chat_sl.sweep``; the function is ``sweep.run(cli_main, …)``.
"""

from tinker_cookbook.recipes.chat_sl.sweep.grid import default_run_name, grid
from tinker_cookbook.recipes.chat_sl.sweep.results import collect
from tinker_cookbook.recipes.chat_sl.sweep.runner import run

__all__ = ["collect", "default_run_name", "grid", "run"]
