"""Connecting to the hosted API: what is missing is said at once."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tinker

from tinker_cookbook.backends.hosted import (
    connect_hosted,
    hosted_credentials_present,
)
from tinker_cookbook.exceptions import BackendError
from tinker_cookbook.training import restarts

MODELS = {"supported_models": [{"model_name": "org/model", "max_context_length": 128}]}


class Handler(BaseHTTPRequestHandler):
    """Knows the two calls that a rest client makes; everything else is 404."""

    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers.get("X-API-Key")))
        self.answer(MODELS if self.path.endswith("/get_server_capabilities") else None)

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.endswith("/create_session"):
            self.server.session = json.loads(sent)
        self.server.seen.append((self.path, self.headers.get("X-API-Key")))
        self.answer({} if "client" in self.path else None)

    def answer(self, body: dict | None) -> None:
        content = json.dumps({"detail": "not here"} if body is None else body).encode()
        self.send_response(self.server.status or (404 if body is None else 200))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, str | None]] = []
        self.session: dict | None = None
        self.status: int | None = None
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        yield server
        server.shutdown()


@pytest.fixture(autouse=True)
def user_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No key, no login, no proxy between the tests and this machine."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD", "TINKER_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "*")
    return tmp_path


def store_login(home: Path, content: str) -> Path:
    path = home / ".tinker" / "credentials.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    return path


def store_key(home: Path) -> None:
    """As ``tinker auth login`` stores it."""
    from tinker.lib.credentials import JsonCredentialStore, ManualKey

    credentials = JsonCredentialStore(home / ".tinker" / "credentials.json")
    credentials.add_key("id", ManualKey(key="tml-stored", name="mine"))
    credentials.set_default("id")


def test_a_server_that_answers_is_connected_to(server: Server, monkeypatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret")
    client = connect_hosted(server.url)
    assert isinstance(client, tinker.ServiceClient)
    # It answered 404, which is an answer; and looking gave no secret away.
    assert server.seen == [("/api/v1/healthz", None)]

    rest = tinker.RestClient(base_url=server.url)
    capabilities = rest.get_server_capabilities().result(timeout=120)
    assert [model.model_name for model in capabilities.supported_models] == ["org/model"]
    assert ("/api/v1/get_server_capabilities", "tml-secret") in server.seen


def test_the_sdk_is_given_the_address_that_was_looked_at(server: Server, monkeypatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret")
    monkeypatch.setenv("TINKER_BASE_URL", server.url + "/prefix/")
    client = connect_hosted()
    with pytest.warns(FutureWarning):
        rest = client.create_rest_client()
    with pytest.raises(tinker.NotFoundError):
        rest.get_training_run("x").result(timeout=120)
    assert server.seen[0] == ("/prefix/api/v1/healthz", None)
    assert ("/prefix/api/v1/training_runs/x", "tml-secret") in [
        (path.partition("?")[0], key) for path, key in server.seen
    ]


def test_a_closed_port_is_said_at_once(monkeypatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: refuses
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(BackendError, match=r"no answer from .*refused.*backend=local"):
            connect_hosted(url)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("key", [None, ""])
def test_without_a_key(server: Server, monkeypatch, key: str | None) -> None:
    if key is not None:
        monkeypatch.setenv("TINKER_API_KEY", key)
    with pytest.raises(BackendError, match=r"TINKER_API_KEY: got none.*tinker auth login") as error:
        connect_hosted(server.url)
    assert "backend=local" in str(error.value)
    assert server.seen == []


@pytest.mark.parametrize("key", ["sk-not-ours", "tml-with space", "tml-newline\n"])
def test_a_malformed_key_is_refused_and_not_shown(server: Server, monkeypatch, key: str) -> None:
    monkeypatch.setenv("TINKER_API_KEY", key)
    with pytest.raises(BackendError, match=f"TINKER_API_KEY: got {len(key)} characters") as error:
        connect_hosted(server.url)
    assert key not in str(error.value)
    assert server.seen == []


def test_a_stored_login_stands_in_for_a_key(server: Server, user_home: Path) -> None:
    assert not hosted_credentials_present()
    store_login(user_home, '{"version": 1, "keys": {}}')
    assert not hosted_credentials_present()
    store_key(user_home)
    assert hosted_credentials_present()
    assert isinstance(connect_hosted(server.url), tinker.ServiceClient)


def _lost(code: str | None, status: int = 404) -> Exception:
    """The SDK's error for a response, with the wrapper of a result that is gone."""
    answer = httpx.Response(status, request=httpx.Request("POST", "http://h"))
    body = {"detail": "session 'x': not open", **({"code": code} if code else {})}
    error = ValueError("Error retrieving result: ...")
    error.__cause__ = tinker.NotFoundError("gone", response=answer, body=body)
    return error


@pytest.mark.parametrize(
    ("error", "gone"),
    [
        (_lost("session_ended"), True),
        (ExceptionGroup("tasks", [ValueError("x"), _lost("session_ended")]), True),
        (tinker.APIConnectionError(request=httpx.Request("POST", "http://h")), True),
        (_lost(None), False),  # such as a checkpoint that is missing
        (_lost("unknown_url"), False),
        (ConnectionError("of a tool"), False),
    ],
)
def test_errors_after_a_restart_of_the_server_are_known(error, gone):
    assert restarts.server_is_gone(error) is gone


@pytest.mark.parametrize(
    ("server_wait", "answers", "saved", "runs", "ends"),
    [
        (0, True, [5], 1, True),
        (60, True, [5, 10, 15], 4, False),
        (60, True, [5, 5, 5, 5, 5], 4, True),  # no progress
        (1e-9, False, [5], 1, True),
    ],
)
def test_a_run_continues_when_its_server_is_back(
    monkeypatch, server_wait, answers, saved, runs, ends
):
    steps, started = iter([None, *saved]), []
    monkeypatch.setattr(restarts, "_last_step", lambda config: next(steps))
    reason = None if answers else "Connection refused"
    monkeypatch.setattr(restarts, "why_unreachable", lambda url, seconds: reason)
    monkeypatch.setattr(restarts, "_LOOK_SECONDS", 0)

    @restarts.through_restarts
    async def run(config: Any, more: int) -> str:
        started.append(more)
        if len(started) <= len(saved):
            raise _lost("session_ended")
        return "done"

    config: Any = SimpleNamespace(
        server_wait=server_wait, backend="http://127.0.0.1:9", base_url=None, device="auto",
        dtype="auto", log_path="",
    )  # fmt: skip
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    if ends:
        with pytest.raises(ValueError, match="retrieving"):
            asyncio.run(run(config, 3))
    else:
        assert asyncio.run(run(config, 3)) == "done"
    assert started == [3] * runs
