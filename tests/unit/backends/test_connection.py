"""How a connection takes its leave of a service."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tinker_cookbook.backends.connect import Connection

TARGET = ("tinker", "http://127.0.0.1:1", "auto", "auto", None)


def connection_to(answer):
    told = []

    def close(status, detail):
        told.append((status, detail))
        return answer

    return Connection(SimpleNamespace(close=close), "tinker", (), TARGET), told


@pytest.mark.parametrize("status", ["errored", "interrupted"])
def test_a_service_that_is_gone_does_not_hold_up_a_failed_run(status, monkeypatch):
    monkeypatch.setattr(sys.modules[Connection.__module__], "CLOSE_SECONDS_AFTER_FAILURE", 0.2)
    connection, told = connection_to(Future())
    connection.close(status, "why")
    assert told == [(status, "why")]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, ("success", None)),
        (ValueError("why"), ("errored", "why")),
        (KeyboardInterrupt(), ("interrupted", "")),
        (asyncio.CancelledError(), ("interrupted", "")),
    ],
)
def test_as_a_context_it_says_how_what_was_done_in_it_ended(error, status):
    heard = Future()
    heard.set_result(None)
    connection, told = connection_to(heard)
    with pytest.raises(type(error)) if error is not None else nullcontext(), connection:
        if error is not None:
            raise error
    assert told == [status]
