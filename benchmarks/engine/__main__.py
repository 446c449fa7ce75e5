"""Command line of the benchmarks."""

from __future__ import annotations

import sys

from benchmarks.engine.config import Config, SamplingConfig, SharedPrefixConfig, VisionConfig
from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint, run_program

# The runners are imported late: --help needs no torch.


def training(config: Config) -> None:
    """Measures training tokens/s and peak memory; the last line printed is one JSON object."""
    from benchmarks.engine.runner import run_benchmark

    sys.exit(run_benchmark(config))


def sampling(config: SamplingConfig) -> None:
    """Measures sampled tokens/s and peak memory; the last line printed is one JSON object."""
    from benchmarks.engine.sampling.runner import run_benchmark

    sys.exit(run_benchmark(config))


def shared_prefix(config: SharedPrefixConfig) -> None:
    """Measures what sharing prompts saves in training; the last line is one JSON object."""
    from benchmarks.engine.shared_prefix.runner import run_benchmark

    sys.exit(run_benchmark(config))


def vision(config: VisionConfig) -> None:
    """Measures training and sampling with images; the last line is one JSON object."""
    from benchmarks.engine.vision.runner import run_benchmark

    sys.exit(run_benchmark(config))


_WORKS = {
    "training": training,
    "sampling": sampling,
    "shared_prefix": shared_prefix,
    "vision": vision,
}


def main() -> None:
    """Runs the benchmark that ``work=`` names; the other words are its settings."""
    works = [word.removeprefix("work=") for word in sys.argv[1:] if word.startswith("work=")]
    work = works[-1] if works else "training"
    if work not in _WORKS:
        raise ConfigurationError(
            f"work: got {work!r}, expected one of {', '.join(_WORKS)}{nearest(work, _WORKS)}"
        )
    run_entrypoint(_WORKS[work])


if __name__ == "__main__":
    run_program(main)
