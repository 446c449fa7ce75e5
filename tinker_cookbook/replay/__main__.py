"""Computes a recorded step of a run again, and compares every number.

    python -m tinker_cookbook.replay LOG_PATH step=12
    python -m tinker_cookbook.replay LOG_PATH step=12 group=3 episode=1
    python -m tinker_cookbook.replay LOG_PATH step=12 what=update
    python -m tinker_cookbook.replay LOG_PATH step=12 what=grading
    python -m tinker_cookbook.replay LOG_PATH step=12 group=3 episode=1 --pytest out=test_episode.py

It loads the weights that sampled the step, or trains them again from the nearest checkpoint on the
recorded batches, and samples with the recorded seeds. On a CPU the result is identical; elsewhere
it prints how far it differs, and the bound of rounding.
"""

from __future__ import annotations

import sys

from tinker_cookbook.replay.command import main
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.command_line.subcommands import with_keys

if __name__ == "__main__":
    words = sys.argv[1:]
    if "--pytest" in words:
        words.remove("--pytest")
        words = [f"pytest={w.removeprefix('out=')}" if w.startswith("out=") else w for w in words]
    sys.argv[1:] = with_keys(words, ("run", "step"))
    run_entrypoint(main)
