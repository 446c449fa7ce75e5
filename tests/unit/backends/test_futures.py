"""Futures of the local clients, in blocking and in async code."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import tinker

from tinker_cookbook.backends import futures
from tinker_cookbook.backends.futures import LocalFuture, ReadyClient, done_future


@pytest.fixture
def worker():
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _nothing_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "_warned_of_blocking", False)


def fail() -> None:
    raise ValueError("no such loss")


class Client(ReadyClient["Client"]):
    """A client with one method, which queues behind the creation."""

    def __init__(self, worker: ThreadPoolExecutor, create) -> None:
        super().__init__(worker.submit(create))
        self._worker = worker

    def forward(self) -> LocalFuture[str]:
        return LocalFuture(self._worker.submit(lambda: "forward"))


def test_every_way_to_the_result(worker: ThreadPoolExecutor) -> None:
    future = LocalFuture(worker.submit(lambda: 3))
    assert isinstance(future, tinker.APIFuture)
    assert future.result() == 3
    assert future.future().result() == 3

    async def ways() -> list[int]:
        task = asyncio.create_task(future.coroutine())
        gathered = await asyncio.gather(future, future)
        return [await future, await future.result_async(), await task, *gathered]

    assert asyncio.run(ways()) == [3] * 5
    assert done_future("x").result(timeout=0) == "x"
    assert concurrent.futures.wait([future.future()]).not_done == set()


def test_errors_come_out_unchanged(worker: ThreadPoolExecutor) -> None:
    future = LocalFuture(worker.submit(fail))
    with pytest.raises(ValueError, match="no such loss"):
        future.result()

    async def wait() -> None:
        await future

    with pytest.raises(ValueError, match="no such loss"):
        asyncio.run(wait())


def test_awaiting_leaves_the_event_loop_free(worker: ThreadPoolExecutor) -> None:
    go = threading.Event()

    async def main() -> str:
        waiting = asyncio.ensure_future(LocalFuture(worker.submit(go.wait)).coroutine())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        go.set()  # only a loop that runs gets here
        await asyncio.wait_for(waiting, 120)
        return "free"

    assert asyncio.run(main()) == "free"


def test_a_timeout_takes_nothing_back(worker: ThreadPoolExecutor) -> None:
    go, ran = threading.Event(), []
    worker.submit(go.wait)
    queued = LocalFuture(worker.submit(lambda: ran.append("step")))
    with pytest.raises(TimeoutError):
        queued.result(timeout=0.01)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await queued.result_async(timeout=0.01)
        task = asyncio.create_task(queued.coroutine())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    go.set()
    queued.result(timeout=120)
    assert ran == ["step"]


def test_future_cancel_takes_a_queued_operation_back(worker: ThreadPoolExecutor) -> None:
    go, ran = threading.Event(), []
    worker.submit(go.wait)
    queued = LocalFuture(worker.submit(lambda: ran.append("step")))
    assert queued.future().cancel()
    go.set()
    with pytest.raises(concurrent.futures.CancelledError):
        queued.result(timeout=120)
    worker.submit(lambda: None).result()
    assert ran == []


def test_blocking_in_async_code_works_and_is_said_once(worker: ThreadPoolExecutor) -> None:
    async def main() -> None:
        assert done_future(1).result() == 1  # waits for nothing, so nothing to say
        for _ in range(2):
            assert LocalFuture(worker.submit(time.sleep, 0.02)).result() is None

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        LocalFuture(worker.submit(time.sleep, 0.02)).result()
        assert caught == []
        asyncio.run(main())
    assert [w.category for w in caught] == [RuntimeWarning]
    assert "await future" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_a_client_is_usable_before_it_exists(worker: ThreadPoolExecutor) -> None:
    go = threading.Event()
    client = Client(worker, go.wait)
    forward = client.forward()
    with pytest.raises(TimeoutError):
        client.result(timeout=0.01)
    go.set()
    assert forward.result(timeout=120) == "forward"
    assert client.result() is client
    assert client.future().result(timeout=120) is client

    async def main() -> Client:
        assert await client.result_async(timeout=120) is client
        return await client

    assert asyncio.run(main()) is client
