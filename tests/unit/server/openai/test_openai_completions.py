from __future__ import annotations

import numpy as np
import pytest
from tinker import types

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def prompt(here):
    return here.get_tokenizer().encode(PROMPT)


def sampled(here, prompt, n=1, **params):
    asked = types.SamplingParams(**{"max_tokens": 24, "temperature": 1.0, **params})
    given = types.ModelInput.from_ints(prompt)
    return here.sample(given, n, asked, topk_sample_logprobs=3).result().sequences


def text_of(here, tokens):
    return here.get_tokenizer().decode([199, *tokens])[1:] if tokens else ""


def streamed(chunks):
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    return texts, ends


def test_draws_what_the_sdk_draws_with_the_same_log_probabilities(oai, here, stories_model, prompt):
    found = oai.completions.create(
        model=stories_model, prompt=prompt, n=2, max_tokens=24, seed=7, logprobs=3
    )
    expected = sampled(here, prompt, 2, seed=7)
    tokenizer = here.get_tokenizer()
    for choice, sequence in zip(found.choices, expected, strict=True):
        names = [
            tokenizer.decode([*tokenizer.encode("\n", add_special_tokens=False), t])
            for t in sequence.tokens
        ]
        assert [f"\n{name}" for name in choice.logprobs.tokens] == names
        np.testing.assert_allclose(choice.logprobs.token_logprobs, sequence.logprobs, atol=1e-4)
        assert "".join(choice.logprobs.tokens) == choice.text
        assert [len(top) >= 3 for top in choice.logprobs.top_logprobs] == [True] * 24
        offsets = np.cumsum([0, *map(len, choice.logprobs.tokens)])[:-1].tolist()
        assert choice.logprobs.text_offset == offsets
        assert choice.finish_reason == "length"
    assert found.usage.prompt_tokens == len(prompt)
    assert found.usage.completion_tokens == 48
    assert found.choices[0].text != found.choices[1].text


def test_a_stream_is_the_unstreamed_answer_in_pieces(oai, stories_model):
    ask = {"model": stories_model, "prompt": [PROMPT, "The dog"], "n": 2, "max_tokens": 20}
    ask |= {"seed": 3, "logprobs": 2, "echo": True, "stop": [" the", "."]}
    whole = oai.completions.create(**ask)
    chunks = list(
        oai.completions.create(stream=True, stream_options={"include_usage": True}, **ask)
    )
    texts, ends = streamed(chunks)
    assert [texts[i] for i in range(4)] == [choice.text for choice in whole.choices]
    assert [ends[i] for i in range(4)] == [choice.finish_reason for choice in whole.choices]
    for choice in whole.choices:
        tokens, offsets = [], []
        for chunk in chunks:
            for part in chunk.choices:
                if part.index == choice.index:
                    tokens += part.logprobs.tokens
                    offsets += part.logprobs.text_offset
        assert (tokens, offsets) == (choice.logprobs.tokens, choice.logprobs.text_offset)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len(chunks) > 8
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text_before_them(oai, here, stories_model, prompt, stream):
    free = oai.completions.create(model=stories_model, prompt=prompt, max_tokens=40, seed=5)
    text = free.choices[0].text
    stop = text[20:25]  # mostly within tokens
    ask = {"model": stories_model, "prompt": prompt, "max_tokens": 40, "seed": 5, "logprobs": 0}
    found = oai.completions.create(stop=stop, stream=stream, **ask)
    if stream:
        texts, ends = streamed(found)
        assert (texts, ends) == ({0: text[: text.index(stop)]}, {0: "stop"})
        return
    choice = found.choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    assert found.usage.completion_tokens < 40
    offsets = choice.logprobs.text_offset
    assert max(offsets) < len(choice.text)


def test_echo_scores_the_prompt(oai, here, stories_model, prompt):
    ask = {"model": stories_model, "prompt": PROMPT, "echo": True, "logprobs": 1, "seed": 0}
    known = here.compute_logprobs(types.ModelInput.from_ints(prompt)).result()
    for most in (0, 1, 3):
        found = oai.completions.create(max_tokens=most, **ask)
        logprobs = found.choices[0].logprobs
        assert found.choices[0].text.startswith(PROMPT)
        assert (found.choices[0].text == PROMPT) == (most == 0)
        assert len(logprobs.tokens) == len(prompt) + most == len(logprobs.top_logprobs)
        assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
        got = logprobs.token_logprobs[1 : len(prompt)]
        np.testing.assert_allclose(got, known[1:], atol=1e-4)
        assert found.usage.completion_tokens == most
        places = zip(logprobs.tokens, logprobs.text_offset, strict=True)
        for name, at in list(places)[2:]:
            assert found.choices[0].text[at:].startswith(name)
