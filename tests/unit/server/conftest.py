"""A server of the story model with two owners, and plain HTTP to it."""

from __future__ import annotations

import pytest
from serving import Caller, Serving


@pytest.fixture(scope="module")
def serving(stories_model, tmp_path_factory):
    """One server for the tests of a file."""
    settings = {"model_name": stories_model, "owners": "local,ann", "max_request_mb": 1}
    running = Serving(tmp_path_factory.mktemp("server"), settings).start()
    yield running
    if running.process.poll() is None:
        assert running.stop() == 0


@pytest.fixture
def caller(serving):
    """``caller("ann")``; ``caller(None)`` sends no key."""
    made = []

    def call(owner: str | None = "local", key: str | None = None) -> Caller:
        made.append(Caller(serving, key or (owner and serving.key(owner))))
        return made[-1]

    yield call
    for one in made:
        one.http.close()
