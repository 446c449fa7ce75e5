"""Starting the server: settings, keys, models, and what the terminal says."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import chz

from tinker_cookbook.exceptions import BackendError, ConfigurationError
from tinker_cookbook.utils.lazy_imports import lazy_module

if TYPE_CHECKING:
    from types import FrameType

    import uvicorn
    from fastapi import FastAPI

    from tinker_cookbook.engine.engine import Engine
    from tinker_cookbook.server.keys import KeyFile
    from tinker_cookbook.server.state import ServerState
else:
    uvicorn = lazy_module("uvicorn")

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@chz.chz
class Config:
    """Settings of the server."""

    model_name: str = chz.field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        doc="Base models to serve, with commas between: Hub names or local folders",
    )
    host: str = chz.field(default="127.0.0.1", doc="Address to bind; this machine alone by default")
    port: int = chz.field(default=8000, doc="Port; 0: any free one")
    owners: str = chz.field(
        default="local",
        doc="Owners of keys, with commas between; who has none gets one. Each sees their own "
        "checkpoints alone; those of 'local' are this machine's runs",
    )
    key_file: str | None = chz.field(
        default=None, doc="Where keys are kept; default: server_keys.json beside the checkpoints"
    )
    root: str | None = chz.field(
        default=None, doc="Folder of checkpoints; default: TINKER_COOKBOOK_HOME"
    )
    device: str = chz.field(default="auto", doc="auto, cuda, mps or cpu")
    dtype: str = chz.field(default="auto", doc="auto, float32 or bfloat16")
    session_seconds: float = chz.field(
        default=120.0, doc="A client without a heartbeat for so long is gone; clients send every 10"
    )
    max_request_mb: int = chz.field(default=256, doc="Largest request")
    max_queued_samples: int = chz.field(
        default=8192, doc="Samples that may wait; more are asked to come again"
    )

    def check(self) -> None:
        """Raises ``ConfigurationError`` for the first setting that cannot work."""
        for name, value in (("model_name", self.models), ("owners", self.owner_names)):
            if not value:
                raise ConfigurationError(f"{name}: got none, expected one at least")
        for name in ("max_request_mb", "max_queued_samples", "session_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(
                    f"{name}: got {getattr(self, name)}, expected a number above 0"
                )
        if not 0 <= self.port < 65536:
            raise ConfigurationError(f"port: got {self.port}, expected 0 to 65535")

    @property
    def models(self) -> list[str]:
        """The names in ``model_name``."""
        return _parts(self.model_name)

    @property
    def owner_names(self) -> list[str]:
        """The names in ``owners``."""
        return _parts(self.owners)


def use_compiled_loop() -> None:
    """Has asyncio take uvloop's event loop where that is installed; it is quicker than its own."""
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())


async def main(config: Config) -> None:
    """Serves until it is stopped; a first Ctrl-C or SIGTERM finishes the operation in hand."""
    config.check()
    _require_extra()
    from tinker_cookbook.engine.engine import Engine
    from tinker_cookbook.engine.home import home_dir
    from tinker_cookbook.server.app import make_app
    from tinker_cookbook.server.keys import KeyFile
    from tinker_cookbook.server.state import ServerState

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    # All that the server writes belongs to its user alone: checkpoints, and the notes next to them.
    os.umask(0o077)
    root = home_dir() if config.root is None else Path(config.root).expanduser()
    listening = _listen(config.host, config.port)
    keys = KeyFile(Path(config.key_file or root / "server_keys.json").expanduser(), root)
    new = keys.ensure(config.owner_names)
    engine = Engine(config.device, config.dtype)
    try:
        loaded = [await _load(engine, name) for name in config.models]
        state, most = root / "server", config.max_queued_samples
        host = ServerState(engine, config.models, keys, config.session_seconds, state, most)
        _greet(config, listening, keys, new, engine, loaded, host.cut)
        app = make_app(host, config.max_request_mb << 20)
        await _serve(app, host, listening)
    finally:
        engine.close()
        listening.close()


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _require_extra() -> None:
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise BackendError(
            f"the server needs {error.name}: pip install 'tinker_cookbook[server]'"
        ) from error


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # asyncio switches Nagle's algorithm off for sockets that name TCP; else each answer waits
        # 40 ms for an acknowledgement.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        raise BackendError(
            f"{host}:{port}: cannot listen there ({error.strerror or error}); choose another port= "
            "or stop what holds it"
        ) from error
    return listening


async def _serve(app: FastAPI, host: ServerState, listening: socket.socket) -> None:
    """Until a signal comes; then who waits for what has not begun is sent away first."""
    from tinker_cookbook.server.connections import IdleConnections, http_protocol
    from tinker_cookbook.server.future_routes import HELD_SECONDS

    settings = uvicorn.Config(
        app,
        http=http_protocol(),
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=round(HELD_SECONDS) + 5,  # for the operation in hand
    )
    server = uvicorn.Server(settings)
    ended = server.handle_exit

    def end(sig: int, frame: FrameType | None) -> None:
        if not host.stopping.is_set():
            logger.info("stopping: finishing what is in hand; a second Ctrl-C does not wait")
        host.stopping.set()
        ended(sig, frame)

    server.handle_exit = end
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again when it is done
        signal.signal(number, lambda *_: None)
    closing = asyncio.create_task(IdleConnections(server).close_for_good())
    await server.serve(sockets=[listening])
    closing.cancel()


async def _load(engine: Engine, name: str) -> str:
    """Loads a base model; says its size."""
    from tinker_cookbook.engine.model.memory_check import size_text, weights_bytes

    folder = engine.resolve(name).folder
    await asyncio.wrap_future(engine.submit(engine.base_model, name))
    return f"{name}, {size_text(weights_bytes(Path(folder), engine.choice.dtype))}"


def _below_home(path: Path) -> str:
    """The path with ``~`` for the user's home folder."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _greet(
    config: Config,
    listening: socket.socket,
    keys: KeyFile,
    new: dict[str, str],
    engine: Engine,
    loaded: list[str],
    cut: list[str],
) -> None:
    from tinker_cookbook.engine.devices import free_memory_bytes

    address, port = listening.getsockname()[:2]
    url = f"http://{f'[{address}]' if ':' in address else address}:{port}"
    choice = engine.choice
    lines = [f"serving      {url}"]
    lines += [f"model        {model}" for model in loaded]
    lines += [
        f"device       {choice.device}, {str(choice.dtype).removeprefix('torch.')}; "
        f"{free_memory_bytes(choice.device) / 2**30:.1f} GiB free",
        f"keys         {_below_home(keys.path)} ({', '.join(keys.names)}), for your user alone "
        "(mode 600); a key is renewed by deleting it there and starting again",
    ]
    for owner, key in new.items():
        lines += [f"new key      of {owner}, now in that file:"]
        lines += [f"    export TINKER_BASE_URL={url} TINKER_API_KEY={key}"]
    if cut:
        lines += [f"cut          {len(cut)} runs were open when the server last ended:"]
        lines += [f"    {run}" for run in cut[:20]]
        lines += ["    their checkpoints are kept; start them again to go on from the last"]
    if config.host not in LOOPBACK:
        lines += ["open         to other machines, unencrypted: put a TLS proxy in front"]
    print("\n".join(lines), flush=True)
