"""Many requests in one batch: right, repeatable, and cheap where they have something in common."""

from __future__ import annotations

import gc
import weakref

import engine_reference as ref
import numpy as np
import pytest
import torch

from tinker_cookbook.engine.kernels.cpu import linear
from tinker_cookbook.engine.kernels.cpu.build import library
from tinker_cookbook.engine.model.lora import AdapterSpec
from tinker_cookbook.engine.sampling import sample_tokens as sampling_module
from tinker_cookbook.engine.sampling.requests import SamplingSettings, sample_request
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.sampling.scheduler import Scheduler
from tinker_cookbook.engine.training.optimizer import AdamSettings
from tinker_cookbook.exceptions import OutOfMemoryError

BASES = ("stories", *ref.ARCHITECTURES, "stories without native", "gemma3 without native")


@pytest.fixture
def base(request, tiny_base, stories_base, monkeypatch):
    name, _, without = request.param.partition(" ")
    base = stories_base if name == "stories" else tiny_base(name)
    if without:
        ref.without_compiler(monkeypatch, base)
    return base


def settings(**kwargs) -> SamplingSettings:
    return SamplingSettings(**{"max_tokens": 20, "seed": 1, **kwargs})


def tokens_of(request) -> list[list[int]]:
    return [sample.tokens for sample in request.future.result(timeout=0)]


def assert_as_alone(requests) -> None:
    for request in requests:
        alone = ref.draw(request.sampler, request.prompt, request.num_samples, request.settings)
        assert tokens_of(request) == [sample.tokens for sample in alone]


def prompts(base, count: int, longest: int = 34, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, base.vocab_size, rng.integers(1, longest)) for _ in range(count)]


@pytest.mark.parametrize("base", BASES, indirect=True)
def test_greedy_of_32_mixed_prompts_equals_generate(base, tmp_path):
    """In one batch, some prompts and answers longer than the sliding windows."""
    adapter = ref.random_adapter(base)
    model = ref.peft_model(base, adapter, tmp_path)
    sampler = Sampler(base, adapter)
    requests = []
    for i, prompt in enumerate(prompts(base, 32)):
        greedy = settings(temperature=0.0, max_tokens=5 + i, stop_tokens=frozenset(base.eos_ids))
        requests.append(sample_request(sampler, prompt, 1 + i % 2, greedy))
    ref.run_batch(base, requests)
    for number, request in enumerate(requests):
        limit, answer = request.settings.max_tokens, tokens_of(request)[0]
        assert tokens_of(request) == [answer] * request.num_samples
        assert len(answer) == limit or answer[-1] in base.eos_ids
        assert not {*base.eos_ids} & {*answer[:-1]}
        # One pass over prompt and answer: each token is the most probable after those before it.
        prompt = torch.from_numpy(request.prompt)[None]
        with torch.no_grad():
            logits = model(input_ids=torch.cat([prompt, torch.tensor([answer])], 1)).logits[0]
        assert logits[prompt.shape[1] - 1 : -1].argmax(-1).tolist() == answer
        if number % 8 == 7:  # token by token for these alone, which takes 20 times as long
            with torch.no_grad():
                expected = model.generate(
                    input_ids=prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=limit,
                    do_sample=False,
                )[0, prompt.shape[1] :].tolist()
            assert answer == expected


