"""Grading: what counts as equal, and that no answer holds up the others or the event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tinker_cookbook.grading import mathematics
from tinker_cookbook.grading.mathematics import grade_math
from tinker_cookbook.grading.numbers import equal_numbers, last_number
from tinker_cookbook.grading.texts import extract_boxed
from tinker_cookbook.grading.worker_pool import TimedPool

REPO = Path(__file__).resolve().parents[3]


def loop_forever() -> None:
    while True:
        pass


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def pool():
    pool = TimedPool(max_workers=1, timeout_seconds=30, preload=["math_verify"])
    yield pool
    pool.close()


# --- what is found and equal; ``tests/unit/test_graders.py`` has the tables of graders ------------


def test_plain_numbers_need_no_process():
    pool = TimedPool(max_workers=1)
    assert asyncio.run(grade_math("12.50", "12.5", pool=pool))
    assert asyncio.run(grade_math("9" * 5000, "9" * 5000 + ".0", pool=pool))
    assert not asyncio.run(grade_math("12", "13", pool=pool))
    assert not asyncio.run(grade_math("", "3", pool=pool))
    assert asyncio.run(grade_math("\\pi", "\\pi", pool=pool))
    assert pool._pools == {}
    assert equal_numbers("1,23", "123") is None
    assert equal_numbers("seven", "7") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 + 4 = 7.", "7"),
        ("It is 1,234 in all", "1234"),
        ("5-3", "3"),
        ("x = -3", "-3"),
        ("0.50 dollars", "0.50"),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(text, expected):
    assert last_number(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed {5}", "5"),
        (r"\boxed 5", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed{}", ""),
        (r"\boxed{2", None),
        ("2", None),
    ],
)
def test_boxed(text, expected):
    assert extract_boxed(text) == expected


# --- the timeout holds -----------------------------------------------------------------------


def test_an_endless_grader_is_killed_and_the_loop_goes_on(pool, caplog):
    async def scenario() -> tuple[int, bool]:
        assert await grade_math("2^{-1}", "1/2", pool=pool, timeout_seconds=300)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        # sympy computes this power in C, where no signal handler and no exception gets in.
        stuck = grade_math("9^{9^{9^{9}}}", "2", pool=pool, timeout_seconds=1)
        assert await stuck is False
        ticking.cancel()
        # One worker: it is a new one that grades this, and its start counts for nothing.
        return ticks, await grade_math("2^{-1}", "1/2", pool=pool, timeout_seconds=300)

    ticks, next_grade = asyncio.run(scenario())
    assert ticks > 1
    assert next_grade is True
    assert "more than 1 s" in caplog.text


def test_a_worker_that_dies_costs_one_answer(pool, caplog, monkeypatch):
    monkeypatch.setattr(mathematics, "verify_expressions", die_verifying)
    assert asyncio.run(grade_math("2^{-1}", "1/2", pool=pool)) is False
    assert "died" in caplog.text
    monkeypatch.undo()
    assert asyncio.run(grade_math("2^{-1}", "1/2", pool=pool, timeout_seconds=300)) is True


def die_verifying(answer: str, reference: str) -> bool:
    die()
    return True


def test_a_cancelled_caller_frees_its_worker(pool):
    async def scenario() -> bool:
        task = asyncio.create_task(pool.call(loop_forever, timeout_seconds=3600))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await grade_math("2^{-1}", "1/2", pool=pool, timeout_seconds=300)

    assert asyncio.run(scenario())


PROGRAM = """
import asyncio
from tinker_cookbook.grading.worker_pool import TimedPool

pool = TimedPool(max_workers=1, timeout_seconds=30)

async def main():
    import os
    print(await pool.call(os.getpid), flush=True)
    {rest}

if __name__ == "__main__":
    asyncio.run(main())
"""


def start(folder: Path, rest: str) -> tuple[subprocess.Popen[str], int]:
    program = folder / "program.py"
    program.write_text(textwrap.dedent(PROGRAM).format(rest=rest))
    process = subprocess.Popen(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def gone(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return True
        if state == "Z":  # dead, and nobody has asked how
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
def test_workers_end_with_the_program(tmp_path):
    process, worker = start(tmp_path, "return")
    assert process.wait(timeout=120) == 0
    assert gone(worker, 120)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
def test_a_worker_that_hangs_does_not_outlive_a_killed_program_for_long(tmp_path):
    # int is C code and this takes it for ever: nothing but a signal without handler ends it.
    process, worker = start(tmp_path, "await pool.call(pow, 9, 9**9, timeout_seconds=3)")
    time.sleep(1)
    process.kill()
    process.wait(timeout=30)
    assert gone(worker, 120)
