"""Parts of the verifiers recipe that need no verifiers: the client, messages, settings."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json

import chz
import numpy as np
import pytest
import tinker

from recipes.verifiers_rl import train
from recipes.verifiers_rl.messages import openai_fields, prompt_of
from recipes.verifiers_rl.tinker_openai import TinkerAsyncOpenAIClient
from recipes.verifiers_rl.verifiers_env import convert_states_to_trajectory_group
from tinker_cookbook.backends import connect
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

MESSAGES = [{"role": "user", "content": "Once upon a time"}]


@pytest.fixture(scope="module")
def client(stories_model):
    connection = connect("local", device="cpu", dtype="float32")
    sampling = connection.service.create_sampling_client(base_model=stories_model)
    tokenizer = get_tokenizer(stories_model)
    yield TinkerAsyncOpenAIClient(sampling, get_renderer("role_colon", tokenizer), tokenizer)
    connection.service.close()


def scores(client, prompt, tokens):
    whole = tinker.ModelInput.from_ints([*prompt, *tokens])
    return client.sampling_client.compute_logprobs(whole).result()[len(prompt) :]


def test_chat_has_the_tokens_and_log_probabilities_of_what_was_sampled(client):
    ask = {"model": "m", "messages": MESSAGES, "max_completion_tokens": 12, "seed": 3, "n": 1}
    found = asyncio.run(client.chat.completions.create(**ask, logprobs=True, extra_body={}))
    (choice,) = found.choices
    assert found.prompt_token_ids == prompt_of(client.renderer, MESSAGES).to_ints()
    assert len(choice.token_ids) == found.usage.completion_tokens == 12
    assert [e.token for e in choice.logprobs.content] == [f"token_id:{t}" for t in choice.token_ids]
    again = scores(client, found.prompt_token_ids, choice.token_ids)
    np.testing.assert_allclose([e.logprob for e in choice.logprobs.content], again, atol=1e-4)
    assert choice.finish_reason == "length"
    stopped = asyncio.run(client.chat.completions.create(**ask, stop=choice.message.content[:4]))
    assert stopped.choices[0].finish_reason == "stop"


def test_completions_continue_a_text_also_as_a_stream(client):
    ask = {"prompt": "The dog", "max_tokens": 6, "seed": 1, "temperature": 0.5}
    found = asyncio.run(client.completions.create(**ask))
    (choice,) = found.choices
    assert choice.prompt_token_ids == client.tokenizer.encode("The dog")
    again = scores(client, choice.prompt_token_ids, choice.token_ids)
    np.testing.assert_allclose(choice.logprobs.token_logprobs, again, atol=1e-4)

    async def streamed():
        stream = await client.completions.create(stream=True, **ask)
        chunks = [chunk async for chunk in stream]
        return chunks, await stream.get_final_response()

    chunks, final = asyncio.run(streamed())
    assert [chunk.choices[0].text for chunk in chunks] == [final.choices[0].text] == [choice.text]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"stream": True}, "stream: got True"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temprature": 0.5}, "temprature.*'temperature'"),
        ({"n": 2}, "n: got 2"),
        ({"tools": [{"type": "function", "function": {"name": "add"}}]}, "no form for tools.*add"),
    ],
)
def test_what_the_client_does_not_support_is_refused(client, given, names):
    with pytest.raises(ConfigurationError, match=names):
        asyncio.run(client.chat.completions.create(messages=MESSAGES, **given))


def test_tool_calls_and_thinking_are_openai_s(tokenizer_folder):
    renderer = get_renderer("qwen3", get_tokenizer(tokenizer_folder("qwen3")))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    system = {"role": "system", "content": "Be brief."}
    text = renderer.tokenizer.decode(prompt_of(renderer, [system, *MESSAGES], tools).to_ints())
    assert "Be brief." in text
    assert '"name": "add"' in text
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    said = f"<think>\nhm\n</think>\n\nOK{called}"
    message = openai_fields(renderer.parse_response(renderer.tokenizer.encode(said))[0])
    assert message["reasoning_content"].strip() == "hm"
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    answered = [*MESSAGES, message, {"role": "tool", "tool_call_id": call["id"], "content": "2"}]
    assert "<tool_response>" in renderer.tokenizer.decode(prompt_of(renderer, answered).to_ints())


def test_states_become_trajectories_and_steps_without_tokens_are_refused():
    tokens = {"prompt_ids": [1, 2], "completion_ids": [3], "completion_logprobs": [-0.5]}
    state = {"trajectory": [{"tokens": tokens}], "reward": 0.5, "metrics": {"m": 1.0}}
    group = convert_states_to_trajectory_group([state])
    (turn,) = group.trajectories_G[0].transitions
    assert (turn.ob.to_ints(), turn.ac.tokens, turn.ac.logprobs) == ([1, 2], [3], [-0.5])
    assert (group.final_rewards_G, group.metrics_G) == ([0.5], [{"m": 1.0}])
    with pytest.raises(DataValidationError, match="step 0: got no tokens"):
        convert_states_to_trajectory_group([{"trajectory": [{"tokens": None}]}])


def test_the_installed_version_decides_and_a_missing_one_is_named(monkeypatch, stories_model):
    for version, v1 in (("0.1.9.post3", False), ("0.4.0", True)):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
        assert train.has_v1() is v1

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    cli = train.CLIConfig(model_name=stories_model, renderer_name="role_colon")
    with pytest.raises(ConfigurationError, match=r"pip install -e '.*\[verifiers\]'"):
        cli.resolved()
    for arguments in ("{a", "[1]"):
        with pytest.raises(ConfigurationError, match=r"vf_env_args: got .* expected a JSON object"):
            chz.replace(cli, vf_env_args=arguments).resolved()
