"""Sampling against ``generate``, the trainer, and exact distributions.

Tests with the fixture ``draw`` run for the built-in sampler and for vLLM's (its server is a fake).
"""

from __future__ import annotations

import weakref

import engine_reference as ref
import numpy as np
import pytest
import torch

from tinker_cookbook.engine.sampling.fallback_sampler import FallbackSampler
from tinker_cookbook.engine.sampling.requests import SamplingSettings, sample_request, score_request
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError

BASES = ("stories", *ref.ARCHITECTURES)


@pytest.fixture
def base(request, tiny_base, stories_base):
    return stories_base if request.param == "stories" else tiny_base(request.param)


def settings(**kwargs) -> SamplingSettings:
    return SamplingSettings(**{"max_tokens": 20, "seed": 1, **kwargs})


@pytest.mark.parametrize("base", BASES, indirect=True)
def test_one_by_one_equals_the_batch(base):
    """What models get that cannot be batched; the batch equals ``generate`` (test_batcher)."""
    sampler = Sampler(base, ref.random_adapter(base))
    rng = np.random.default_rng(0)
    for length in (1, 33, 17):
        prompt = rng.integers(3, base.vocab_size, length)
        for how in ({"temperature": 0.0}, {"seed": 5, "stop_tokens": frozenset(range(3, 60))}):
            alone = sample_request(sampler, prompt, 3, settings(**how))
            sampling = FallbackSampler()
            ref.finish(sampling, alone)
            found, expected = alone.future.result(0), ref.draw(sampler, prompt, 3, settings(**how))
            assert [s.tokens for s in found] == [s.tokens for s in expected]
            assert [s.stop_reason for s in found] == [s.stop_reason for s in expected]
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_bf16_divergence_from_the_trainer(stories_model, record_property):
    """KL(sampler || trainer), estimated on the sampler's own tokens: mean of exp(d) - 1 - d."""
    base = ref.load_base(stories_model, torch.bfloat16)
    run = ref.make_run(base, size=0.005)
    samples = ref.draw(Sampler(base, run.snapshot()), [1], 16, settings(max_tokens=60))
    data = [ref.example(np.array([1, *s.tokens]), weights=np.zeros(len(s.tokens))) for s in samples]
    trained = run.forward_backward(data, "cross_entropy", backward=False).logprobs
    d = np.concatenate([t - np.array(s.logprobs) for t, s in zip(trained, samples, strict=True)])
    kl = float((np.exp(d) - 1 - d).mean())
    record_property("sampler_trainer_bf16_kl", kl)
    assert len(d) > 500
    assert kl < 1e-3


@pytest.mark.parametrize(
    "how", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 1.5, "top_k": 12}]
)
def test_frequencies_follow_the_distribution(stories_base, how, draw):
    """Chi-square of 6000 draws of one token, over outcomes expected at least five times."""
    n = 6000 if draw is ref.draw else 1000  # the fake server is slow
    prompt = ref.text(stories_base, np.random.default_rng(3), 30)
    logits = stories_base.head.logits(stories_base.hidden(torch.from_numpy(prompt)[None])[0], None)
    least_sure = int(logits.softmax(-1).max(-1).values.argmin())
    prompt, logits = prompt[: least_sure + 1], logits[: least_sure + 1]
    p = (logits[-1].double() / how.get("temperature", 1.0)).softmax(-1).numpy()
    order = np.argsort(-p)
    keep = np.ones(len(p), bool)
    if "top_k" in how:
        keep[order[how["top_k"] :]] = False
    if "top_p" in how:
        before = np.cumsum(p[order]) - p[order]
        keep[order[before >= how["top_p"]]] = False
    p = np.where(keep, p, 0) / p[keep].sum()
    draws = draw(Sampler(stories_base, None), prompt.tolist(), n, settings(max_tokens=1, **how))
    counts = np.bincount([s.tokens[0] for s in draws], minlength=len(p))
    assert counts[~keep].sum() == 0
    common = p * n >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(p[common], p[~common].sum()) * n
    used = expected > 0
    chi = ((observed - expected)[used] ** 2 / expected[used]).sum()
    freedom = used.sum() - 1
    assert freedom >= 2
    assert chi < freedom + 4.5 * np.sqrt(2 * freedom)  # beyond it: about 1 in 10,000


def test_seeds_repeat_and_do_not_depend_on_the_number_of_samples(stories_base, draw):
    sampler = Sampler(stories_base, None)
    many = [s.tokens for s in draw(sampler, [1], 8, settings(seed=7))]
    again = [s.tokens for s in draw(sampler, [1], 8, settings(seed=7))]
    few = [s.tokens for s in draw(sampler, [1], 3, settings(seed=7))]
    assert many == again
    assert many[:3] == few
    assert len({tuple(t) for t in many}) > 4
    assert [s.tokens for s in draw(sampler, [1], 8, settings(seed=8))] != many
    free = settings(seed=None)
    assert [s.tokens for s in draw(sampler, [1], 4, free)] != [
        s.tokens for s in draw(sampler, [1], 4, free)
    ]