@pytest.mark.parametrize("base", BASES, indirect=True)
def test_batch_invariance(base):
    """Whatever else is in the batch, whenever it came, and whatever was known of the prompt."""
    sampler = Sampler(base, ref.random_adapter(base))
    other = Sampler(base, ref.random_adapter(base, seed=5))
    stem = np.arange(3, 40)
    mine = [np.concatenate([stem[: 20 + 4 * i], [50 + i, 60]]) for i in range(4)]
    alone = [ref.draw(sampler, prompt, 3, settings(seed=9)) for prompt in mine]
    scheduler = Scheduler(base, base.kv_shapes)
    requests = []
    for i, prompt in enumerate(mine):  # they come one by one, each with company
        scheduler.add(sample_request(other, prompts(base, 1, seed=i)[0], 2, settings(seed=i)))
        requests.append(sample_request(sampler, prompt, 3, settings(seed=9)))
        scheduler.add(requests[-1])
        scheduler.add(
            sample_request(sampler, stem[: 20 + i], 1 + i, settings(seed=i, max_tokens=9))
        )
        for _ in range(3):
            scheduler.step()
    ref.finish(scheduler)
    for request, expected in zip(requests, alone, strict=True):
        ref.assert_same_samples(request.future.result(timeout=0), expected)
    assert any(r.future.result()[0].cached_prompt_tokens for r in requests)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", ["llama", "qwen2_bias", "qwen3", "gemma3", "gemma2", "granite", "qwen3_vl"]
)
def test_one_call_for_a_step_gives_the_bits_of_the_modules(kind, dtype, tiny_base, monkeypatch):
    """Of prompts, forks and decode steps, with tokens of several samplers in any order."""
    base = tiny_base(kind, dtype)
    assert base.kv_shapes is not None
    known = kind not in ("granite", "qwen3_vl") and library() is not None
    if dtype == torch.float32 or linear._has_pairs():
        assert (base._steps is not None) is known
    samplers = [Sampler(base, None), Sampler(base, ref.random_adapter(base, seed=1))]
    samplers += [Sampler(base, ref.random_adapter(base, AdapterSpec(3, train_mlp=False), seed=2))]

    def sampled() -> list[list[float]]:
        scheduler, found = Scheduler(base, base.kv_shapes), []
        for i, prompt in enumerate(prompts(base, 9, longest=90)):
            found.append(sample_request(samplers[i % 3], prompt, 1 + i % 2, settings(seed=i)))
            scheduler.add(found[-1])
            scheduler.step()
        ref.finish(scheduler)
        return [one.logprobs for r in found for one in r.future.result(timeout=0)]

    once = sampled()
    monkeypatch.setattr(base, "_steps", None)
    assert sampled() == once


def test_group_prefills_its_prompt_once(stories_base, monkeypatch):
    computed = ref.count_computed(stories_base, monkeypatch)
    prompt = ref.text(stories_base, np.random.default_rng(2), 100)
    del computed[:]
    sampler = Sampler(stories_base, None)
    same = [
        sample_request(sampler, prompt, 8, settings()),
        sample_request(sampler, prompt, 1, settings(seed=2)),
    ]
    ref.run_batch(stories_base, same)
    assert computed[0] == 100
    assert sum(computed) == 100 + 9 * 19  # the last token drawn is not computed
    cached = [s.cached_prompt_tokens for r in same for s in r.future.result()]
    assert cached == [0] + [100] * 8


def test_next_turn_hits_the_prefix_cache(stories_base, monkeypatch):
    sampler = Sampler(stories_base, None)
    scheduler = Scheduler(stories_base, stories_base.kv_shapes)
    prompt = ref.text(stories_base, np.random.default_rng(2), 60)
    computed = ref.count_computed(stories_base, monkeypatch)

    def play(tokens):
        request = sample_request(sampler, tokens, 1, settings())
        ref.finish(scheduler, request)
        return request.future.result(timeout=0)[0]

    first = play(prompt)
    longer = np.concatenate([prompt, first.tokens, [9, 8, 7]])
    del computed[:]
    second = play(longer)
    assert computed[0] == 4  # the last token drawn, whose keys were not needed, and three new ones
    assert second.cached_prompt_tokens == len(longer) - 4
    fresh = ref.draw(sampler, longer, 1, settings())[0]
    assert second.tokens == fresh.tokens
    np.testing.assert_allclose(second.logprobs, fresh.logprobs, atol=1e-5)
    elsewhere = play(np.concatenate([longer[:30], [3, 3, 3]]))  # leaves the known path half way
    assert elsewhere.cached_prompt_tokens == 30


