"""Another name of ``recipes.distillation.sdft``.

    python -m recipes.sdft.train
    python -m recipes.sdft.train dataset_path=my.jsonl max_tokens=… reverse=True …

Both start the same program.
"""

from __future__ import annotations

from tinker_cookbook.recipes.distillation.sdft import CLIConfig, build_config, main
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

__all__ = ["CLIConfig", "build_config", "main"]

if __name__ == "__main__":
    run_entrypoint(main)
