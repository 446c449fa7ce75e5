"""Command line of the comparison with TRL."""

from __future__ import annotations

import sys

from benchmarks.rl.config import Config
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


def main(config: Config) -> None:
    """Measures seconds a step, peak memory and reward; the last line printed is one JSON object."""
    from benchmarks.rl.comparison import run_benchmark  # --help needs no torch

    sys.exit(run_benchmark(config))


if __name__ == "__main__":
    run_entrypoint(main)