def test_prefix_cache_is_per_snapshot(stories_base):
    """With the prefix cache on, and old and new in one batch."""
    run = ref.make_run(stories_base)
    prompt = ref.text(stories_base, np.random.default_rng(2), 80)
    old = Sampler(stories_base, run.snapshot())
    before = ref.draw(old, prompt, 4, settings())
    scheduler = ref.run_batch(stories_base, [sample_request(old, prompt, 1, settings())])
    run.forward_backward(
        ref.supervised(np.random.default_rng(1), stories_base, (30,)), "cross_entropy"
    )
    run.optim_step(AdamSettings(1e-2))
    new = Sampler(stories_base, run.snapshot())
    requests = [sample_request(sampler, prompt, 4, settings()) for sampler in (old, new)]
    ref.finish(scheduler, *requests)
    assert requests[0].future.result()[0].cached_prompt_tokens == len(prompt) - 1
    assert requests[1].future.result()[0].cached_prompt_tokens == 0
    assert tokens_of(requests[0]) == [sample.tokens for sample in before]
    fresh = ref.draw(Sampler(stories_base, run.snapshot()), prompt, 4, settings())
    assert tokens_of(requests[1]) == [sample.tokens for sample in fresh]
    lps = [np.array(request.future.result()[0].logprobs[0]) for request in requests]
    assert lps[0] != lps[1]


def test_finished_request_frees_memory_without_gc(stories_base):
    """Else all that was kept for old snapshots of a run would pile up between collections."""
    sampler = Sampler(stories_base, ref.random_adapter(stories_base))
    gone = weakref.ref(sampler)
    gc.collect()
    gc.disable()
    try:
        request = sample_request(sampler, np.arange(3, 30), 3, settings())
        scheduler = ref.run_batch(stories_base, [request])
        failed = sample_request(sampler, [5], 1, settings())
        failed.fail(OutOfMemoryError("full"))
        future = request.future
        del sampler, request, failed
        assert gone() is None
        assert len(future.result(timeout=0)) == 3
        assert scheduler._cache.kept_tokens > 0
        with torch.inference_mode():
            scheduler._prefixes.purge()
        assert scheduler._cache.kept_tokens == 0
    finally:
        gc.enable()


def test_cancellation_frees_rows(stories_base):
    sampler = Sampler(stories_base, None)
    scheduler = Scheduler(stories_base, stories_base.kv_shapes)
    kept = sample_request(sampler, [1], 2, settings(max_tokens=30))
    cancelled = [
        sample_request(
            sampler, [1, 2, 3], 300, settings(max_tokens=400)
        ),  # running, and some waiting
        sample_request(sampler, [4], 1, settings()),
    ]
    before = stories_base.sampled_tokens
    for request in (kept, *cancelled):
        scheduler.add(request)
    for _ in range(3):
        scheduler.step()
    for request in cancelled:
        assert request.future.cancel()
    drawn = sum(len(row.sample.tokens) for r in (kept, *cancelled) for row in r.rows)
    assert stories_base.sampled_tokens - before == drawn > 0  # those of the cancelled ones, too
    scheduler.step()
    assert len(scheduler._rows) == 2
    assert not scheduler._waiting
    ref.finish(scheduler)
    alone = ref.draw(sampler, [1], 2, settings(max_tokens=30))
    assert tokens_of(kept) == [sample.tokens for sample in alone]


def test_more_samples_than_rows(stories_base, monkeypatch):
    sampler = Sampler(stories_base, None)
    scheduler = Scheduler(stories_base, stories_base.kv_shapes)
    scheduler._usual_rows = 5
    requests = [
        sample_request(sampler, p, 7, settings(seed=i))
        for i, p in enumerate(prompts(stories_base, 4))
    ]
    for request in requests:
        scheduler.add(request)
    while scheduler.busy:
        scheduler.step()
        assert len(scheduler._rows) <= 5
    assert_as_alone(requests)


def test_preemption_changes_no_sample(stories_base):
    """Rows that outgrow the memory begin again later, after what they have drawn so far."""
    sampler = Sampler(stories_base, None)
    scheduler = Scheduler(stories_base, stories_base.kv_shapes)
    requests = [
        sample_request(sampler, p, 2, settings(seed=i, max_tokens=150))
        for i, p in enumerate(prompts(stories_base, 4))
    ]
    for request in requests:
        scheduler.add(request)
    scheduler._budget = 700
    sent_back, preempt = [], scheduler._preempt
    scheduler._preempt = lambda table, keep: (sent_back.append(table), preempt(table, keep=keep))
    ref.finish(scheduler)
    assert sent_back
    assert_as_alone(requests)


