"""Operations of a model begin in the order of their numbers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection

import pytest

from tinker_cookbook.server import requests
from tinker_cookbook.server.requests import OrderedDispatcher


def began(
    numbers: list[int], takes: float = 0.05, blocking: Collection[int] = (), gap: float = 0.01
) -> list[int]:
    """The order in which they begin; those that are ``blocking`` take a while, in a thread."""
    seen: list[int] = []

    async def run() -> None:
        queue = OrderedDispatcher("m")

        def begin(number: int) -> None:
            on_loop = threading.current_thread() is threading.main_thread()
            assert on_loop == (number not in blocking)
            if number in blocking:
                time.sleep(takes)
            seen.append(number)

        for number in numbers:
            queue.add(number, lambda n=number: begin(n), blocks=number in blocking)
            await asyncio.sleep(gap)
        while len(seen) < len(numbers):
            await asyncio.sleep(0.01)
        queue.close()

    asyncio.run(run())
    return seen


@pytest.mark.parametrize("blocking", [(), (0,), (2,), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("gap", [0, 0.01])
def test_parts_that_arrive_out_of_order_wait_for_the_first(blocking, gap):
    order = began([0, 3, 2, 1, 4], blocking=blocking, gap=gap)
    assert order == [0, 1, 2, 3, 4]


def test_what_does_not_block_begins_at_once():
    async def run() -> list[int]:
        seen: list[int] = []
        queue = OrderedDispatcher("m")
        for number in (2, 1, 3):
            queue.add(number, lambda n=number: seen.append(n), blocks=False)
        queue.close()
        return seen

    assert asyncio.run(run()) == [1, 2, 3]


@pytest.mark.parametrize("seconds", [0.05])
@pytest.mark.parametrize("blocking", [(), (4,), (5,)])
def test_a_number_that_never_comes_is_passed_over(monkeypatch, caplog, seconds, blocking):
    monkeypatch.setattr(requests, "GAP_SECONDS", seconds)
    assert began([1, 4, 5], blocking=blocking) == [1, 4, 5]
    assert "request 2 never arrived; continuing with 4" in caplog.text


def test_a_timer_that_ends_while_the_missing_one_begins_passes_nothing_over(monkeypatch, caplog):
    monkeypatch.setattr(requests, "GAP_SECONDS", 0.2)
    # 2 arrives at once and takes longer to begin than it is waited for; then 3 is missing.
    assert began([1, 5, 2], takes=0.3, blocking=(2,), gap=0) == [1, 2, 5]
    assert "request 3 never arrived; continuing with 5" in caplog.text
    assert "request 2 never arrived" not in caplog.text
