"""One server of two models for all tests, and clients of its two owners."""

from __future__ import annotations

import openai
import pytest
from scripted import make_scripted_model, make_seeing_model
from serving import Serving

from tinker_cookbook.backends import connect


@pytest.fixture(scope="session")
def scripted_model(tmp_path_factory):
    return make_scripted_model(tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="session")
def seeing_model(tmp_path_factory):
    return make_seeing_model(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="session")
def oai_serving(stories_model, scripted_model, seeing_model, tmp_path_factory):
    settings = {
        "model_name": f"{stories_model},{scripted_model},{seeing_model}",
        "owners": "local,other",
        "max_queued_samples": 64,
        "image_sources": f"127.0.0.1,{seeing_model}",
        "max_image_megapixels": 2,
    }
    running = Serving(tmp_path_factory.mktemp("oai_server"), settings).start()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="session")
def oai_with(oai_serving):
    """``oai_with(key)`` gives a client."""
    url = f"{oai_serving.url}/oai/api/v1"
    return lambda key: openai.OpenAI(base_url=url, api_key=key, max_retries=0)


@pytest.fixture(scope="session")
def oai(oai_with, oai_serving):
    return oai_with(oai_serving.key())


@pytest.fixture(scope="session")
def other(oai_with, oai_serving):
    return oai_with(oai_serving.key("other"))


@pytest.fixture(scope="session")
def here(stories_model):
    """The story model in this process, through the SDK's methods."""
    connection = connect("local", device="cpu", dtype="float32")
    yield connection.service.create_sampling_client(base_model=stories_model)
    connection.service.close()