def test_released_terms_are_computed_again(stories_base):
    sampler = Sampler(stories_base, ref.random_adapter(stories_base))
    before = ref.draw(sampler, [1], 2, settings())
    terms = weakref.ref(next(iter(sampler.terms().values())))
    sampler.release_terms()
    assert terms() is None
    assert ref.draw(sampler, [1], 2, settings()) == before


def test_stop_tokens_end_a_sample_and_stay_in_it(stories_base, draw):
    sampler = Sampler(stories_base, None)
    (free,) = draw(sampler, [1], 1, settings())
    assert free.stop_reason == "length"
    assert len(free.tokens) == len(free.logprobs) == 20
    stop = free.tokens[6]
    (stopped,) = draw(sampler, [1], 1, settings(stop_tokens=frozenset([stop])))
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert stopped.stop_reason == "stop"


def test_stop_strings_may_span_tokens(stories_base, stories_model, draw):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(stories_model)
    sampler = Sampler(stories_base, None)
    (free,) = draw(sampler, [1], 1, settings(max_tokens=60))
    text = tokenizer.decode(free.tokens)
    across = text[len(text) // 2 - 6 : len(text) // 2 + 6]
    assert len(tokenizer.encode(across, add_special_tokens=False)) > 3
    (sample,) = draw(
        sampler,
        [1],
        1,
        settings(max_tokens=60, stop_strings=(across, "absent")),
        decode=tokenizer.decode,
    )
    assert sample.stop_reason == "stop"
    decoded = tokenizer.decode(sample.tokens)
    assert across in decoded
    assert across not in tokenizer.decode(sample.tokens[:-1])
    assert free.tokens[: len(sample.tokens)] == sample.tokens


def test_long_stop_string_of_many_byte_tokens(stories_base, draw):
    """A token may decode to less than a character, so that a tail of the ids is not enough."""
    sampler = Sampler(stories_base, None)
    (free,) = draw(sampler, [1], 1, settings(max_tokens=60))

    def decode(ids: list[int]) -> str:
        return "x" * (len(ids) // 4)  # four tokens a character

    stopping = settings(max_tokens=60, stop_strings=("x" * 12,))
    (sample,) = draw(sampler, [1], 1, stopping, decode=decode)
    assert len(sample.tokens) == 48
    assert sample.tokens == free.tokens[:48]


def test_the_context_limits_a_sample(stories_base, tiny_base, draw):
    base = tiny_base("llama")
    prompt = list(range(3, 123))
    (sample,) = draw(Sampler(base, None), prompt, 1, settings(max_tokens=None))
    assert len(sample.tokens) == 8
    assert sample.stop_reason == "length"
    with pytest.raises(DataValidationError, match="128 tokens leave no room"):
        draw(Sampler(base, None), [5] * 128, 1, settings())


def test_topk_of_samples(stories_base, draw):
    (sample,) = draw(Sampler(stories_base, None), [1], 1, settings(temperature=0.0), topk_sample=4)
    assert len(sample.topk) == 20
    for token, lp, (ids, values) in zip(sample.tokens, sample.logprobs, sample.topk, strict=True):
        assert ids[0] == token
        assert values[0] == pytest.approx(lp)
        assert (np.diff(values) <= 0).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 0), ("temperature", -0.1), ("temperature", float("nan")), ("top_k", 0),
     ("top_k", -2), ("top_p", 0.0), ("top_p", 1.1)],
)  # fmt: skip
def test_invalid_settings_are_refused(field, value):
    with pytest.raises(ConfigurationError, match=f"^{field}: got {value}, expected"):
        SamplingSettings(**{field: value})


def test_invalid_prompts_are_refused(stories_base, draw):
    sampler = Sampler(stories_base, None)
    for prompt, message in (
        ([], "prompt: got no token"),
        ([1, 512], r"token id 512, expected 0 to 511"),
        ([-1], "token id -1"),
        ([1] * 600, "600 tokens, but the model's context is 512"),
    ):
        with pytest.raises(DataValidationError, match=message):
            draw(sampler, prompt, 1, settings())
    for last_n in (0, 3):
        with pytest.raises(ConfigurationError, match=f"last_n: got {last_n}, expected 1 to 2"):
            score_request(sampler, [1, 2, 3], logprobs=True, last_n=last_n)
    with pytest.raises(ConfigurationError, match="decode"):
        draw(sampler, [1], 1, settings(stop_strings=("a",)))
    with pytest.raises(ConfigurationError, match="num_samples: got 0"):
        draw(sampler, [1], 0, settings())
    with pytest.raises(DataValidationError, match=r"target_prompt_logprobs.*expected"):
        score_request(sampler, [1, 2, 3], targets=np.zeros((3, 1), dtype=np.int64))
    with pytest.raises(DataValidationError, match="token id 512"):
        score_request(sampler, [1, 2, 3], targets=np.full((2, 1), 512))
