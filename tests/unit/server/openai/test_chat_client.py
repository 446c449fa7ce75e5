"""The terminal chat on a server: the answers of its stream are those of the engine (under 10 s)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tinker_cookbook.backends import connect
from tinker_cookbook.chat.answers import SamplingChoices, chat_models
from tinker_cookbook.exceptions import BackendError
from tinker_cookbook.sampling_model import SamplingModelSettings, open_sampling_model

CHOICES = SamplingChoices(max_tokens=30, temperature=0.7, top_p=0.9, seed=3)
MESSAGES = [{"role": "user", "content": "Once upon a time"}]


def open_chat(connection, name, renderer_name):
    settings = SamplingModelSettings(model_name=name, renderer_name=renderer_name)

    async def open_it():
        return await chat_models(connection, [await open_sampling_model(connection, settings)])

    return asyncio.run(open_it())[0]


@pytest.fixture
def served(oai_serving, monkeypatch):
    """``served(name, renderer_name)`` gives a model on the server."""
    monkeypatch.setenv("TINKER_API_KEY", oai_serving.key())
    connection = connect(base_url=oai_serving.url)
    yield lambda *names: open_chat(connection, *names)
    connection.close()


def test_the_streamed_answer_is_that_of_the_engine(served, here, stories_model):
    remote = served(stories_model, "role_colon")
    assert remote.url
    assert remote.context_length == 512
    pieces = []
    answer = asyncio.run(remote.answer(MESSAGES, CHOICES, pieces.append))
    assert len(pieces) > 5
    assert "".join(piece.text for piece in pieces) == answer.message["content"]
    local = connect("local", device="cpu", dtype="float32")
    expected = asyncio.run(
        open_chat(local, stories_model, "role_colon").answer(MESSAGES, CHOICES, lambda _: None)
    )
    local.close()
    assert answer.message == expected.message
    assert answer.ending == expected.ending == "length"
    assert answer.tokens == expected.tokens


def test_a_tool_call_and_whole_characters_arrive(served, scripted_model):
    model = served(scripted_model, "qwen2_5")
    choices = replace(CHOICES, temperature=0.0)
    pieces = []
    answer = asyncio.run(model.answer([{"role": "user", "content": "x"}], choices, pieces.append))
    (call,) = answer.message["tool_calls"]
    assert (call.function.name, answer.ending) == ("add", "stop")


def test_an_error_of_the_server_is_one_sentence(served, stories_model):
    model = served(stories_model, "role_colon")
    wrong = replace(model, model=replace(model.model, model_name="of_elsewhere"))
    with pytest.raises(BackendError, match="of_elsewhere"):
        asyncio.run(wrong.answer(MESSAGES, CHOICES, lambda _: None))
