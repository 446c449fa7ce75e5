"""Sessions over their lifetime, and a stop of the whole server."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from functools import partial
from types import SimpleNamespace

from tinker_cookbook.engine.checkpoints.store import RunInfo
from tinker_cookbook.server import state as state_module
from tinker_cookbook.server.app import make_app, serve
from tinker_cookbook.server.keys import KeyFile
from tinker_cookbook.server.state import (
    IDLE_SECONDS,
    MAX_IDLE_SAMPLERS,
    OpenSampler,
    ServerState,
    Session,
)


def test_old_snapshots_go_and_checkpoints_can_be_opened_again():
    session = Session("s", SimpleNamespace(name="ann"), SimpleNamespace())
    released: list[int] = []
    for i in range(MAX_IDLE_SAMPLERS + 4):
        path = None if i % 2 else f"tinker://r/sampler_weights/{i}"
        client = SimpleNamespace(release_terms=partial(released.append, i))
        sampler = OpenSampler(str(i), client, "m", path, path is None, used_at=float(i))
        session.samplers[str(i)] = sampler
    session.evict_idle_samplers(now=MAX_IDLE_SAMPLERS + 4.5)
    assert sorted(released) == [0, 1, 2, 3]  # at once, because they can be computed again
    assert all(sampler.client is not None for sampler in session.samplers.values())
    session.evict_idle_samplers(now=IDLE_SECONDS + 1.5)  # 0 and 1 are idle for long enough
    assert session.samplers["0"].client is None
    assert "1" not in session.samplers
    assert all(session.samplers[str(i)].client is not None for i in range(2, MAX_IDLE_SAMPLERS + 4))
    session.evict_idle_samplers(now=10 * IDLE_SECONDS)
    opened = [i for i, one in session.samplers.items() if one.client is not None]
    assert opened == [str(i) for i in range(4, MAX_IDLE_SAMPLERS + 4)]


def test_a_server_that_was_held_up_does_not_take_its_clients_for_gone(tmp_path):
    keys = KeyFile(tmp_path / "keys.json", tmp_path)
    keys.ensure(["local"])

    async def run(held_up: float) -> int:
        state = ServerState(SimpleNamespace(), [], keys, 0.2, 1)
        state.start_session(keys.owner("local"), None, None)
        sweeping = asyncio.create_task(state.sweep_forever())
        await asyncio.sleep(0.01)
        time.sleep(held_up)  # nothing is read meanwhile, heartbeats neither
        await asyncio.sleep(0.02)
        after = len(state.sessions())
        while state.sessions():  # who stays silent once it is back is gone
            await asyncio.sleep(0.01)
        sweeping.cancel()
        return after

    assert asyncio.run(run(0.6)) == 1


def test_a_running_server_deletes_expired_checkpoints_of_all_owners(tmp_path, monkeypatch):
    monkeypatch.setattr(state_module, "EXPIRE_SECONDS", 0.01)
    keys = KeyFile(tmp_path / "keys.json", tmp_path)
    keys.ensure(["local", "ann"])
    stores = [keys.owner(name).store for name in keys.names]
    for store in stores:
        store.create_run("r", RunInfo("m", 4))
        for name, ttl in (("kept", None), ("expired", 60)):
            store.write_checkpoint(
                "r", "weights", name, adapter={}, adapter_config={}, ttl_seconds=ttl
            )
        store.clock = lambda: time.time() + 61
    # The first owner's store fails at first, which must not end the loop.
    expire, failures = stores[0].expire, [OSError("the disk is full")]

    def fails_once() -> None:
        if failures:
            raise failures.pop()
        expire()

    monkeypatch.setattr(stores[0], "expire", fails_once)

    def left() -> list[str]:
        return [path.name for store in stores for path in store.root.glob("runs/r/weights/*")]

    async def run() -> None:
        engine = SimpleNamespace(close=lambda: None)
        app = make_app(ServerState(engine, [], keys, 60, 1), 1)
        async with asyncio.timeout(60), app.router.lifespan_context(app):
            while "expired" in left():
                await asyncio.sleep(0.01)

    asyncio.run(run())
    assert left() == ["kept", "kept"]


def test_a_signal_in_the_moment_of_listening_stops_the_server_in_order(tmp_path):
    """Scripts that wait for the port and then send SIGINT used to see exit status 130."""

    class Listener(socket.socket):
        def listen(self, *backlog):
            super().listen(*backlog)
            signal.raise_signal(signal.SIGINT)

    keys = KeyFile(tmp_path / "keys.json", tmp_path)
    state = ServerState(SimpleNamespace(), [], keys, 1.0, 1)
    started = []
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Listener() as listener:
        listener.bind(("127.0.0.1", 0))
        try:
            asyncio.run(serve(make_app(state, 1), listener, lambda: started.append(1)))
        finally:
            signal.signal(signal.SIGINT, before[0])
            signal.signal(signal.SIGTERM, before[1])
    assert started == [1]
    assert state.stopping.is_set()
