"""Requests that the memory has no room for fail by themselves; what others do goes on."""

from __future__ import annotations

import asyncio
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as pb

from tinker_cookbook.server import bodies, requests, wire
from tinker_cookbook.server.requests import PendingRequest, error_body


def test_a_pass_without_room_is_read_to_its_end_and_fails_in_its_turn(monkeypatch):
    monkeypatch.setattr(bodies, "free_memory_bytes", lambda device: 8 << 20)
    ids = pb.ForwardBackwardRequest(model_id="m", seq_id=3).SerializeToString()
    pieces, read = [ids, b" " * (1 << 20), b" " * (1 << 20)], []

    async def stream():
        for piece in pieces:
            read.append(piece)
            yield piece

    app = SimpleNamespace(state=SimpleNamespace(max_request_bytes=64 << 20))
    headers = {"content-length": str(sum(map(len, pieces)))}
    request = SimpleNamespace(app=app, headers=headers, stream=stream)
    found = asyncio.run(wire.receive_pass(request))
    assert (found.model_id, found.seq_id, read) == ("m", 3, pieces)
    with pytest.raises(MemoryError, match="and 8 are free"):
        raise found.error


def test_a_failed_request_keeps_words_and_no_frames(monkeypatch):
    """The frames of a pass hold its tensors, and a result stays until it was fetched."""
    monkeypatch.setattr(
        requests.logger, "error", lambda *args, **more: None
    )  # pytest keeps records

    def fails(large: np.ndarray) -> None:
        try:
            large[len(large)]
        except IndexError as error:
            raise RuntimeError("not enough memory: you tried to allocate") from error

    large = np.zeros(9)
    held = weakref.ref(large)
    failed = PendingRequest("r", "s", bytes)
    failed.start(partial(fails, large))
    del large
    assert held() is None
    said = error_body(failed.future.exception())
    assert said["category"] == "server"
    assert "memory is full (RuntimeError: not enough memory" in said["error"]
