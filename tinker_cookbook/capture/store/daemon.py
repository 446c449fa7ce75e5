"""The process of a store.

    python -m tinker_cookbook.capture.store.daemon --data-dir DIR [--port 0]
        [--idle-shutdown-minutes N]

A folder has one such process, which holds the lock on ``daemon.lock`` and tells its address in
``daemon.json``. :func:`tinker_cookbook.capture.store.client.ensure_daemon` starts it.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import socket
import sys
import uuid
from pathlib import Path

from aiohttp import web

from tinker_cookbook.capture.store.app import make_app
from tinker_cookbook.capture.store.db import CaptureDB
from tinker_cookbook.run.paths import write_atomically

DAEMON_INFO_FILENAME = "daemon.json"
LOCK_FILENAME = "daemon.lock"


def acquire_lock(data_dir: Path) -> int | None:
    """Returns the descriptor of the locked file, ``None`` if another process holds it."""
    descriptor = os.open(data_dir / LOCK_FILENAME, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


async def _serve(data_dir: Path, port: int, idle_shutdown_minutes: float | None) -> None:
    stopped = asyncio.Event()
    idle = None if idle_shutdown_minutes is None else idle_shutdown_minutes * 60
    # By these a client knows this process from another one that got the port later.
    identity = {"data_dir": str(data_dir.resolve()), "instance_token": uuid.uuid4().hex}
    db = CaptureDB(data_dir / "capture.sqlite")
    app = make_app(db, idle_shutdown_sec=idle, shutdown_cb=stopped.set, identity=identity)
    # Open streams do not end by themselves.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", port))
    await web.SockSite(runner, listener).start()
    port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    info = {"port": port, "pid": os.getpid(), "base_url": url, **identity}
    write_atomically(data_dir / DAEMON_INFO_FILENAME, json.dumps(info).encode())
    print(f"capture store of {data_dir}: {url}", flush=True)
    try:
        await stopped.wait()
    finally:
        await runner.cleanup()
        db.close()


def main(argv: list[str] | None = None) -> int:
    """Serves until the store is unused for the given time; 1: another process has the folder."""
    parser = argparse.ArgumentParser(description="Keeps recorded samples of one folder.")
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of the database")
    parser.add_argument("--port", type=int, default=0, help="0 chooses a free one")
    parser.add_argument(
        "--idle-shutdown-minutes", type=float, help="end after this time without a request"
    )
    arguments = parser.parse_args(argv)
    data_dir: Path = arguments.data_dir.expanduser()
    data_dir.mkdir(parents=True, exist_ok=True)
    lock = acquire_lock(data_dir)
    if lock is None:
        print(f"another capture store daemon holds {data_dir}", file=sys.stderr)
        return 1
    try:
        asyncio.run(_serve(data_dir, arguments.port, arguments.idle_shutdown_minutes))
    finally:
        os.close(lock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
