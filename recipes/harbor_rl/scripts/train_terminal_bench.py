"""Reinforcement learning on Terminal-Bench 2; Harbor must have downloaded it before.

Its tasks install packages from the network: most need a ``sandbox_factory`` with Docker or a cloud.
``python -m recipes.harbor_rl.check`` shows which of them work in the local sandbox.
"""

from __future__ import annotations

from tinker_cookbook.recipes.harbor_rl.harbor_env import load_harbor_tasks
from tinker_cookbook.recipes.harbor_rl.train import CLIConfig, cli_main
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

TERMINAL_BENCH_DATASET = "terminal-bench-2.0/terminal-bench"


async def main(config: CLIConfig) -> None:
    """Trains on the dataset in Harbor's cache."""
    await cli_main(config, load_harbor_tasks(TERMINAL_BENCH_DATASET))


if __name__ == "__main__":
    run_entrypoint(main)
