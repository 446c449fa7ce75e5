"""Another name of ``recipes.distillation.sdft``: both start the same program.

python -m recipes.sdft.train
"""

from tinker_cookbook.recipes.distillation.sdft import CLIConfig, cli_main, main
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

__all__ = ["CLIConfig", "cli_main", "main"]

if __name__ == "__main__":
    run_entrypoint(main)
