"""The page of what works is what is found today; what is not known ends it with an error."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest
import tinker

from tests.conformance.compatibility import probing
from tests.conformance.compatibility.probing import Probe, Refusal, run
from tests.conformance.compatibility.survey import PROBED, unprobed
from tests.conformance.compatibility.world import World

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "12-compatibility.md"


def test_the_page_is_what_a_server_does_today(stories_model, tmp_path):
    page = PAGE.read_text(encoding="utf-8")
    if f"`tinker` {version('tinker')}." not in page:
        pytest.skip(f"the page is of another SDK than {version('tinker')}; write it anew")
    written = tmp_path / "page.md"
    module = "tests.conformance.compatibility"
    done = subprocess.run(
        [sys.executable, "-m", module, f"model_name={stories_model}", f"output={written}"],
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert written.read_text(encoding="utf-8") == page


def test_nothing_that_the_sdk_has_is_without_a_probe():
    assert list(unprobed()) == []


def test_what_a_newer_sdk_adds_is_named(monkeypatch):
    monkeypatch.setattr(tinker.RestClient, "merge_weights", lambda self: None, raising=False)
    monkeypatch.setattr(tinker.RestClient, "merge_weights_async", lambda self: 0, raising=False)
    monkeypatch.setattr(tinker, "EvalClient", object, raising=False)
    monkeypatch.setattr(tinker.auth, "__all__", [*tinker.auth.__all__, "refresh"])
    assert set(unprobed()) == {
        "RestClient.merge_weights",
        "RestClient.merge_weights_async",
        "tinker.EvalClient",
        "tinker.auth.refresh",
    }
    assert PROBED[tinker.RestClient].keys() >= {"whoami"}


class Nowhere(World):
    def __init__(self) -> None:
        self.model, self.folder = "/the/model", Path("/the/folder")


def row_of(error: Exception | None) -> probing.Row:
    def probe(world: World) -> None:
        if error is not None:
            raise error

    return run(Probe("it", "what was checked", probe), Nowhere())


def status_error(status: int, body: object) -> tinker.APIStatusError:
    request = httpx.Request("GET", "http://x")
    return tinker.APIStatusError("no", response=httpx.Response(status, request=request), body=body)


def test_a_probe_works_or_is_refused_or_is_broken(monkeypatch):
    assert row_of(None) == probing.Row("it", "works", "what was checked")
    refused = status_error(400, {"detail": "got /the/model of 20261123-015954-bf1a1191:train:7"})
    assert row_of(refused) == probing.Row("it", "refused", "got MODEL of RUN")
    user = tinker.RequestFailedError("Request failed: no for self.request_id='a' b", "a", "user")  # pyright: ignore[reportArgumentType]
    assert row_of(user) == probing.Row("it", "refused", "no")
    for error in (
        AssertionError("means nothing"),
        status_error(404, {"detail": "Not Found"}),  # said by no one who knows this server
        status_error(422, {"detail": [{"loc": ["body"]}]}),
        status_error(500, {"detail": "no"}),
        tinker.RequestFailedError("no", "a", "server"),  # pyright: ignore[reportArgumentType]
    ):
        assert row_of(error).outcome == "broken", error
    monkeypatch.setattr(probing, "MOST_SECONDS", -1)
    assert row_of(Refusal("no")).outcome == "broken"
