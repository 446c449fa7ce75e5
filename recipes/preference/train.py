"""Another name of ``recipes.preference.dpo.train``.

    python -m recipes.preference.train
    python -m recipes.preference.train dataset=my_pairs.jsonl model_name=… dpo_beta=…

Both names start the same program.
"""

from __future__ import annotations

from tinker_cookbook.recipes.preference.dpo.train import CLIConfig, build_config, main
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

__all__ = ["CLIConfig", "build_config", "main"]

if __name__ == "__main__":
    run_entrypoint(main)
