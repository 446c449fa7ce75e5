"""What happens before a route is asked: the key, the bounds of bodies, and silent connections."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi.responses import JSONResponse
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as pb

from tinker_cookbook.server import access
from tinker_cookbook.server.access import IDLE_SECONDS, AccessMiddleware, IdleConnections
from tinker_cookbook.server.app import error_response
from tinker_cookbook.server.keys import KeyFile

BOMB = b'{"x":[' + b"[]," * (14 << 20) + b"[]]}"  # 42 MiB
NESTED_TOKEN = "eyJh." + base64.urlsafe_b64encode(b"[" * 3000).decode() + ".x"


def _posted(serving, path: str, content, key: str | None) -> httpx.Response:
    headers = {"Content-Type": "application/json"} | ({"X-API-Key": key} if key else {})
    return httpx.post(serving.url + path, content=content, headers=headers, timeout=60)


def _peak_mib(serving) -> int:
    status = Path(f"/proc/{serving.process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) >> 10


@pytest.mark.parametrize("path", ["/api/v1/create_session", "/oai/api/v1/chat/completions"])
def test_a_large_body_without_a_key_is_answered_at_once_and_not_kept(serving, path):
    before = _peak_mib(serving)
    begin = serving.cpu_seconds()
    answer = _posted(serving, path, BOMB, None)
    assert answer.status_code == 401
    assert _peak_mib(serving) - before < 10
    # 12 s where the body was parsed first, in which nobody else was answered.
    assert serving.cpu_seconds() - begin < 6


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/create_session",
        "/api/v1/asample",
        "/api/v1/sessions/search",
        "/api/v1/retrieve_future",
        "/api/v1/forward_backward",
        "/oai/api/v1/chat/completions",
        "/oai/api/v1/completions",
    ],
)
def test_every_body_is_bounded(serving, path):
    def pieces():  # of which nothing says how many there are
        for _ in range(40):
            yield b"[" * 100_000

    for body in (b" " * (2 << 20), pieces()):
        answer = _posted(serving, path, body, serving.key())
        assert answer.status_code == 413
        assert "got more than 1" in answer.text


def _passes_to_refuse(model: str):
    """Bodies of pass 2: a declared size, and none."""
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=2).SerializeToString()
    yield message + b" " * (2 << 20)
    yield iter([message[:9], message[9:], *[b" " * (1 << 20)] * 2])


@pytest.mark.parametrize("which", range(2))
def test_the_step_after_a_refused_pass_fails_at_once(serving, caller, stories_model, which):
    mine = caller()
    model = mine.model(stories_model)
    assert "metrics" in mine.result(mine.train(model, 1))
    refused = mine.result(mine.send_pass(list(_passes_to_refuse(model))[which]))
    assert (refused["category"], "got more than 1 MiB" in refused["error"]) == ("user", True)
    step = mine.result(mine.step(model, 3))
    assert "a forward_backward since the last step failed" in step["error"]
    assert not any("never arrived" in line for line in serving.said)  # nothing was waited for
    # Nobody else's refused body is taken for one of this model's.
    assert caller("ann").send_pass(next(_passes_to_refuse(model)))[0] == 404


def test_what_holds_too_many_or_too_deep_lists_is_refused_in_words(serving, caller):
    answer = _posted(serving, "/api/v1/asample", b'{"x":[' + b"[]," * 300_000 + b"[]]}",
                     serving.key())  # fmt: skip
    assert answer.status_code == 400
    assert "300003 lists and objects, expected at most" in answer.json()["detail"]
    # Too deep, no JSON, half of a character (which could be stored but not sent).
    for text in (b"[" * 300 + b"]" * 300, b'"x', b'"\\ud800"', b'"\xed\xa0\x80"'):
        body = b'{"user_metadata": {"a": ' + text + b"}}"
        answer = _posted(serving, "/api/v1/create_session", body, serving.key())
        assert answer.status_code == 422
        assert answer.json()["detail"][0]["msg"].startswith("JSON: ")
    whole = {"user_metadata": {"a": "\U0001f600 \\ud800"}}
    session = caller().post("create_session", **whole)[1]["session_id"]
    assert caller().get(f"sessions/{session}")[1]["user_metadata"] == whole["user_metadata"]
    status, said = caller().post("asample", prompt={"chunks": 3}, sampling_params={})
    assert (status, said["detail"][0]["loc"]) == (422, ["body", "prompt", "chunks"])


def test_the_list_of_paths_is_open_and_loads_nothing(serving):
    listed = httpx.get(f"{serving.url}/docs").text
    for path in ("POST /oai/api/v1/responses", "GET /api/v1/sessions", "GET /metrics"):
        assert f"<dt>{path}</dt>" in listed
    assert "http" not in listed  # nothing is loaded from elsewhere


KEYS = st.one_of(
    st.just(NESTED_TOKEN),
    st.text(st.characters(min_codepoint=33, max_codepoint=255), max_size=60),
    st.binary(max_size=60).map(lambda raw: f"eyJh.{base64.urlsafe_b64encode(raw).decode()}.x"),
    st.from_regex(r"eyJ[a-zA-Z0-9_.=-]{0,60}", fullmatch=True),
    st.sampled_from([
        f"eyJh.{base64.urlsafe_b64encode(claims).decode()}.x"
        for claims in (b'{"sub":1}', b'{"sub":"tml:user:local","exp":1e999}', b'"\\ud800"',
                       b'{"sub":"tml:user:\\ud800"}', b"1" * 5000, b"[]", b"\xff")
    ]),
)  # fmt: skip


@pytest.fixture(scope="module")
def key_file(tmp_path_factory):
    root = tmp_path_factory.mktemp("keys")
    made = KeyFile(root / "keys.json", root)
    made.ensure(["local"])
    return made


@settings(max_examples=150, deadline=None, derandomize=True)
@given(key=KEYS, header=st.sampled_from(["x-api-key", "bearer"]))
def test_whatever_is_sent_as_a_key_gives_401(key_file, key, header):
    value = key if header == "x-api-key" else f"{header} {key}"
    name = "x-api-key" if header == "x-api-key" else "authorization"
    headers = [(name.encode(), value.encode("latin-1"))]
    sent = asyncio.run(_answers(_gate(_never, key_file), "/api/v1/sessions", headers, []))
    assert sent[0]["status"] == 401


def test_a_body_whose_rest_never_comes_ends_with_its_connection(key_file, monkeypatch):
    monkeypatch.setattr(access, "IDLE_SECONDS", 0.05)

    async def app(scope, receive, send):
        try:
            while (await receive())["more_body"]:
                pass
        except access.HTTPException as error:
            await JSONResponse({}, status_code=error.status_code)(scope, receive, send)

    begun = [{"type": "http.request", "body": b"{", "more_body": True}]
    sent = asyncio.run(_answers(_gate(app, key_file), "/healthz", [], begun))
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]


@pytest.mark.parametrize("starts", [False, True])
def test_an_error_without_a_handler_is_answered_and_leaves_the_connection(key_file, starts):
    """uvicorn closes the connection of an error that reaches it, without telling the client."""

    async def app(scope, receive, send):
        if starts:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise IndexError

    answers = _answers(_gate(app, key_file), "/healthz", [], [])
    if starts:  # no second answer fits
        with pytest.raises(IndexError):
            asyncio.run(answers)
        return
    sent = asyncio.run(answers)
    assert sent[0]["status"] == 500
    assert b"IndexError" not in sent[1]["body"]


def test_connections_without_a_request_are_closed_and_others_stay():
    class Connection:
        def __init__(self, request):
            self.cycle, self.is_open = request, True
            self.transport = SimpleNamespace(close=lambda: setattr(self, "is_open", False))

    request = lambda done: SimpleNamespace(response_complete=done)  # noqa: E731
    silent, answered, polling, busy = map(
        Connection, (None, request(True), request(False), request(True))
    )
    state = SimpleNamespace(connections={silent, answered, polling, busy})
    server: Any = SimpleNamespace(server_state=state)
    idle = IdleConnections(server)
    for now in range(0, 21, 2):
        busy.cycle = request(True)  # one after the other, each answered when it is looked at
        assert silent.is_open
        idle.check(float(now))
    assert IDLE_SECONDS == 20
    assert [one.is_open for one in (silent, answered, polling, busy)] == [
        False, False, True, True,
    ]  # fmt: skip


async def _answers(app, path: str, headers, pieces) -> list:
    sent, pieces = [], list(pieces)

    async def receive():
        if pieces:
            return pieces.pop(0)
        await asyncio.sleep(3600)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": headers,
             "query_string": b"", "scheme": "http", "server": ("x", 1)}  # fmt: skip
    await app(scope, receive, send)
    return sent


def _gate(app, keys):
    return AccessMiddleware(app, keys, error_response, lambda *request: None)


async def _never(scope, receive, send):
    raise AssertionError("a request without a right key came through")
