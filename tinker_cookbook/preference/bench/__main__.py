"""Command line of the comparison with TRL."""

from __future__ import annotations

import sys

import chz

from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.preference.bench.config import Config


def main(config: Config) -> None:
    """Measures seconds a step, peak memory and loss; the last line printed is one JSON object."""
    from tinker_cookbook.preference.bench.runner import run_benchmark  # --help needs no torch

    sys.exit(run_benchmark(config))


if __name__ == "__main__":
    try:
        chz.nested_entrypoint(main)
    except TinkerCookbookError as error:
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
