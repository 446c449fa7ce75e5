"""Opening a checkpoint or a base model for sampling (4 s)."""

from __future__ import annotations

import asyncio
import importlib

import pytest
from homes import new_home

from tinker_cookbook.chat.__main__ import Config as ChatConfig
from tinker_cookbook.chat.__main__ import main as chat_main
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError
from tinker_cookbook.sampling_model import SamplingModelSettings, open_sampling_model

RECORDED = "role_colon?split_special_tokens=true"
LOCAL = {"backend": "local", "device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def trained(stories_model, tmp_path_factory):
    """Connection settings with two checkpoints: with and without a recorded renderer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_COOKBOOK_HOME", new_home(tmp_path_factory.mktemp("home")))
        connection = SamplingModelSettings(model_name=stories_model, **LOCAL).connect()
        service = connection.service
        recorded = service.create_lora_training_client(
            stories_model, rank=2, user_metadata={"renderer_name": RECORDED}
        ).result()
        plain = service.create_lora_training_client(stories_model, rank=2).result()
        paths = [t.save_weights_for_sampler("x").result().path for t in (recorded, plain)]
        yield connection, paths
        service.close()


def test_a_base_model_has_the_chat_format_of_its_family(trained, stories_model):
    settings = SamplingModelSettings(model_name=stories_model, **LOCAL)
    settings.check()
    model = asyncio.run(open_sampling_model(trained[0], settings))
    assert (model.name, model.model_name, model.model_path) == (stories_model, stories_model, None)
    assert model.renderer_name == "role_colon"
    assert model.renderer_reason != "recorded by the run"
    prompt = model.renderer.build_generation_prompt([{"role": "user", "content": "Hi"}])
    assert model.client.compute_logprobs(prompt).result()[0] is None


def test_a_checkpoint_has_the_base_model_and_the_chat_format_of_its_run(trained, stories_model):
    connection, (path, plain) = trained
    model = asyncio.run(open_sampling_model(connection, SamplingModelSettings(model_path=path)))
    assert (model.name, model.model_name) == (path, stories_model)
    assert (model.renderer_name, model.renderer_reason) == (RECORDED, "recorded by the run")
    # The setting comes first.
    settings = SamplingModelSettings(model_path=path, renderer_name="role_colon")
    chosen = asyncio.run(open_sampling_model(connection, settings))
    assert chosen.renderer_name == "role_colon"
    assert chosen.renderer_reason != "recorded by the run"
    # A run that recorded none.
    model = asyncio.run(open_sampling_model(connection, SamplingModelSettings(model_path=plain)))
    assert model.renderer_name == "role_colon"


def test_what_cannot_be_opened(trained, stories_model):
    connection, (path, _) = trained
    with pytest.raises(ConfigurationError, match="model_path: got none"):
        SamplingModelSettings().check()
    with pytest.raises(ConfigurationError, match="model_path"):
        SamplingModelSettings(model_path="a/b").check()
    settings = SamplingModelSettings(model_path=path, model_name="Qwen/Qwen3-0.6B")
    with pytest.raises(ConfigurationError, match=r"was trained on .*stories260k; leave"):
        asyncio.run(open_sampling_model(connection, settings))
    missing = SamplingModelSettings(model_path=path.replace("/x", "/y"))
    with pytest.raises(CheckpointError):
        asyncio.run(open_sampling_model(connection, missing))


# The package's function of this name hides the module.
backends = importlib.import_module("tinker_cookbook.backends.connect")


class Connected(Exception):
    """Raised where a program would connect."""


def options_of_connect(monkeypatch, open_it):
    """Returns the sampler and the dtype of the base model that ``open_it()`` connects with."""
    found = {}

    def connect(*_, **options):
        found.update(options)
        raise Connected

    monkeypatch.setattr(backends, "connect", connect)
    with pytest.raises(Connected):
        open_it()
    sampler, engine = found["sampler"], found["engine_settings"]
    return sampler.sampler, sampler.vllm_timeout, engine.base_dtype


OPTIONS = {"sampler": "http://127.0.0.1:9", "vllm_timeout": 5.0, "base_dtype": "int8"}


def test_the_sampler_of_a_program_reaches_the_backend(monkeypatch, stories_model):
    def connected(**settings):
        config = ChatConfig(model_name=stories_model, **LOCAL, **settings)
        return options_of_connect(monkeypatch, lambda: chat_main(config))

    assert connected(**OPTIONS) == tuple(OPTIONS.values())
    # In a chat vLLM would start for minutes before the first answer.
    assert connected() == ("builtin", 1800.0, "auto")
