"""Bias, penalties, minimum length and masks, against transformers' logits processors."""

from __future__ import annotations

import engine_reference as ref
import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tinker_cookbook.engine.sampling.adjust_logits import (
    LogitAdjuster,
    adjusted_logits,
)
from tinker_cookbook.engine.sampling.options import LogitOptions
from tinker_cookbook.engine.sampling.requests import SamplingSettings, sample_request
from tinker_cookbook.engine.sampling.sample_tokens import (
    BatchSamplingParams,
    sample_tokens,
)
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.sampling.scheduler import Scheduler
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError

V = 1000


class Allow:
    """A mask of the tokens that ``rule(tokens so far)`` gives; None raises."""

    def __init__(self, rule, vocab_size=V):
        self.rule, self.vocab_size = rule, vocab_size

    def start(self):
        return AllowState(self)


class AllowState:
    finished = False

    def __init__(self, mask):
        self.mask, self.tokens = mask, []

    def allowed(self):
        bits = np.zeros(self.mask.vocab_size, dtype=np.uint8)
        bits[list(self.mask.rule(self.tokens))] = 1
        return np.packbits(bits, bitorder="little")

    def add(self, token):
        self.tokens.append(token)


def adjuster(prompt, sampled, stop=(2,), **options):
    one = LogitAdjuster(LogitOptions(**options), stop, np.array(prompt, dtype=np.int64))
    for token in sampled:
        one.add(token)
    return one


def tokens_of(rng, count):
    return [int(token) for token in rng.integers(0, 60, count)]


