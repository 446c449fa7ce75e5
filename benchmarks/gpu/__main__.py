"""Command line of the benchmark on a GPU."""

from __future__ import annotations

import sys

from benchmarks.gpu.config import Config
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


def main(config: Config) -> None:
    """Measures training tokens/s beside TRL; the last line printed is one JSON object."""
    from benchmarks.gpu.runner import run_benchmark  # --help needs no torch

    sys.exit(run_benchmark(config))


if __name__ == "__main__":
    run_entrypoint(main)
