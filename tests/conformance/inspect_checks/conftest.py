"""Checks of the integration of Inspect AI; ``test_inspect.py`` runs them in an environment with it.

    python -m pytest tests/conformance/inspect_checks/*_checks.py -p no:xdist

No connection to another machine is possible in them.
"""

from __future__ import annotations

import socket

import pytest

from tinker_cookbook.backends import connect
from tinker_cookbook.tokenizer_utils import get_tokenizer


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """Inspect must not need another machine, for example to count tokens."""
    connect_socket = socket.socket.connect

    def refuse(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "localhost", "::1"):
            raise OSError(f"connection to {address}")
        return connect_socket(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def scripted(tokenizer_folder):
    """(client, api) of a chat format, with the answers that the client gives."""
    # Not at the top: pytest also loads this file where Inspect is not installed.
    from inspect_models import Scripted

    from tinker_cookbook.eval.inspect_bridge.model import InspectAPIFromTinkerSampling

    def make(family: str, *answers: str, renderer: str = "", stop_reason="stop", **settings):
        folder = tokenizer_folder(family)
        client = Scripted(get_tokenizer(folder), *answers, stop_reason=stop_reason)
        api = InspectAPIFromTinkerSampling(
            renderer_name=renderer or family, model_name=folder, sampling_client=client, **settings
        )
        return client, api

    return make


@pytest.fixture(scope="module")
def stories(stories_model):
    connection = connect("local", device="cpu", dtype="float32")
    yield connection.service.create_sampling_client(base_model=stories_model).result()
    connection.close()
