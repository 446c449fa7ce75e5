"""``recipes.preference.dpo.train`` by a name within the package.

    python -m tinker_cookbook.preference.train_dpo_cli
    python -m tinker_cookbook.preference.train_dpo_cli dataset=my_pairs.jsonl model_name=…

Both names start the same program.
"""

from __future__ import annotations

from recipes.preference.dpo.train import CLIConfig, build_config, main
from tinker_cookbook.utils.entrypoint import run_entrypoint

__all__ = ["CLIConfig", "build_config", "main"]

if __name__ == "__main__":
    run_entrypoint(main)
