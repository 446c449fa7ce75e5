"""Command line of the server.

    python -m tinker_cookbook.server model_name=Qwen/Qwen3-0.6B
    python -m tinker_cookbook.server model_name=Qwen/Qwen3-0.6B port=8001 owners=ann,bob

The first start creates the API keys; ``python -m tinker_cookbook.server.keys`` prints one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import socket
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import chz

from tinker_cookbook.backends.sampler_options import SamplerOptions
from tinker_cookbook.engine.sampler_settings import SamplerSettings
from tinker_cookbook.exceptions import BackendError, ConfigurationError, install_command
from tinker_cookbook.image_processing_utils import pillow
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

if TYPE_CHECKING:
    from tinker_cookbook.server.state import ServerState

_ABOVE_ZERO = (
    *("max_request_mb", "max_queued_samples", "session_seconds", "max_image_megapixels"),
    "disk_quota_gb",
)


@chz.chz
class Config(SamplerOptions):
    """Settings of the server."""

    model_name: str = chz.field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        doc="Base models to serve, comma-separated: Hub names or local folders",
    )
    host: str = chz.field(default="127.0.0.1", doc="Address to bind")
    port: int = chz.field(default=8000, doc="Port; 0 chooses a free one")
    owners: str = chz.field(
        default="local",
        doc="Comma-separated owners of API keys; a key is created for each new owner. An owner "
        "sees only their own checkpoints; 'local' owns the runs on this machine",
    )
    key_file: str | None = chz.field(
        default=None,
        doc="File of the API keys; default: server_keys.json in root. A changed file is read "
        "again. TINKER_COOKBOOK_SERVER_KEYS=OWNER=KEY,… replaces it",
    )
    root: str | None = chz.field(
        default=None, doc="Folder of checkpoints; default: TINKER_COOKBOOK_HOME"
    )
    device: str = chz.field(default="auto", doc="auto, cuda, mps or cpu")
    dtype: str = chz.field(default="auto", doc="auto, float32 or bfloat16")
    shard_base: bool = chz.field(
        default=False,
        doc="Divide the base model among the processes of torchrun, for one that fits no single "
        "GPU",
    )
    base_dtype: str = chz.field(
        default="auto", doc="auto, nf4 or int8: quantise the base models (extra quantized)"
    )
    replay_router: bool = chz.field(
        default=False, doc="Train routed experts with the choices of the sampler's routers"
    )
    joint_training: str = chz.field(
        default="auto",
        doc="Compute small passes of several runs together: auto (on CUDA), true or false. The "
        "lowest bits of a run's results then depend on the other runs in the pass",
    )
    session_seconds: float = chz.field(
        default=120.0,
        doc="Seconds without a heartbeat until a session ends; clients send one every 10",
    )
    max_request_mb: int = chz.field(default=256, doc="Largest request in MiB")
    max_queued_samples: int = chz.field(
        default=8192,
        doc="Maximum queued samples of an owner; further requests get status 429 and are retried",
    )
    image_sources: str = chz.field(
        default="",
        doc="Where images may be read from that a request names by an address, comma-separated: "
        "host names, * for all public hosts, networks such as 10.1.0.0/16, absolute paths of "
        "folders; default: nowhere, images are within the request",
    )
    max_image_megapixels: int = chz.field(
        default=50, doc="Largest image; reading one takes up to 20 MB of memory per megapixel"
    )
    disk_quota_gb: float | None = chz.field(
        default=None,
        doc="Most GiB of each owner's runs on disk; a checkpoint that would exceed it is refused; "
        "default: no limit",
    )
    access_log: str = chz.field(
        default="auto",
        doc="One JSON line for each request: auto (server/access.log in root), stdout, none or a "
        "file; a file is renamed at 64 MiB, and three old ones are kept",
    )

    def check(self) -> None:
        """Raises ``ConfigurationError`` for the first invalid setting."""
        for name, value in (("model_name", self.models), ("owners", self.owner_names)):
            if not value:
                raise ConfigurationError(f"{name}: got none, expected at least one")
        for name in _ABOVE_ZERO:
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigurationError(f"{name}: got {value}, expected a number above 0")
        SamplerSettings.of(self).check()
        if not 0 <= self.port < 65536:
            raise ConfigurationError(f"port: got {self.port}, expected 0 to 65535")

    @property
    def models(self) -> list[str]:
        """Names of the base models."""
        return _split(self.model_name)

    @property
    def owner_names(self) -> list[str]:
        """Names of the owners."""
        return _split(self.owners)


async def main(config: Config) -> None:
    """Serves until Ctrl-C or SIGTERM, then finishes the running operation."""
    config.check()
    try:
        from tinker_cookbook.engine.engine import Engine
        from tinker_cookbook.engine.home import home_dir
        from tinker_cookbook.engine.model.loading import size_text, weights_bytes
        from tinker_cookbook.server.app import make_app, serve
        from tinker_cookbook.server.image_sources import ImageSources
        from tinker_cookbook.server.keys import KEYS_FILE, KeyFile, keys_of_environment
        from tinker_cookbook.server.metrics import count_sample
        from tinker_cookbook.server.request_log import RequestLog
        from tinker_cookbook.server.state import ServerState
    except ImportError as error:
        raise BackendError(f"the server needs {error.name}: {install_command('server')}") from error

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    # Files of the server (checkpoints, keys, logs) are readable only by its user.
    os.umask(0o077)
    root = home_dir() if config.root is None else Path(config.root).expanduser()
    images = ImageSources(_split(config.image_sources))
    with contextlib.suppress(ConfigurationError):  # without Pillow, each image is refused
        pillow().MAX_IMAGE_PIXELS = config.max_image_megapixels * 1_000_000
    # Bind the port before models are loaded, to report a port in use immediately.
    listener = _listen(config.host, config.port)
    key_file = Path(config.key_file or root / KEYS_FILE).expanduser()
    quota = None if config.disk_quota_gb is None else int(config.disk_quota_gb * 2**30)
    keys = KeyFile(key_file, root, keys_of_environment(), quota)
    new_owners = list(keys.ensure(config.owner_names))
    engine = Engine(
        config.device,
        config.dtype,
        config.base_dtype,
        config.replay_router,
        config.joint_training,
        shard_base=config.shard_base,
    )
    try:
        lines = []
        sampler = engine.use_sampler(SamplerSettings.of(config))
        for name in config.models:
            folder = Path(engine.resolve(name).folder)
            await asyncio.wrap_future(engine.submit(engine.base_model, name))
            size = weights_bytes(folder, engine.choice.dtype, engine.base_dtype)
            lines.append(f"model        {name}, {size_text(size)}")
        lines.append(f"sampler      {sampler.removeprefix('sampler: ')}")
        limits = config.session_seconds, config.max_queued_samples
        state = ServerState(engine, config.models, keys, *limits, images)
        engine.on_sample_end = count_sample
        log = RequestLog(config.access_log, root / "server" / "access.log")
        app = make_app(state, config.max_request_mb << 20, log)
        await serve(
            app, listener, partial(_print_start, config, listener, state, lines, new_owners)
        )
    finally:
        engine.close()
        listener.close()


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # asyncio disables Nagle's algorithm only for sockets that name TCP; otherwise each response
        # waits 40 ms for an acknowledgement.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        raise BackendError(
            f"{host}:{port}: cannot listen there ({error.strerror or error}); choose another port= "
            "or stop the program that uses the port"
        ) from error
    return listener


def _print_start(
    config: Config,
    listener: socket.socket,
    state: ServerState,
    models: list[str],
    new_owners: list[str],
) -> None:
    """Prints what is served, and how a client gets a key.

    Output often becomes a log that others read, so no key is in it. Sweeps parse the lines
    ``serving``, ``keys`` and ``device``.
    """
    from tinker_cookbook.engine.devices import free_memory_bytes
    from tinker_cookbook.server.keys import ENVIRONMENT

    # The port that was bound, since port=0 lets the system choose one.
    address, port = listener.getsockname()[:2]
    url = f"http://{f'[{address}]' if ':' in address else address}:{port}"
    choice, keys, where = state.engine.choice, state.keys, ENVIRONMENT
    if keys.fixed is None:
        where = f"{keys.path}, for your user only (mode 600); a key is renewed by deleting it there"
    lines = [
        f"serving      {url}",
        *models,
        f"device       {choice.device}, {str(choice.dtype).removeprefix('torch.')}; "
        f"{free_memory_bytes(choice.device) / 2**30:.1f} GiB free",
        f"keys         of {', '.join(keys.names)} in {where}",
    ]
    if new_owners:
        lines.append(f"new keys     of {', '.join(new_owners)}")
    if keys.fixed is None:
        python = getattr(sys, "orig_argv", ["python"])[0]
        command = [python, "-m", "tinker_cookbook.server.keys", f"owner={keys.names[0]}"]
        if config.key_file or config.root:
            command.append(f"key_file={keys.path.absolute()}")
        key = f"$({shlex.join(command)})"
        lines.append(f"    export TINKER_BASE_URL={url} TINKER_API_KEY={key}")
    if (count := state.engine.processes) > 1:
        lines.append(f"processes    {count} of torchrun; each trains a part of every batch")
    lines.append(f"chat page    {url}/")
    if config.host not in ("127.0.0.1", "::1", "localhost"):
        lines.append("open         to other machines, unencrypted: put a TLS proxy in front")
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    # uvloop is faster than asyncio's own event loop. There is none for Windows.
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    run_entrypoint(main)
    # Sessions, engine and files are closed. os._exit skips the unloading of torch's modules,
    # which takes seconds on a busy machine.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
