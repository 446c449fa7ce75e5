from __future__ import annotations

import asyncio
import re
import time
from types import SimpleNamespace

import numpy as np
import openai
import pytest

from tinker_cookbook.backends import connect
from tinker_cookbook.backends.convert import TokenSequence
from tinker_cookbook.backends.local_sampling import LocalSamplingClient
from tinker_cookbook.engine.checkpoints.store import CheckpointStore
from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.sampling.options import SamplingSettings
from tinker_cookbook.server.openai.sampling import ApiCall, SamplingOptions


@pytest.fixture(scope="module")
def checkpoint(oai_serving, stories_model):
    """Makes checkpoints of the first owner: (service, path)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", oai_serving.key())
        connection = connect(oai_serving.url)
        client = connection.service.create_lora_training_client(
            stories_model,
            rank=4,
            seed=0,
            user_metadata={"recipe": "sl_basic", "log_path": "/logs/my_run"},
        )
        path = client.save_weights_for_sampler("first").result().path
        yield connection.service, client, path
        connection.close()


def said(error):
    """(status, code, param) of an error that has OpenAI's shape."""
    body = error.value.response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"]
    return error.value.status_code, body["code"], body["param"]


def test_models_are_those_served_and_the_owners_checkpoints(
    oai, other, checkpoint, stories_model, scripted_model, seeing_model
):
    path, bases = checkpoint[2], [stories_model, scripted_model, seeing_model]
    assert [model.id for model in oai.models.list()] == [*bases, path]
    assert [model.id for model in other.models.list()] == bases
    entry = oai.models.retrieve(path)
    assert entry.owned_by == "local"
    # For people: recipe, log folder, checkpoint, updates, time of the save.
    assert re.fullmatch(r"sl_basic · my_run · first · step 0 · \d\d \w{3} \d\d:\d\d", entry.name)
    assert entry in list(oai.models.list())
    assert oai.models.retrieve(stories_model).id == stories_model
    with pytest.raises(openai.NotFoundError) as error:
        other.models.retrieve(path)
    assert said(error) == (404, "model_not_found", "model")


def test_a_checkpoint_is_sampled_until_it_is_deleted(
    oai, other, checkpoint, stories_model, oai_serving, monkeypatch
):
    service, client, path = checkpoint
    ask = {"prompt": "Once", "max_tokens": 8, "temperature": 0}
    base = oai.completions.create(model=stories_model, **ask).choices[0].text
    assert oai.completions.create(model=path, **ask).choices[0].text == base  # B is zero
    training = client.save_state("state").result().path
    assert oai.completions.create(model=training, **ask).choices[0].text == base
    with pytest.raises(openai.NotFoundError) as error:
        other.completions.create(model=path, **ask)
    assert said(error) == (404, "model_not_found", "model")
    second = client.save_weights_for_sampler("second").result().path
    oai.completions.create(model=second, **ask)
    monkeypatch.setenv("TINKER_API_KEY", oai_serving.key())
    service.create_rest_client().delete_checkpoint_from_tinker_path(second).result()
    with pytest.raises(openai.NotFoundError) as error:
        oai.completions.create(model=second, **ask)
    assert said(error) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"suffix": "the end"}, "suffix"),
        ({"extra_body": {"response_format": {"type": "xml"}}}, "response_format"),
        ({"extra_body": {"temprature": 0}}, "temprature"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"n": 0}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": ""}, "stop"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [5] * 4000}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": {"foo": 1}}, "stream_options"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_unsupported_requests_are_refused(oai, stories_model, more, param, stream):
    ask = {"model": stories_model, "prompt": "Once", "max_tokens": 4, **more}
    with pytest.raises(openai.BadRequestError) as error:
        oai.completions.create(stream=stream, **ask)
    assert said(error)[2].partition(".")[0] == param


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning_effort": "low"}, "renderer_name"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        *(
            ({"messages": [{"role": role, "content": "Hi"}]}, "messages[0].role")
            for role in ("human", "", 5, None)
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"extra_body": {"renderer_name": "role_collon"}}, "renderer_name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, None),
    ],
)
def test_chat_refuses_too(oai, stories_model, more, param):
    messages = [{"role": "user", "content": "Hi"}]
    ask = {"model": stories_model, "messages": messages, "max_tokens": 4, **more}
    with pytest.raises(openai.BadRequestError) as error:
        oai.chat.completions.create(**ask)
    assert said(error)[2] == param