def test_penalties_and_bias_equal_other_implementations():
    """Repetition and bias against transformers; presence and frequency by their definition."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(scale=3, size=(5, V)).astype(np.float32))
    prompts = [tokens_of(rng, n) for n in (3, 50, 7, 0, 200)]
    samples = [tokens_of(rng, n) for n in (100, 0, 20, 300, 1)]
    options = [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8, "presence_penalty": 0.5},
        {"frequency_penalty": 0.7, "presence_penalty": -0.4},
        {"frequency_penalty": -0.1, "repetition_penalty": 1.1, "logit_bias": {5: 3.0, 9: -2.5}},
        {"logit_bias": {0: -100.0, 999: 7.5}},
    ]
    changed = logits.clone()
    given = list(zip(prompts, samples, options, strict=True))
    assert not adjusted_logits(changed, [adjuster(p, s, **o) for p, s, o in given])
    for row, (prompt, sampled, option) in enumerate(given):
        expected = logits[row : row + 1].clone()
        ids = torch.tensor([prompt + sampled], dtype=torch.int64)
        if bias := option.get("logit_bias"):
            pairs = {(token,): value for token, value in bias.items()}
            expected = SequenceBiasLogitsProcessor(pairs)(ids, expected)
        if (penalty := option.get("repetition_penalty")) and ids.numel():
            expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, expected)
        for token in set(sampled):
            expected[0, token] -= option.get("frequency_penalty", 0) * sampled.count(token)
            expected[0, token] -= option.get("presence_penalty", 0)
        torch.testing.assert_close(changed[row], expected[0], rtol=1e-6, atol=1e-5)


def test_filters_leave_the_tokens_that_transformers_leaves():
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(scale=2, size=(1, V)).astype(np.float32))
    cases = [(0.1, 1.0, -1, 1.0), (0.05, 0.7, 20, 1.0), (0.02, 1.5, -1, 0.8), (1.0, 1.0, -1, 1.0)]
    for min_p, temperature, top_k, top_p in cases:
        warpers = LogitsProcessorList(
            [TemperatureLogitsWarper(temperature), MinPLogitsWarper(min_p)]
        )
        if top_k > 0:
            warpers.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            warpers.append(TopPLogitsWarper(top_p))
        left = torch.isfinite(warpers(torch.zeros(1, 0, dtype=torch.int64), logits.clone()))
        # Uniform numbers at the middle of each kept token's probability find exactly these.
        uniform = (np.arange(20_000) + 0.5) / 20_000
        many = [np.full(len(uniform), value) for value in (temperature, top_k, top_p, 0.0, min_p)]
        params = BatchSamplingParams(many[0], many[1], many[2], uniform, many[4])
        found = sample_tokens(logits.expand(len(uniform), V).contiguous(), params)
        assert set(found.tolist()) <= set(left[0].nonzero()[:, 0].tolist())
        probabilities = (logits / temperature).masked_fill(~left, -torch.inf).softmax(-1)[0]
        shares = torch.bincount(found, minlength=V) / len(uniform)
        assert (shares - probabilities).abs().max() < 1.1e-4


def test_masks_of_any_width_and_errors_of_one_row():
    logits = torch.zeros(4, 100)

    def broken(tokens):
        raise ValueError("no such state")

    masks = [
        Allow(lambda t: {3, 99}, 100),
        None,
        Allow(broken, 100),
        Allow(lambda t: {5, 170}, 171),
    ]
    adjusters = [adjuster([1], [], token_mask=m) for m in masks]
    errors = adjusted_logits(logits, adjusters)
    kept = [torch.isfinite(row).nonzero()[:, 0].tolist() for row in logits]
    assert kept == [[3, 99], list(range(100)), list(range(100)), [5]]
    assert list(errors) == [2]
    assert isinstance(errors[2], ValueError)


def draw(sampler, count=1, prompt=(1, 5, 9), **kwargs):
    settings = SamplingSettings(**{"max_tokens": 12, "seed": 7, **kwargs})
    return ref.draw(sampler, list(prompt), count, settings)


def test_rows_without_options_keep_their_bits_and_logprobs_are_the_models(stories_base):
    sampler = Sampler(stories_base, None)
    vocabulary = stories_base.vocab_size
    alone = draw(sampler, 3)
    masked = SamplingSettings(
        max_tokens=12, seed=7, token_mask=Allow(lambda t: {20, 21}, vocabulary)
    )
    others = [
        (masked, 2),
        (SamplingSettings(max_tokens=12, seed=1, repetition_penalty=1.5, top_p=0.9), 1),
        (SamplingSettings(max_tokens=12, seed=7), 3),
        (SamplingSettings(max_tokens=12, seed=1, logit_bias={44: 100}, temperature=0), 1),
    ]
    requests = [sample_request(sampler, [1, 5, 9], count, one) for one, count in others]
    ref.run_batch(stories_base, requests)
    results = [request.future.result(timeout=0) for request in requests]
    for mine, theirs in zip(alone, results[2], strict=True):
        assert (mine.tokens, mine.logprobs) == (theirs.tokens, theirs.logprobs)
    assert set(results[0][0].tokens) == {20, 21}
    assert results[3][0].tokens == [44] * 12
    # The log-probabilities that scoring gives for the same tokens: no mask, temperature 1.
    for samples in results:
        tokens = samples[0].tokens
        scores = ref.score(sampler, [1, 5, 9, *tokens], logprobs=True).logprobs
        np.testing.assert_allclose(samples[0].logprobs, scores[-len(tokens) :], atol=2e-5)


def test_options_are_those_of_a_sequence_alone(stories_base):
    """n > 1 with state for each sample: sample i is the same with any number of others."""
    sampler = Sampler(stories_base, None)
    mask = Allow(lambda tokens: {30 + len(tokens), 40 + len(tokens)}, stories_base.vocab_size)
    for option in ({"token_mask": mask}, {"frequency_penalty": 2.0}, {"min_p": 0.2}):
        three, one = draw(sampler, 3, **option), draw(sampler, 1, **option)
        assert three[0].tokens == one[0].tokens
        assert three[0].tokens != three[1].tokens
    steps = draw(sampler, 3, token_mask=mask)
    assert all(t in (30 + i, 40 + i) for s in steps for i, t in enumerate(s.tokens))


def test_minimum_length_holds_for_stop_tokens_and_strings(stories_base):
    sampler = Sampler(stories_base, None)
    ends = frozenset(range(0, stories_base.vocab_size, 2))
    short = draw(sampler, 4, stop_tokens=ends)
    assert min(len(one.tokens) for one in short) < 5
    long = draw(sampler, 4, stop_tokens=ends, min_tokens=5)
    for one in long:
        assert not ends & set(one.tokens[:5])
        assert len(one.tokens) >= 6
    decode = lambda tokens: "".join("ab"[token % 2] for token in tokens)  # noqa: E731
    settings = SamplingSettings(max_tokens=12, seed=7, stop_strings=("a",), min_tokens=4)
    for one in ref.draw(sampler, [1], 4, settings, decode=decode):
        assert len(one.tokens) >= 5 or one.stop_reason == "length"
        assert decode(one.tokens[4:]).find("a") in (-1, len(one.tokens) - 5)


def test_a_mask_that_allows_nothing_fails_its_request_alone(stories_base):
    sampler, size = Sampler(stories_base, None), stories_base.vocab_size

    def request(rule=None):
        mask = None if rule is None else Allow(rule, size)
        settings = SamplingSettings(max_tokens=8, seed=7, token_mask=mask)
        return sample_request(sampler, [1, 5, 9], 2, settings)

    def breaks(tokens):
        return {50} if len(tokens) < 3 else 1 / 0

    nothing, broken, good = request(lambda t: {7} if len(t) < 2 else {}), request(breaks), request()
    ref.run_batch(stories_base, [nothing, broken, good])
    with pytest.raises(ConfigurationError, match="no token is allowed after 2 sampled"):
        nothing.future.result(timeout=0)
    with pytest.raises(ZeroDivisionError):
        broken.future.result(timeout=0)
    assert [len(one.tokens) for one in good.future.result(timeout=0)] == [8, 8]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_p", 1.5),
        ("presence_penalty", float("inf")),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0),
        ("logit_bias", {5: 101}),
        ("min_tokens", -1),
        ("min_tokens", 50),
    ],
)
def test_invalid_settings_are_refused(name, value):
    with pytest.raises(ConfigurationError, match=f"^{name}: got"):
        SamplingSettings(**{name: value, "max_tokens": 20})


def test_a_bias_of_a_token_outside_the_vocabulary_is_refused(stories_base):
    with pytest.raises(DataValidationError, match="logit_bias"):
        draw(Sampler(stories_base, None), logit_bias={10_000: 1})


@pytest.mark.slow
def test_preempted_sequence_keeps_its_state(stories_base):
    sampler, size = Sampler(stories_base, None), stories_base.vocab_size
    odd = Allow(lambda tokens: range(30 + len(tokens) % 2, 400, 2), size)
    options = [{"token_mask": odd}, {"frequency_penalty": 1.0}, {"min_tokens": 100}]

    def requests():
        for number, option in enumerate(options):
            settings = SamplingSettings(max_tokens=150, seed=number, **option)
            yield sample_request(sampler, [1, 5, 9], 2, settings)

    alone = list(requests())
    for request in alone:
        ref.run_batch(stories_base, [request])
    shapes = stories_base.kv_shapes
    scheduler = Scheduler(stories_base, shapes)
    together = list(requests())
    for request in together:
        scheduler.add(request)
    scheduler._budget = 700
    sent_back, preempt = [], scheduler._preempt
    scheduler._preempt = lambda table, keep: (sent_back.append(table), preempt(table, keep=keep))
    ref.finish(scheduler)
    assert sent_back
    for first, second in zip(alone, together, strict=True):
        pairs = zip(first.future.result(0), second.future.result(0), strict=True)
        assert all(a.tokens == b.tokens for a, b in pairs)
