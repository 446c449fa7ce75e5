"""Tokens in, tokens out: ``/inference/v1/generate``, and token ids in the other responses."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest
from tinker import types

PROMPT = "Once upon a time"
URLS = ("/inference/v1/generate", "/oai/api/inference/v1/generate")


@pytest.fixture(scope="module")
def prompt(here):
    return here.get_tokenizer().encode(PROMPT)


@pytest.fixture(scope="module")
def post(oai_serving, stories_model):
    http = httpx.Client(base_url=oai_serving.url, headers={"X-API-Key": oai_serving.key()})

    def call(path: str, **body):
        return http.post(path, json={"model": stories_model, **body}, timeout=60)

    yield call
    http.close()


def expected(here, prompt, n=1, **params):
    given = types.SamplingParams(**{"temperature": 1.0, **params})
    return here.sample(types.ModelInput.from_ints(prompt), n, given).result().sequences


def test_tokens_and_log_probabilities_are_the_engine_s(post, here, prompt):
    # What verifiers 0.4 sends with renderers 0.1, neutral values included.
    params = {
        "max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 5, "stop_token_ids": [2],
        "logprobs": 1, "skip_special_tokens": False, "routed_experts_prompt_start": 3, "n": 2,
    }  # fmt: skip
    (first, second) = [
        post(url, token_ids=prompt, sampling_params=params, cache_salt="a", priority=0).json()
        for url in URLS
    ]
    assert first["choices"] == second["choices"]
    sequences = expected(
        here, prompt, 2, max_tokens=24, temperature=0.9, top_p=0.95, seed=5, stop=[2]
    )
    for choice, sequence in zip(first["choices"], sequences, strict=True):
        assert choice["token_ids"] == sequence.tokens
        assert choice["finish_reason"] == sequence.stop_reason
        content = choice["logprobs"]["content"]
        assert [one["token"] for one in content] == [f"token_id:{t}" for t in sequence.tokens]
        np.testing.assert_allclose(
            [one["logprob"] for one in content], sequence.logprobs, atol=1e-6
        )
        assert all(len(one["top_logprobs"]) == 1 for one in content)
    assert first["request_id"] != second["request_id"]
    assert first["usage"]["prompt_tokens"] == len(prompt)


def test_a_stream_has_the_same_tokens(post, prompt):
    body = {"token_ids": prompt, "sampling_params": {"max_tokens": 9, "seed": 4, "logprobs": 0}}
    (whole,) = post(URLS[0], **body).json()["choices"]
    lines = post(URLS[0], stream=True, **body).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
    assert [t for chunk in chunks for t in chunk["token_ids"]] == whole["token_ids"]
    entries = [one for chunk in chunks for one in chunk["logprobs"]["content"]]
    assert entries == whole["logprobs"]["content"]
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["length"]


@pytest.mark.parametrize(
    ("body", "param", "names"),
    [
        ({"token_ids": []}, "token_ids", "at least 1"),
        ({"token_ids": [1, 99999]}, "prompt", "99999"),
        ({"token_ids": [1] * 600}, "prompt", "512"),
        ({"token_ids": [1], "features": {"mm_hashes": {}}}, "features", "not supported"),
        ({"token_ids": [1], "lora": "x"}, "lora", "does not know"),
        ({"token_ids": [1], "sampling_params": {"ignore_eos": True}}, "ignore_eos", "false"),
        ({"token_ids": [1], "sampling_params": {"bad_word": 1}}, "bad_word", "'bad_words'"),
        ({"token_ids": [1], "sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs", "know"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 0}}, "max_tokens", "equal to 1"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(post, body, param, names):
    answer = post(URLS[0], **body)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert names in error["message"]
    assert error["param"] in (param, None), error


@pytest.mark.parametrize("stop", [None, [" the", "."]])
def test_chat_returns_exact_tokens_whole_and_streamed(oai, here, stories_model, stop):
    ask = {
        "model": stories_model, "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 20, "seed": 3, "logprobs": True, "stop": stop,
        "extra_body": {
            "renderer_name": "role_colon", "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        },
    }  # fmt: skip
    whole = oai.chat.completions.create(**ask)
    (choice,) = whole.choices
    stops = [*(stop or []), "\n\nUser:"]
    (sequence,) = expected(here, whole.prompt_token_ids, max_tokens=20, seed=3, stop=stops)
    assert choice.token_ids == sequence.tokens
    names = [entry.token for entry in choice.logprobs.content]
    assert names == [f"token_id:{token}" for token in sequence.tokens]
    found = [entry.logprob for entry in choice.logprobs.content]
    np.testing.assert_allclose(found, sequence.logprobs, atol=1e-6)
    chunks = list(oai.chat.completions.create(stream=True, **ask))
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert all("prompt_token_ids" not in chunk.model_extra for chunk in chunks[1:])
    parts = [chunk.choices[0] for chunk in chunks]
    assert [token for part in parts for token in part.token_ids] == sequence.tokens
    entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
    assert [entry.logprob for entry in entries] == found
    text = "".join(part.delta.content or "" for part in parts)
    assert text == choice.message.content


def test_completions_return_exact_tokens(oai, here, stories_model, prompt):
    ask = {"model": stories_model, "prompt": PROMPT, "max_tokens": 10, "seed": 3, "logprobs": 0}
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    (choice,) = oai.completions.create(extra_body=extra, **ask).choices
    (sequence,) = expected(here, prompt, max_tokens=10, seed=3)
    assert (choice.prompt_token_ids, choice.token_ids) == (prompt, sequence.tokens)
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in sequence.tokens]
    (echoed,) = oai.completions.create(extra_body=extra, echo=True, **ask).choices
    assert (echoed.prompt_token_ids, echoed.token_ids) == (prompt, sequence.tokens)
    plain = oai.completions.create(**ask).choices[0]
    assert not {"token_ids", "prompt_token_ids"} & set(plain.model_extra)
