"""Command line of the proxy, which records into the store of this machine.

python -m tinker_cookbook.capture.proxy.serve --base-model Qwen/Qwen3-8B
ANTHROPIC_BASE_URL=http://127.0.0.1:7462/r/run/my-run/traj/0 AGENT
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from aiohttp import web

from tinker_cookbook.capture.exporter import CaptureExporter
from tinker_cookbook.capture.instrument import instrument_tinker, uninstrument_tinker
from tinker_cookbook.capture.proxy.app import ProxyDeps, RendererLike, SamplingClientLike, make_app
from tinker_cookbook.capture.store.client import StoreSink, ensure_daemon
from tinker_cookbook.sampling_model import SamplingModelSettings, open_sampling_model
from tinker_cookbook.utils.command_line.entrypoint import run_program

_TOKEN_VARIABLE = "TINKER_PROXY_AUTH_TOKEN"
_END_SECONDS = 5.0  # longest wait for calls, and for the store, at the end


def validate_bind(host: str, auth_token: str | None) -> str | None:
    """Returns the token without surrounding spaces, ``None`` if it is empty.

    Raises:
        SystemExit: Other machines can reach ``host``, and there is no token.
    """
    token = (auth_token or "").strip() or None
    if token is None and not _is_loopback(host):
        raise SystemExit(
            f"--host {host}: refusing to bind it without a token, because everyone who reaches it "
            f"could sample at your cost; give --auth-token (or {_TOKEN_VARIABLE}), or bind "
            "127.0.0.1"
        )
    return token


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name may be of any address
        return False


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Records what a program samples by a chat API.")
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to bind")
    add("--port", type=int, default=7462, help="port")
    add("--base-model", required=True, help="Hub name or local folder")
    add("--model-path", help="checkpoint to sample from; default: the base model")
    add("--renderer-name", help="chat format; default: the run's, else the model's")
    add("--default-max-tokens", type=int, default=1024, help="for requests without max_tokens")
    add(
        "--auth-token",
        default=os.environ.get(_TOKEN_VARIABLE),
        help=f"key that requests must have; needed on other hosts; default: ${_TOKEN_VARIABLE}",
    )
    store = Path("~/.cache/tinker-capture").expanduser()
    add("--store-data-dir", type=Path, default=store, help="folder of the store")
    add("--flush-interval-sec", type=float, default=1.0, help="longest wait of a record")
    add("--max-queue-size", type=int, default=4096, help="records that may wait for the store")
    add("--max-batch-size", type=int, default=256, help="records of one request to the store")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until Ctrl-C or SIGTERM, then sends the last records to the store."""
    args = _arguments(argv)
    auth_token = validate_bind(args.host, args.auth_token)
    settings = SamplingModelSettings(
        model_name=args.base_model, model_path=args.model_path, renderer_name=args.renderer_name
    )
    settings.check()
    with settings.connect() as connection:
        model = asyncio.run(open_sampling_model(connection, settings))
        deps = ProxyDeps(
            renderer=cast(RendererLike, model.renderer),
            sampling_client=cast(SamplingClientLike, model.client),
            model_label=model.name,
            default_max_tokens=args.default_max_tokens,
        )
        store_url = ensure_daemon(args.store_data_dir)
        exporter = CaptureExporter(
            StoreSink(store_url),
            max_queue_size=args.max_queue_size,
            max_batch_size=args.max_batch_size,
            flush_interval_sec=args.flush_interval_sec,
        )
        instrument_tinker(exporter)
        print(f"model     {model.name}, renderer {model.renderer_name}")
        print(f"backend   {connection.describe()}\nstore     {store_url}")
        print(f"proxy     http://{args.host}:{args.port}", flush=True)
        try:
            app = make_app(deps, auth_token=auth_token)
            web.run_app(app, host=args.host, port=args.port, print=None)
        finally:
            uninstrument_tinker()
            exporter.wait_pending(timeout=_END_SECONDS)
            exporter.force_flush(timeout=_END_SECONDS)
            exporter.shutdown()
    return 0


if __name__ == "__main__":
    run_program(main)