def test_out_of_memory_halves_the_batch(stories_base, monkeypatch, caplog):
    sampler = Sampler(stories_base, None)
    requests = [
        sample_request(sampler, p, 4, settings(seed=i))
        for i, p in enumerate(prompts(stories_base, 6))
    ]
    forward = stories_base.hidden_of_batch

    def scarce(tokens, positions, layout, segments):
        if sum(run.count for run in layout.runs if run.count == 1) > 7:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return forward(tokens, positions, layout, segments)

    monkeypatch.setattr(stories_base, "hidden_of_batch", scarce)
    ref.run_batch(stories_base, requests)
    monkeypatch.undo()
    assert "continuing with half of them" in caplog.text
    assert_as_alone(requests)


def test_sequence_larger_than_memory_is_refused(stories_base, monkeypatch):
    def never(*args):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(stories_base, "hidden_of_batch", never)
    request = sample_request(Sampler(stories_base, None), [1, 2, 3], 2, settings())
    ref.run_batch(stories_base, [request])
    with pytest.raises(OutOfMemoryError, match=r"3 tokens does not fit .* set max_tokens lower"):
        request.future.result(timeout=0)


def test_out_of_memory_while_sampling_changes_no_sample(stories_base, monkeypatch):
    """Each token is decided by the number that decides it alone, however often it is tried."""
    sampler = Sampler(stories_base, None)
    requests = [sample_request(sampler, [5, 6, i], 2, settings(seed=i)) for i in range(8, 11)]
    tried, draw = [], sampling_module.sample_tokens

    def scarce(*args):
        tried.append(args)
        if len(tried) in (3, 7):
            raise MemoryError
        return draw(*args)

    monkeypatch.setattr(sampling_module, "sample_tokens", scarce)
    scheduler = Scheduler(stories_base, stories_base.kv_shapes)
    ref.finish(scheduler, *requests)
    monkeypatch.undo()
    assert scheduler._most_rows < scheduler._usual_rows
    assert_as_alone(requests)
    scheduler.add(sample_request(sampler, [5], 1, settings()))
    assert scheduler._most_rows == scheduler._usual_rows  # what others asked for then is gone


def test_error_fails_only_its_requests(stories_base, monkeypatch):
    sampler = Sampler(stories_base, None)

    def broken(ids: list[int]) -> str:
        raise ValueError("this tokenizer is broken")

    bad = sample_request(sampler, [1], 2, settings(stop_strings=("x",)), decode=broken)
    scheduler = ref.run_batch(stories_base, [bad])
    with pytest.raises(ValueError, match="this tokenizer is broken"):
        bad.future.result(timeout=0)
    good = sample_request(sampler, [1], 1, settings())
    ref.finish(scheduler, good)
    assert len(tokens_of(good)[0]) == 20


@pytest.mark.parametrize("base", BASES, indirect=True)
def test_logprobs_in_a_mixed_batch_equal_the_trainers(base):
    run = ref.make_run(base)
    sampler = Sampler(base, run.snapshot())
    requests = [
        sample_request(sampler, p, 2, settings(seed=i, temperature=0.8, max_tokens=6 + i))
        for i, p in enumerate(prompts(base, 10))
    ]
    ref.run_batch(base, requests)
    worst = 0.0
    for request in requests:
        for sample in request.future.result():
            tokens = np.concatenate([request.prompt, sample.tokens])
            item = ref.example(tokens, weights=np.zeros(len(tokens) - 1))
            trained = run.forward_backward([item], "cross_entropy", backward=False).logprobs[0]
            found = np.array(sample.logprobs)
            worst = max(worst, np.abs(trained[len(request.prompt) - 1 :] - found).max())
    assert worst <= 1e-4
