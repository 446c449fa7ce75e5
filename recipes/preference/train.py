"""Another name of ``recipes.preference.dpo.train``: both start the same program.

python -m recipes.preference.train
"""

from tinker_cookbook.recipes.preference.dpo.train import CLIConfig, main
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

__all__ = ["CLIConfig", "main"]

if __name__ == "__main__":
    run_entrypoint(main)
