"""Operations of a model begin in the order of their numbers."""

from __future__ import annotations

import asyncio

import pytest

from tinker_cookbook.server import turns
from tinker_cookbook.server.turns import Turns


def began(numbers: list[int], wait: float = 0.2) -> list[int]:
    seen: list[int] = []

    async def run() -> None:
        queue = Turns("m")
        for number in numbers:
            queue.add(number, lambda n=number: seen.append(n))
            await asyncio.sleep(0.01)
        await asyncio.sleep(wait)
        queue.close()

    asyncio.run(run())
    return seen


def test_parts_that_arrive_out_of_order_wait_for_the_first():
    assert began([0, 3, 2, 1, 4]) == [0, 1, 2, 3, 4]


def test_one_that_comes_late_begins_at_once():
    assert began([1, 2, 1]) == [1, 2, 1]


@pytest.mark.parametrize("seconds", [0.05])
def test_a_number_that_never_comes_is_passed_over(monkeypatch, caplog, seconds):
    monkeypatch.setattr(turns, "GAP_SECONDS", seconds)
    assert began([1, 4, 5], wait=0.5) == [1, 4, 5]
    assert "request 2 never came; going on with 4" in caplog.text


def test_without_the_gap_it_waits():
    assert began([1, 4]) == [1]
