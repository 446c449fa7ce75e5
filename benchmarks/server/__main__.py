"""Command line of the measurement of what HTTP costs."""

from __future__ import annotations

import sys

from benchmarks.server.config import Config
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


def main(config: Config) -> None:
    """Measures milliseconds a call on every side; the last line printed is one JSON object."""
    from benchmarks.server.runner import run_benchmark  # --help needs no torch

    sys.exit(run_benchmark(config))


if __name__ == "__main__":
    run_entrypoint(main)
