"""Order, overlap, errors and ends of the background preparation."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback

import pytest

from tinker_cookbook.supervised.prefetch import Prefetcher


async def collected(ahead):
    found = []
    while True:
        try:
            found.append(await ahead.next())
        except StopAsyncIteration:
            return found


def test_items_come_in_order_and_end():
    with Prefetcher(range(20), depth=3) as ahead:
        assert asyncio.run(collected(ahead)) == list(range(20))
        assert asyncio.run(collected(ahead)) == []


def test_depth_items_are_prepared_before_they_are_asked_for_and_not_more():
    made = []

    def items():
        for i in range(10):
            made.append((i, threading.current_thread().name))
            yield i

    with Prefetcher(items(), depth=3) as ahead:
        deadline = time.monotonic() + 60
        while len(made) < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        assert made == [(i, "prefetch") for i in range(3)]
        assert asyncio.run(ahead.next()) == 0
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert len(made) == 4


def test_waiting_does_not_block_the_event_loop():
    release = threading.Event()

    def items():
        release.wait(60)
        yield "batch"

    async def run():
        with Prefetcher(items()) as ahead:
            waiting = asyncio.create_task(ahead.next())
            await asyncio.sleep(0.01)  # would never come back if `next` blocked
            assert not waiting.done()
            release.set()
            return await waiting

    assert asyncio.run(run()) == "batch"


def test_an_error_is_raised_at_its_item_with_the_traceback_of_its_origin():
    def breaks_here():
        raise ValueError("row 2 is broken")

    def items():
        yield 0
        yield 1
        breaks_here()

    async def run():
        with Prefetcher(items(), depth=8) as ahead:
            assert [await ahead.next(), await ahead.next()] == [0, 1]
            with pytest.raises(ValueError, match="row 2 is broken") as caught:
                await ahead.next()
            with pytest.raises(StopAsyncIteration):
                await ahead.next()
            return "".join(traceback.format_tb(caught.value.__traceback__))

    assert "breaks_here" in asyncio.run(run())


def test_a_source_that_hangs_holds_up_neither_cancelling_nor_closing():
    never = threading.Event()

    def items():
        never.wait()
        yield 0

    async def run():
        with Prefetcher(items()) as ahead:
            await asyncio.wait_for(ahead.next(), timeout=0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(run())
    never.set()
