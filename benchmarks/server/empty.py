"""A server that does nothing: it answers the SDK with bytes that were made beforehand.

What a call takes against it is what the SDK itself takes. Under ``/at_once`` results are there at
once; under ``/held`` only after as long as the engine takes, counted from the request, so that
what the SDK does meanwhile counts as little as it does against a server that works.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import sys
from pathlib import Path
from typing import Any

AT_ONCE, HELD = "at_once", "held"
BINARY = "application/x-protobuf"
_JSON = "application/json"
_MODEL, _SAMPLER = "s:train:0", "s:sample:0"

FIXED: dict[str, dict[str, Any]] = {
    "client/config": {"parallel_fwdbwd_chunks": True},
    "client/dynamic_config": {},
    "create_session": {"type": "create_session", "session_id": "s"},
    "session_heartbeat": {"type": "session_heartbeat"},
    "telemetry": {"status": "accepted"},
    "create_sampling_session": {"type": "create_sampling_session", "sampling_session_id": _SAMPLER},
    "get_info": {
        "type": "get_info",
        "model_id": _MODEL,
        "model_data": {"model_name": "m", "tokenizer_id": "m"},
    },
}
QUEUED = ("create_model", "forward_backward", "optim_step", "asample")
"""Requests that are acknowledged, and whose results are fetched."""


class Answers:
    """What is answered to what; ``seconds`` is how long results of a kind are held."""

    def __init__(self, results: dict[str, tuple[str, bytes]], seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.fixed = {
            path: _response(_JSON, json.dumps(body).encode()) for path, body in FIXED.items()
        }
        self.results = {kind: _response(*result) for kind, result in results.items()}

    @classmethod
    def read(cls, file: Path) -> Answers:
        """From what ``write`` left."""
        content = json.loads(file.read_bytes())
        results = {k: (kind, base64.b64decode(b)) for k, (kind, b) in content["results"].items()}
        return cls(results, content["seconds"])


def write(file: Path, results: dict[str, bytes], seconds: dict[str, float]) -> None:
    """Writes the messages with which the server responds, and how long it holds them."""
    plain: dict[str, tuple[str, bytes]] = {
        "create_model": (_JSON, json.dumps({"type": "create_model", "model_id": _MODEL}).encode()),
        "optim_step": (_JSON, json.dumps({"type": "optim_step", "metrics": {"g": 1.0}}).encode()),
    }
    results_all = plain | {kind: (BINARY, message) for kind, message in results.items()}
    packed = {k: (kind, base64.b64encode(b).decode()) for k, (kind, b) in results_all.items()}
    file.write_text(json.dumps({"results": packed, "seconds": seconds}), encoding="utf-8")


class Connection(asyncio.Protocol):
    """One connection of HTTP/1.1; requests come one after the other."""

    _transport: asyncio.Transport

    def __init__(self, answers: Answers, begun: dict[str, float], numbers: itertools.count) -> None:
        self._answers, self._begun, self._numbers = answers, begun, numbers
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps where answers go."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answers when a request is there as a whole."""
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        size = 0
        for line in head.lower().split(b"\r\n")[1:]:
            if line.startswith(b"content-length:"):
                size = int(line[15:])
        if len(rest) < size:
            return
        self._buffer = rest[size:]
        self._answer(head.split(b" ", 2)[1].decode(), rest[:size])

    def _answer(self, path: str, body: bytes) -> None:
        way, _, name = path.removeprefix("/").partition("/api/v1/")
        loop = asyncio.get_running_loop()
        if name == "retrieve_future":
            request_id = json.loads(body)["request_id"]
            kind = request_id.partition(":")[0]
            wait = self._begun.pop(request_id) + self._answers.seconds.get(kind, 0.0) - loop.time()
            if way == HELD and wait > 0:
                loop.call_later(wait, self._transport.write, self._answers.results[kind])
            else:
                self._transport.write(self._answers.results[kind])
        elif name in QUEUED:
            request_id = f"{name}:{next(self._numbers)}"
            self._begun[request_id] = loop.time()
            reply = {"request_id": request_id, "model_id": _MODEL, "sample_sequence_ids": ["0"]}
            self._transport.write(_response(_JSON, json.dumps(reply).encode()))
        else:
            known = self._answers.fixed.get(name)
            self._transport.write(known or _response(_JSON, b"{}"))


def _response(kind: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _serve(file: Path) -> None:
    answers, begun, numbers = Answers.read(file), {}, itertools.count()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(answers, begun, numbers), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
