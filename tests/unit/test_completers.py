from __future__ import annotations

import asyncio
from concurrent.futures import Future as ThreadFuture

import pytest
import tinker
from tinker import types

from tinker_cookbook.completers import (
    TinkerMessageCompleter,
    TinkerTokenCompleter,
    TokenCompleter,
    TokensWithLogprobs,
)
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError


class Echo:
    """A sampling client that answers at once and notes what it was asked."""

    def __init__(self, tokens: list[int]):
        self.tokens = tokens
        self.asked: list[dict] = []

    def sample(self, **asked):
        self.asked.append(asked)
        sequence = types.SampledSequence(
            stop_reason="length",
            sequence_id="s1",
            _tokens_list=self.tokens,
            _logprobs_list=[-0.5] * len(self.tokens),
        )
        done: ThreadFuture = ThreadFuture()
        done.set_result(types.SampleResponse(sequences=[sequence], prompt_cache_hit_tokens=2))
        return asyncio.wrap_future(done)


def complete(completer: TokenCompleter, prompt: list[int], stop) -> TokensWithLogprobs:
    async def run():
        return await completer(tinker.ModelInput.from_ints(prompt), stop)

    return asyncio.run(run())


def test_all_of_a_sample_comes_through():
    client = Echo([7, 8])
    result = complete(TinkerTokenCompleter(client, max_tokens=5, temperature=0.3), [1, 2], [9])
    assert result == TokensWithLogprobs([7, 8], [-0.5, -0.5], "length", "s1", 2)
    assert result.logprobs == [-0.5, -0.5]
    asked = client.asked[0]
    assert asked["num_samples"] == 1
    params = asked["sampling_params"]
    assert (params.stop, params.max_tokens, params.temperature) == ([9], 5, 0.3)


@pytest.mark.parametrize(("window", "expected"), [(None, 5), (100, 5), (6, 4), (3, 1)])
def test_the_context_window_bounds_the_sample(window, expected):
    client = Echo([1])
    complete(TinkerTokenCompleter(client, 5, context_window=window), [1, 2], ["x"])
    assert client.asked[0]["sampling_params"].max_tokens == expected


def test_missing_logprobs_and_bad_settings_are_named():
    with pytest.raises(DataValidationError, match="has no log-probabilities"):
        _ = TokensWithLogprobs([1], None).logprobs
    with pytest.raises(ConfigurationError, match="max_tokens=0; expected at least 1"):
        TinkerTokenCompleter(Echo([]), 0)
    with pytest.raises(ConfigurationError, match=r"temperature=-1.*expected a finite number >= 0"):
        TinkerMessageCompleter(Echo([]), None, 5, temperature=-1)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def qwen(tokenizer_folder):
    from transformers import AutoTokenizer

    from tinker_cookbook.renderers import get_renderer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder("qwen3"))
    return tokenizer, get_renderer("qwen3_instruct", tokenizer)


def test_messages_go_through_the_renderer(qwen):
    tokenizer, renderer = qwen
    client = Echo(tokenizer.encode("Paris.<|im_end|>"))
    messages = [{"role": "user", "content": "Capital of France?"}]
    completer = TinkerMessageCompleter(client, renderer, max_tokens=9, temperature=0.0)
    answer = asyncio.run(completer(messages))
    assert answer["role"] == "assistant"
    assert answer["content"] == "Paris."
    asked = client.asked[0]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(asked["prompt"].to_ints()) == prompt
    assert asked["sampling_params"].stop == renderer.get_stop_sequences()
