"""Another name of ``recipes.multiplayer_rl.twenty_questions.train``: both start the same program.

python -m recipes.twenty_questions.train
"""

from tinker_cookbook.recipes.multiplayer_rl.twenty_questions.train import (
    CLIConfig,
    build_config,
    main,
)
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

__all__ = ["CLIConfig", "build_config", "main"]

if __name__ == "__main__":
    run_entrypoint(main)
