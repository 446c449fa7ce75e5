"""Gold programs graded a second by warm sandboxes, and how long cold ones take."""

from __future__ import annotations

import asyncio
import gzip
import json
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tinker_cookbook.sandbox import (
    LocalSandbox,
    PythonGrader,
    SandboxTier,
    names_in_tests,
    split_check,
)

Problem = tuple[str, str, list[str], str, list[str]]
"""Name, program, tests, setup and entry points."""


def rows(path: str) -> list[dict[str, Any]]:
    """Reads a file of JSON objects: a list, or one a line, also compressed."""
    data = Path(path).read_bytes()
    text = (gzip.decompress(data) if path.endswith(".gz") else data).decode()
    return json.loads(text) if text.startswith("[") else [json.loads(x) for x in text.splitlines()]


def humaneval(path: str) -> Iterator[Problem]:
    """Yields the problems of HumanEval with their canonical solutions."""
    for row in rows(path):
        program = row["prompt"] + row["canonical_solution"]
        tests = split_check(row["test"], row["entry_point"])
        # Helpers that the prompt defines are the tests' own: a program could replace its copy.
        setup = row["prompt"] + "    pass\n"
        yield row["task_id"], program, tests, setup, [row["entry_point"]]


def mbpp(path: str) -> Iterator[Problem]:
    """Yields the problems of MBPP, the full set or the sanitised one."""
    for row in rows(path):
        tests = [*row["test_list"], *row.get("challenge_test_list", [])]
        setup = "\n".join([row.get("test_setup_code", ""), *row.get("test_imports", [])])
        names = names_in_tests(row["code"], [*tests, setup])
        yield str(row["task_id"]), row["code"], tests, setup, names


def _cpu_seconds() -> float:
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in used)


async def grade_all(problems: list[Problem], tier: SandboxTier, workers: int) -> dict[str, Any]:
    """Grades all programs at once in a grader that is warm."""
    before = _cpu_seconds()
    async with PythonGrader(tier=tier, workers=workers) as grader:
        started = time.perf_counter()
        await grader.grade("def f(): return 1", ["assert f() == 1"])
        first = time.perf_counter() - started
        started = time.perf_counter()
        grades = await asyncio.gather(
            *(
                grader.grade(program, tests, setup=setup, entry_points=names)
                for _, program, tests, setup, names in problems
            ),
            return_exceptions=True,
        )
        seconds = time.perf_counter() - started
    lost = [p[0] for p, g in zip(problems, grades, strict=True) if isinstance(g, BaseException)]
    passed = sum(not isinstance(grade, BaseException) and grade.passed for grade in grades)
    return {
        "programs": len(problems),
        "passed": passed,
        "lost": lost,
        "per_second": round(len(problems) / seconds, 1),
        # Of all processes, also this one; the sandboxes have ended, so their time is known.
        "cpu_ms": round(1000 * (_cpu_seconds() - before) / len(problems), 1),
        "first_ms": round(1000 * first, 1),
    }


async def cold_starts(problems: list[Problem], tier: SandboxTier) -> dict[str, Any]:
    """Runs programs one after the other, each with a new sandbox and a new Python."""
    times = []
    before = _cpu_seconds()
    for _, program, tests, setup, _ in problems:
        started = time.perf_counter()
        box = await LocalSandbox.create(tier=tier)
        await box.write_file(f"{box.workdir}/run.py", "\n".join([setup, program, *tests]))
        await box.run_command("python3 run.py")
        await box.cleanup()
        times.append(time.perf_counter() - started)
    return {
        "programs": len(times),
        "per_second": round(len(times) / sum(times), 1),
        "cpu_ms": round(1000 * (_cpu_seconds() - before) / len(times), 1),
        "median_ms": round(1000 * statistics.median(times), 1),
    }
