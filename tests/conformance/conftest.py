"""The backends that the conformance suite runs against.

``local`` always; ``hosted`` where a person has a key and sets TINKER_CONFORMANCE_MODEL to a model
that the API serves.
"""

from __future__ import annotations

import os

import pytest

from tinker_cookbook.backends import connect


@pytest.fixture(params=["local", "hosted"])
def backend(request, stories_model, monkeypatch):
    """(service client, base model name)."""
    if request.param == "local":
        connection = connect("local", device="cpu", dtype="float32")
        yield connection.service, stories_model
        connection.service.close()
        return
    model, key = (
        os.environ.get("TINKER_CONFORMANCE_MODEL"),
        os.environ.get("TINKER_CONFORMANCE_KEY"),
    )
    if not (model and key):
        pytest.skip("hosted backend: set TINKER_CONFORMANCE_MODEL and TINKER_CONFORMANCE_KEY")
    monkeypatch.setenv("TINKER_API_KEY", key)
    yield connect("tinker").service, model
