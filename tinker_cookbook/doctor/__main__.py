"""Examines this machine.

    python -m tinker_cookbook.doctor
    python -m tinker_cookbook.doctor device=cpu dtype=float32
    python -m tinker_cookbook.doctor --json

The exit status is 1 if the engine's results differ from transformers on this machine, or the device
is missing. Missing packages are not a failure.
"""

from __future__ import annotations

import json as json_format
import sys

import chz

from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import get_console


@chz.chz
class Config:
    """Settings of the command."""

    device: str = chz.field(default="auto", doc="auto, cuda, cuda:N, mps or cpu")
    dtype: str = chz.field(default="auto", doc="auto, float32, bfloat16 or float16")
    json: bool = chz.field(default=False, doc="Print JSON instead of tables (also --json)")


def main(config: Config) -> None:
    """Prints the report; exits with status 1 if a required check fails."""
    # Imports torch, which ``--help`` does not need.
    from tinker_cookbook.doctor import report

    found = report.examine(config.device, config.dtype)
    if config.json:
        print(json_format.dumps(report.as_json(found), indent=2))
    else:
        report.print_report(found, get_console())
    sys.exit(0 if found.ok else 1)


if __name__ == "__main__":
    # Also accept the usual flag, in addition to key=value.
    sys.argv[1:] = ["json=true" if word == "--json" else word for word in sys.argv[1:]]
    run_entrypoint(main)
