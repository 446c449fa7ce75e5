"""Requests that the memory has no room for fail by themselves; what others do goes on."""

from __future__ import annotations

import resource
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from serving import Caller, Serving
from tinker.proto import tinker_public_pb2 as pb

from tinker_cookbook.server import requests
from tinker_cookbook.server.requests import Encoder, PendingRequest, error_body

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sets the limit of a process")

SPARE = 64 << 20
STEPS = 12


@pytest.fixture
def serving(stories_model, tmp_path):
    running = Serving(tmp_path, {"model_name": stories_model}).start()
    yield running
    if running.process.poll() is None:
        running.stop()


def loss(answer) -> float:
    return answer["metrics"]["loss:sum"]


def train(caller: Caller, model: str) -> list[float]:
    losses = []
    for number in range(1, 2 * STEPS, 2):
        asked = caller.train(model, number)
        caller.result(caller.step(model, number + 1))
        losses.append(loss(caller.result(asked)))
    return losses


def two_steps(caller: Caller, model: str):
    first, _ = post_pass(caller, model, 1, 16)
    caller.result(caller.step(model, 2))
    return first, post_pass(caller, model, 3, 16)[0]


def post_pass(caller: Caller, model: str, number: int, datums: int, length: int = 256):
    """A pass in protobuf; returns what became of it, and the seconds it took."""
    draw = np.random.default_rng(0)
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn="cross_entropy")
    for _ in range(datums):
        row = draw.integers(3, 500, length + 1)
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = row[:-1].astype(np.int32).tobytes()
        targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
        targets.dense, targets.dtype = row[1:].astype(np.int64).tobytes(), pb.DTYPE_INT64
        weights.dense, weights.dtype = np.ones(length, np.float32).tobytes(), pb.DTYPE_FLOAT32
    start = time.monotonic()
    answer = caller.http.post(
        "forward_backward",
        content=message.SerializeToString(),
        headers={"content-type": "application/x-protobuf"},
    )
    return caller.result((answer.status_code, answer.json())), time.monotonic() - start


def limit_memory(serving: Serving, spare: int) -> None:
    """What the process may map from now on, above what it has."""
    pid = serving.process.pid
    text = Path(f"/proc/{pid}/status").read_text()
    (now,) = [int(line.split()[1]) << 10 for line in text.splitlines() if "VmSize" in line]
    resource.prlimit(pid, resource.RLIMIT_AS, (now + spare, resource.RLIM_INFINITY))


def test_a_request_without_room_fails_and_others_train_on(serving, stories_model):
    mine, theirs = Caller(serving, serving.key()), Caller(serving, serving.key())
    alone = train(mine, mine.model(stories_model))
    expected = two_steps(theirs, theirs.model(stories_model))
    large = theirs.model(stories_model)
    assert post_pass(theirs, large, 1, 16)[0] == expected[0]
    theirs.result(theirs.step(large, 2))
    limit_memory(serving, SPARE)

    def ask_too_much() -> None:
        for number in (3, 5, 7):
            said, seconds = post_pass(theirs, large, number, 16_000)
            assert "does not fit into the memory of cpu: reading the request" in said["error"]
            assert seconds < 30
            refused = theirs.result(theirs.step(large, number + 1))
            assert "a forward_backward since the last step failed" in refused["error"]

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_too_much)
        while not asking.done():
            assert train(mine, mine.model(stories_model)) == alone
        asking.result()
    assert post_pass(theirs, large, 9, 16)[0] == expected[1]  # it is as it was before


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
    failed = PendingRequest("r", "s", Encoder())
    failed.start(partial(fails, large))
    del large
    assert held() is None
    said = error_body(failed.future.exception())
    assert said["category"] == "server"
    assert "memory is full (RuntimeError: not enough memory" in said["error"]
