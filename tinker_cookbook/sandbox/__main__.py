"""Prints which isolation tiers work on this machine, and runs a self-test.

    python -m tinker_cookbook.sandbox
    python -m tinker_cookbook.sandbox tier=landlock

The exit status is 1 if no tier works or a check fails.
"""

from __future__ import annotations

import asyncio
import sys
import time

import chz

from tinker_cookbook.sandbox import (
    LocalSandbox,
    PythonGrader,
    SandboxTier,
    SandboxUnavailableError,
    launch,
)
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

# Commands that must fail in the sandbox, by what they try to do.
_FORBIDDEN = {
    "read files of the host": "cat /etc/shadow /etc/hostname /root/.bashrc",
    "change the system": "touch /usr/x",
    "reach the network": (
        "python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 53), 2)'"
    ),
    "signal other processes": "kill -9 1",
    "make namespaces": "unshare -Ur true",
    "use more memory than allowed": "python3 -c 'bytearray(8 << 30)'",
}


@chz.chz
class Config:
    """Settings of the self-test."""

    tier: SandboxTier | None = chz.field(default=None, doc="Isolation tier; default: the strongest")


async def self_test(tier: SandboxTier) -> bool:
    """Prints one line for each check, and returns whether all passed."""
    passed = True
    box = await LocalSandbox.create(60, tier=tier)
    try:
        for what, command in _FORBIDDEN.items():
            held = (await box.run_command(command, timeout=10)).exit_code != 0
            passed &= held
            print(f"  {'ok    ' if held else 'FAILED'} a program cannot {what}")
    finally:
        await box.cleanup()
    async with PythonGrader(tier=tier) as grader:
        program, tests = "def f(x): return x + 1", ["assert f(1) == 2", "assert f(1) == 3"]
        scores = [test.passed for test in (await grader.grade(program, tests)).tests]
        started = time.perf_counter()
        await asyncio.gather(*(grader.grade(program, tests) for _ in range(60)))
        speed = 60 / (time.perf_counter() - started)
    passed &= scores == [True, False]
    print(f"  {'ok    ' if scores == [True, False] else 'FAILED'} programs are graded test by test")
    print(f"  {speed:.0f} programs graded a second")
    return passed


def main(config: Config) -> None:
    """Prints which tiers work on this machine and tests one of them."""
    problems = launch.tier_problems()
    for tier, problem in problems.items():
        print(f"{tier}: {problem or 'works'}")
    if problems[SandboxTier.BUBBLEWRAP]:
        print(f"{launch.INSTALL}.")
    tier = config.tier or launch.available_tier()
    if problems[tier]:
        raise SandboxUnavailableError(f"tier: {tier} does not work here: {problems[tier]}")
    print(f"\nself-test of {tier}:")
    sys.exit(0 if asyncio.run(self_test(tier)) else 1)


if __name__ == "__main__":
    run_entrypoint(main)
