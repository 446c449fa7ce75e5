"""The backends that the conformance suite runs against.

``local`` and ``server`` (the official SDK against our server in another process) always; ``hosted``
where a person has a key and sets TINKER_CONFORMANCE_MODEL to a model that the API serves.
"""

from __future__ import annotations

import os

import pytest
from serving import Serving

from tinker_cookbook.backends import connect


@pytest.fixture(scope="session")
def serving(stories_model, tmp_path_factory):
    """A server of the story model."""
    running = Serving(tmp_path_factory.mktemp("server"), {"model_name": stories_model}).start()
    yield running
    assert running.stop() == 0


@pytest.fixture(params=["local", "server", "hosted"])
def backend(request, stories_model, monkeypatch):
    """(service client, base model name)."""
    if request.param == "local":
        connection = connect("local", device="cpu", dtype="float32")
        yield connection.service, stories_model
        connection.service.close()
        return
    if request.param == "server":
        serving = request.getfixturevalue("serving")
        monkeypatch.setenv("TINKER_API_KEY", serving.key())
        connection = connect(serving.url)
        yield connection.service, stories_model
        connection.close()
        return
    model, key = (
        os.environ.get("TINKER_CONFORMANCE_MODEL"),
        os.environ.get("TINKER_CONFORMANCE_KEY"),
    )
    if not (model and key):
        pytest.skip("hosted backend: set TINKER_CONFORMANCE_MODEL and TINKER_CONFORMANCE_KEY")
    monkeypatch.setenv("TINKER_API_KEY", key)
    yield connect("tinker").service, model