def test_keys_models_and_addresses_that_are_unknown(oai_with, oai):
    with pytest.raises(openai.AuthenticationError) as error:
        oai_with("tml-wrong").models.list()
    assert said(error) == (401, "invalid_api_key", None)
    with pytest.raises(openai.NotFoundError) as error:
        oai.chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": "Hi"}])
    assert said(error) == (404, "model_not_found", "model")
    assert error.value.response.json()["error"]["message"].startswith("model: got 'gpt-x'")
    root = oai.with_options(base_url=str(oai.base_url).removesuffix("/oai/api/v1/"))
    for client in (oai, root):
        with pytest.raises(openai.NotFoundError) as error:
            client.embeddings.create(model="x", input="y")
        assert said(error) == (404, "unknown_url", None)
        assert "OpenAI API is at /v1" in error.value.response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place(oai, stories_model, stream):
    """While it runs there is no room for another; once its client has gone there is."""
    ask = {"model": stories_model, "prompt": "Once", "max_tokens": 500, "n": 60, "stop": ["\x00"]}
    if stream:
        left = oai.completions.create(stream=True, seed=0, **ask)
        next(iter(left))
        with pytest.raises(openai.RateLimitError) as error:
            oai.completions.create(**ask)
        assert said(error)[:2] == (429, "rate_limit_exceeded")
        left.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            oai.with_options(timeout=0.5).completions.create(seed=0, **ask)
    until = time.monotonic() + 5
    while True:
        try:
            found = oai.completions.create(**{**ask, "max_tokens": 1})
            break
        except openai.RateLimitError:
            assert time.monotonic() < until
            time.sleep(0.05)
    assert len(found.choices) == 60


def test_closing_cancels_in_the_engine(stories_model, monkeypatch, tmp_path):
    engine = Engine("cpu", "float32")
    client = LocalSamplingClient.open(engine, CheckpointStore(tmp_path), None, stories_model)
    submitted = []
    sample = engine.sample
    monkeypatch.setattr(
        engine, "sample", lambda request: submitted.append(request) or sample(request)
    )
    model = SimpleNamespace(sampler=client.sampler(), base_model=stories_model)
    options = SamplingOptions(model, SamplingSettings(seed=0), 8, None)
    count = lambda owner, count: None  # noqa: E731
    state = SimpleNamespace(engine=engine, acquire_samples=count, release_samples=count)
    body, prompt = SimpleNamespace(model="m", stream=True), TokenSequence(np.array([5]))
    kind = SimpleNamespace(id_prefix="", chunk_name="")

    async def leave():
        call = ApiCall(state, "local", body, options, [prompt], [kind])
        await call.start()
        first = await anext(call.token_batches())
        call.close()
        return submitted[0], first

    try:
        request, first = asyncio.run(leave())
        _check_left(engine, request, first)
    finally:
        engine.close()


def _check_left(engine, request, first):
    assert set(first) <= set(range(8))
    assert all(first.values())
    assert request.future.cancelled()
    until = time.monotonic() + 10
    while any(scheduler.busy for scheduler in engine._schedulers.values()):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert max(len(row.sample.tokens) for row in request.rows) < request.limit


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "a", "tool_call_id": ["c"]}, "messages[1].tool_call_id"),
        ({"role": "tool", "content": "a", "tool_call_id": {}}, "messages[1].tool_call_id"),
        ({"role": "assistant", "tool_calls": 5}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [{**CALL, "id": []}]}, "messages[1].tool_calls[0]"),
    ],
)
def test_ids_and_calls_of_another_type_are_refused(oai, scripted_model, message, param):
    messages = [{"role": "user", "content": "Hi"}, message]
    with pytest.raises(openai.BadRequestError) as error:
        oai.chat.completions.create(model=scripted_model, messages=messages, max_tokens=1)
    assert said(error) == (400, None, param)
