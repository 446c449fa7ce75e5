from __future__ import annotations

from typing import Any

import numpy as np
import openai
import pytest
from tinker import types

from tinker_cookbook.backends import connect
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

MESSAGES = [
    {"role": "system", "content": "You tell stories."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "Tell me of "}, {"type": "text", "text": "a dog."}],
    },
]
PLAIN = [MESSAGES[0], {"role": "user", "content": "Tell me of a dog."}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
COLON = {"renderer_name": "role_colon"}
QUIET = {"renderer_name": "qwen3_disable_thinking"}


def joined(chunks, index=0):
    text, reason = "", None
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index == index:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
    return text, reason


def test_the_prompt_and_the_answer_are_the_renderers(oai, here, stories_model):
    renderer = get_renderer("role_colon", here.get_tokenizer())
    prompt = renderer.build_generation_prompt(PLAIN)
    params = types.SamplingParams(max_tokens=30, seed=4, stop=renderer.get_stop_sequences())
    sequences = here.sample(prompt, 2, params, topk_sample_logprobs=2).result().sequences
    found = oai.chat.completions.create(
        model=stories_model,
        messages=MESSAGES,
        n=2,
        max_completion_tokens=30,
        seed=4,
        logprobs=True,
        top_logprobs=2,
        extra_body=COLON,
    )
    assert found.usage.prompt_tokens == prompt.length
    for choice, sequence in zip(found.choices, sequences, strict=True):
        message, _ = renderer.parse_response(sequence.tokens)
        assert choice.message.content == message["content"]
        content = choice.logprobs.content
        logprobs = [one.logprob for one in content]
        np.testing.assert_allclose(logprobs, sequence.logprobs[: len(content)], atol=1e-4)
        assert all(len(one.top_logprobs) == 2 for one in content)
        assert b"".join(bytes(one.bytes) for one in content).decode().strip()


@pytest.mark.parametrize("renderer_name", ["chatml", None, "template"])
def test_the_format_is_the_models_own_unless_one_is_named(oai, scripted_model, renderer_name):
    renderer = get_renderer(renderer_name or "chatml", get_tokenizer(scripted_model))
    found = oai.chat.completions.create(
        model=scripted_model,
        messages=PLAIN,
        temperature=0,
        max_tokens=10,
        extra_body={"renderer_name": renderer_name} if renderer_name else None,
    )
    assert found.usage.prompt_tokens == renderer.build_generation_prompt(PLAIN).length
    assert found.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in (found.choices[0].message.content or "")


def test_the_format_is_the_one_that_the_run_recorded(oai, oai_serving, scripted_model, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", oai_serving.key())

    def tokens(model: str, more=None) -> int:
        asked = {"messages": PLAIN[1:], "max_tokens": 1, "extra_body": more}
        return oai.chat.completions.create(model=model, **asked).usage.prompt_tokens

    def rendered(name: str) -> int:
        renderer = get_renderer(name, get_tokenizer(scripted_model))
        return renderer.build_generation_prompt(PLAIN[1:]).length

    assert rendered("chatml") != rendered("qwen3_disable_thinking")
    with connect(oai_serving.url) as connection:
        paths = []
        for i, metadata in enumerate((QUIET, {"renderer_name": "of_elsewhere"}, None)):
            client: Any = connection.service.create_lora_training_client(
                scripted_model, rank=4, seed=i, user_metadata=metadata
            )
            paths.append(client.save_weights_for_sampler(f"recorded-{i}").result().path)
        _check_formats(tokens, rendered, *paths)
        for path in paths:  # other tests list what this owner has
            connection.service.create_rest_client().delete_checkpoint_from_tinker_path(
                path
            ).result()


def _check_formats(tokens, rendered, recorded: str, unknown: str, silent: str) -> None:
    assert tokens(recorded) == rendered("qwen3_disable_thinking")
    assert tokens(recorded, {"renderer_name": "chatml"}) == rendered("chatml")
    assert tokens(silent) == rendered("chatml")
    with pytest.raises(openai.BadRequestError, match="was trained with 'of_elsewhere'") as error:
        tokens(unknown)
    assert error.value.response.json()["error"]["param"] == "renderer_name"
    assert tokens(unknown, QUIET) == rendered("qwen3_disable_thinking")


def test_a_stream_is_the_unstreamed_answer_in_pieces(oai, stories_model):
    ask = {"model": stories_model, "messages": PLAIN, "max_tokens": 40, "seed": 11, "n": 2}
    ask |= {"extra_body": COLON, "stop": ["."], "logprobs": True}
    whole = oai.chat.completions.create(**ask)
    chunks = list(
        oai.chat.completions.create(stream=True, stream_options={"include_usage": True}, **ask)
    )
    for choice in whole.choices:
        assert joined(chunks, choice.index) == (choice.message.content, choice.finish_reason)
        tokens = [
            one.token
            for chunk in chunks
            for part in chunk.choices
            if part.index == choice.index and part.logprobs
            for one in part.logprobs.content
        ]
        assert tokens == [one.token for one in choice.logprobs.content]
        assert "." not in choice.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_tool_call_goes_round(oai, scripted_model):
    ask = {
        "model": scripted_model,
        "temperature": 0,
        "max_tokens": 20,
        "tools": [ADD],
        "extra_body": {"renderer_name": "qwen2_5"},
    }
    renderer = get_renderer("qwen2_5", get_tokenizer(scripted_model))
    prefix = renderer.create_conversation_prefix_with_tools([ADD["function"]], "You add.")
    messages = [{"role": "system", "content": "You add."}, {"role": "user", "content": "1 + 2"}]
    first = oai.chat.completions.create(messages=messages, **ask)
    prompt = renderer.build_generation_prompt([*prefix, messages[1]])
    assert first.usage.prompt_tokens == prompt.length
    choice = first.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1, "b": 2}')
    messages += [
        choice.message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "3"},
    ]
    again = oai.chat.completions.create(messages=messages, **ask)
    kept = [
        *prefix,
        messages[1],
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}],
        },
        {"role": "tool", "content": "3"},
    ]
    assert again.usage.prompt_tokens == renderer.build_generation_prompt(kept).length
    chunks = list(oai.chat.completions.create(messages=messages, stream=True, **ask))
    calls = [c for k in chunks for p in k.choices for c in p.delta.tool_calls or []]
    assert [(c.index, c.function.name) for c in calls] == [(0, "add")]
    assert joined(chunks) == ("", "tool_calls")
