"""Measures the sandbox: which attacks fool which grader, and programs graded per second.

    python -m benchmarks.sandbox part=attacks
    python -m benchmarks.sandbox part=speed humaneval=HumanEval.jsonl.gz mbpp=mbpp.jsonl

Tables are Markdown; the last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any, Literal

import chz

from benchmarks.sandbox import throughput
from benchmarks.sandbox.attacks import ATTACKS, RIGHT_CALLS, RIGHT_STDIO, Attack
from benchmarks.sandbox.graders import Scorer, humaneval_reference, ours, plain_exec
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.sandbox import PythonGrader, SandboxTier, launch
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

# Short limits, since some attacks run until one ends them.
_LIMITS = {"test_seconds": 0.2, "total_seconds": 5.0, "memory_mb": 256}
_AT_ONCE = 2


@chz.chz
class Config:
    """Settings of the measurement."""

    part: Literal["attacks", "speed"] = chz.field(doc="What to measure")
    humaneval: str | None = chz.field(default=None, doc="File HumanEval.jsonl(.gz)")
    mbpp: str | None = chz.field(default=None, doc="File mbpp.jsonl, or sanitized-mbpp.json")
    cold: int = chz.field(default=40, doc="Programs of the measurement of cold starts")
    workers: int = chz.field(default=0, doc="Programs graded concurrently; 0: processors + 1")

    @chz.validate
    def _check(self) -> None:
        for name in ("humaneval", "mbpp"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigurationError(f"{name}: {path!r} is not a file")
        if self.part == "speed" and not (self.humaneval or self.mbpp):
            raise ConfigurationError("part=speed needs humaneval=FILE, mbpp=FILE, or both")


async def attack_all(scorer: Scorer, attacks: list[Attack]) -> list[bool | None]:
    """Returns what a grader says of each attack, and checks that it still knows a right program.

    Raises:
        ConfigurationError: It gave a right program no score, so its verdicts mean nothing.
    """
    slots = asyncio.Semaphore(_AT_ONCE)

    async def one(attack: Attack) -> bool | None:
        async with slots:
            return await scorer(attack)

    verdicts = await asyncio.gather(*(one(attack) for attack in attacks))
    for group, code in (("right", RIGHT_CALLS), ("stdio", RIGHT_STDIO)):
        if await scorer(Attack("a right program", group, code, slow=False)) is False:
            raise ConfigurationError("a grader gives a right program no score after the attacks")
    return list(verdicts)


async def report_attacks() -> dict[str, Any]:
    """Prints which attacks fool which grader, and returns the counts."""
    columns: dict[str, list[bool | None]] = {}
    for tier in SandboxTier:
        if not launch.tier_problems()[tier]:
            with PythonGrader(tier=tier, **_LIMITS) as grader:
                columns[f"ours, {tier}"] = await attack_all(ours(grader), ATTACKS)
    columns["plain `exec`"] = await attack_all(plain_exec(), ATTACKS)
    columns["HumanEval reference"] = await attack_all(humaneval_reference(), ATTACKS)
    print(f"| attack | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    words = {True: "**fooled**", False: "0", None: "–"}
    for index, attack in enumerate(ATTACKS):
        if any(column[index] for column in columns.values()):
            cells = " | ".join(words[column[index]] for column in columns.values())
            print(f"| {attack.group}: {attack.name} | {cells} |")
    counts = {name: sum(map(bool, column)) for name, column in columns.items()}
    print(f"| **fooled, of {len(ATTACKS)}** | {' | '.join(map(str, counts.values()))} |")
    return {"attacks": len(ATTACKS), "fooled": counts}


async def report_speed(config: Config) -> dict[str, Any]:
    """Prints programs a second in each tier, and returns the figures."""
    sets: dict[str, list[throughput.Problem]] = {}
    if config.humaneval:
        sets["HumanEval"] = list(throughput.humaneval(config.humaneval))
    if config.mbpp:
        sets["MBPP"] = list(throughput.mbpp(config.mbpp))
    figures: dict[str, Any] = {}
    print(
        "| tier | programs | passed | lost | programs/s | CPU ms each | ms until the first result |"
    )
    print("|---|---|---|---|---|---|---|")
    for tier in SandboxTier:
        if launch.tier_problems()[tier]:
            continue
        for name, problems in sets.items():
            result = await throughput.grade_all(problems, tier, config.workers)
            figures[f"{tier} {name}"] = result
            print(
                f"| {tier} | {name}, {result['programs']} | {result['passed']} | "
                f"{len(result['lost'])} | {result['per_second']} | {result['cpu_ms']} | "
                f"{result['first_ms']} |",
                flush=True,
            )
        cold = await throughput.cold_starts(next(iter(sets.values()))[: config.cold], tier)
        figures[f"{tier} cold"] = cold
        print(
            f"| {tier}, cold | {cold['programs']}, one by one | | | {cold['per_second']} | "
            f"{cold['cpu_ms']} | {cold['median_ms']} (median) |",
            flush=True,
        )
    return {"processors": os.cpu_count(), **figures}


def main(config: Config) -> None:
    """Runs one part."""
    work = report_attacks() if config.part == "attacks" else report_speed(config)
    print(json.dumps(asyncio.run(work)))


if __name__ == "__main__":
    run_entrypoint(main)
