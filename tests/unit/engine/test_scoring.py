"""Scores of many prompts at once: those of each alone, to the bit, and of a plain forward."""

from __future__ import annotations

from concurrent.futures import CancelledError

import engine_reference as ref
import numpy as np
import pytest
import torch

from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.sampling import prefill_scoring as prefix_reader
from tinker_cookbook.engine.sampling import scoring
from tinker_cookbook.engine.sampling.requests import SamplingSettings, sample_request, score_request
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.sampling.scoring import Scorer
from tinker_cookbook.exceptions import OutOfMemoryError, TrainingError

SECONDS = 60
FLOATS = (torch.float64, torch.float32)


def prompts(base, rng) -> list[np.ndarray]:
    """Two families of common beginnings, of which some end in others, and some by themselves."""
    first, second = ref.text(base, rng, 70), ref.text(base, rng, 40)
    ends = [rng.integers(3, base.vocab_size, n) for n in (9, 30, 1, 18)]
    out = [np.concatenate([first, end]) for end in ends]
    out += [np.concatenate([second, end]) for end in ends[:2]]
    out += [first[:50], out[1].copy(), np.array([5]), np.array([7, 9]), ref.text(base, rng, 33)]
    return out


def serve(sampler, asked, budget=10_000) -> list:
    """All at once, as if they had waited for the worker."""
    scorer = Scorer(lambda _: budget)
    requests = [score_request(sampler, prompt, **what) for prompt, what in asked]
    for request in requests:
        scorer.add(request)
    for request in requests:
        scorer.serve(request)
    return [request.future.result(0) for request in requests]


def arrays(scores) -> list[np.ndarray]:
    return [value for value in vars(scores).values() if value is not None]


def wishes(base, rng, texts) -> list[dict]:
    """Of each kind some, in turn."""
    kinds = [
        lambda n: {"logprobs": True},
        lambda n: {"logprobs": True, "topk": 3},
        lambda n: {"targets": rng.integers(0, base.vocab_size, (n - 1, 2))},
        lambda n: {"logprobs": True, "topk": 2, "last_n": n - 1} if n > 1 else {"topk": 2},
        lambda n: {"logprobs": True, "last_n": max(1, n // 2)} if n > 2 else {"logprobs": True},
    ]
    return [kinds[i % len(kinds)](len(tokens)) for i, tokens in enumerate(texts)]


@pytest.mark.parametrize("kind", ["stories", "gemma2", "gemma3", "qwen2_bias", "torch"])
def test_batch_invariance(tiny_base, stories_base, kind, monkeypatch):
    """Else what a run computes would depend on which requests happened to meet. torch's operators
    round differently."""
    base = stories_base if kind in ("stories", "torch") else tiny_base(kind)
    if kind == "torch":
        ref.without_compiler(monkeypatch, base)
    bound = 1e-4 if kind == "torch" else 0
    rng = np.random.default_rng(0)
    sampler = Sampler(base, ref.random_adapter(base))
    texts = prompts(base, rng)
    asked = list(zip(texts, wishes(base, rng, texts), strict=True))
    alone = [serve(sampler, [one])[0] for one in asked]
    for budget, step in ((10_000, 512), (60, 512), (10_000, 37)):
        monkeypatch.setattr(prefix_reader, "STEP_TOKENS", step)
        monkeypatch.setattr(scoring, "STEP_TOKENS", min(step, budget) // 2)
        for found, expected in zip(serve(sampler, asked, budget), alone, strict=True):
            for one, other in zip(arrays(found), arrays(expected), strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=bound)


@pytest.mark.parametrize("way", ["reader", "planner"])
def test_scores_equal_transformers(stories_base, way, tmp_path, monkeypatch):
    """In float64; ``planner`` is the way of devices other than a CPU."""
    adapter = ref.random_adapter(stories_base)
    sampler = Sampler(stories_base, adapter)
    models = [ref.peft_model(stories_base, adapter, tmp_path).to(t) for t in FLOATS]
    # Drawn from the model: of ids at random it is so sure that fp32 itself rounds at the bound.
    stem = ref.draw(sampler, [1], 1, SamplingSettings(max_tokens=40, seed=1))[0].tokens
    ends = ref.draw(sampler, [1, *stem], 4, SamplingSettings(max_tokens=25, seed=2))
    texts = [np.array([1, *stem, *end.tokens[: 25 - i]]) for i, end in enumerate(ends)]
    texts += [np.array([1, *stem])[:20], np.array([1, *ends[0].tokens])]
    if way == "planner":
        monkeypatch.setitem(stories_base.__dict__, "kv_shapes", None)
        monkeypatch.setattr(Scorer, "_groups", lambda self, base, asked: [range(len(asked))])
    asked = [(t, {"logprobs": True, "topk": 2, "targets": t[:-1, None]}) for t in texts]
    for tokens, found in zip(texts, serve(sampler, asked, 64), strict=True):
        exact, rounded = (plain_logprobs(model, tokens) for model in models)
        # fp32 alone comes to 1e-5, more or less by the processor.
        bound = max(1e-5, 3 * np.abs(rounded - exact).max())
        own = np.take_along_axis(exact, tokens[1:, None], 1)[:, 0]
        np.testing.assert_allclose(found.logprobs[1:], own, atol=bound)
        np.testing.assert_allclose(found.topk_logprobs[1:], -np.sort(-exact)[:, :2], atol=bound)
        given = np.take_along_axis(exact, tokens[:-1, None], 1)
        np.testing.assert_allclose(found.target_logprobs, given, atol=bound)


def plain_logprobs(model, tokens: np.ndarray) -> np.ndarray:
    """Of the whole vocabulary at each position but the last, by transformers and peft."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(tokens)[None]).logits[0]
    return logits.log_softmax(-1)[:-1].double().numpy()


@pytest.fixture
def engine(stories_base, tmp_path):
    made = Engine("cpu", "float32")
    made._models[stories_base.folder] = stories_base
    yield made
    made.close()


def blocked(engine):
    """Keeps the worker busy until the returned event is set."""
    import threading

    go_on = threading.Event()
    engine.submit(go_on.wait, SECONDS)
    return go_on


def test_queued_scores_are_batched_and_fail_separately(engine, stories_base, monkeypatch):
    sampler, other = Sampler(stories_base, None), Sampler(stories_base, None)
    together, original = [], Scorer._answers

    def noting(self, requests):
        together.append(len(requests))
        if any(7 in request.tokens for request in requests):
            raise ValueError("broken")
        return original(self, requests)

    monkeypatch.setattr(Scorer, "_answers", noting)
    go_on = blocked(engine)
    futures = [engine.score(score_request(sampler, [1, 5, i], logprobs=True)) for i in range(8, 16)]
    elsewhere = engine.score(score_request(other, [1, 5, 9], logprobs=True))
    go_on.set()
    scores = [future.result(SECONDS).logprobs for future in futures]
    assert len({float(values[2]) for values in scores}) == 8
    assert elsewhere.result(SECONDS).logprobs[2] == scores[1][2]
    assert together == [8, 1]
    go_on = blocked(engine)
    futures = [engine.score(score_request(sampler, [1, 5, i], logprobs=True)) for i in range(5, 10)]
    go_on.set()
    with pytest.raises(ValueError, match="broken"):
        futures[2].result(SECONDS)
    assert all(f.result(SECONDS).logprobs[2] < 0 for i, f in enumerate(futures) if i != 2)


def test_fair_scheduling_of_scores(engine, stories_base, monkeypatch):
    """However many scores of however many samplers an owner has queued."""
    monkeypatch.setattr(
        Scorer, "_groups", lambda self, base, asked: [[i] for i in range(len(asked))]
    )
    samplers = [Sampler(stories_base, None, owner=name) for name in ("ann", "ann", "bob")]
    done: list[str] = []
    go_on = blocked(engine)
    for sampler, count in zip(samplers, (4, 4, 2), strict=True):
        for i in range(5, 5 + count):
            future = engine.score(score_request(sampler, [1, 5, i], logprobs=True))
            future.add_done_callback(lambda _, owner=sampler.owner: done.append(owner))
    go_on.set()
    future.result(SECONDS)
    assert done[:3] == ["ann", "bob", "ann"]


def test_out_of_memory_halves_and_then_says_so(stories_base, monkeypatch, caplog):
    sampler = Sampler(stories_base, None)
    texts = [ref.text(stories_base, np.random.default_rng(i), 20 + i) for i in range(5)]
    asked = [(tokens, {"logprobs": True}) for tokens in texts]
    expected = serve(sampler, asked)
    original = scoring.read_together

    def scarce(base, shapes, terms, sequences, pause):
        if len(sequences) > 1 or len(sequences[0]) > 22:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return original(base, shapes, terms, sequences, pause)

    monkeypatch.setattr(scoring, "read_together", scarce)
    found = serve(sampler, asked[:3])
    for one, other in zip(found, expected, strict=False):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    assert "halving" in caplog.text
    with pytest.raises(OutOfMemoryError, match="a prompt of 24 tokens does not fit"):
        serve(sampler, asked)


def test_cancel_and_close_end_all_waits(engine, stories_base):
    sampler = Sampler(stories_base, None)
    ask = lambda i: engine.score(score_request(sampler, [1, 5, i], logprobs=True))  # noqa: E731
    go_on = blocked(engine)
    futures = [ask(i) for i in range(5, 9)]
    assert futures[0].cancel()
    assert futures[2].cancel()
    go_on.set()
    assert all(futures[i].result(SECONDS).logprobs[2] < 0 for i in (1, 3))
    engine.submit(lambda: None).result(SECONDS)
    assert not engine._scorer._waiting
    go_on = blocked(engine)
    futures = [ask(i) for i in range(5, 9)]
    engine._worker.close(wait=False)
    go_on.set()
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(SECONDS)


def test_samples_are_drawn_while_prompts_are_scored(engine, stories_base, monkeypatch):
    monkeypatch.setattr(prefix_reader, "STEP_TOKENS", 64)
    sampler = Sampler(stories_base, None)
    rng = np.random.default_rng(3)
    long = [rng.integers(3, 512, 400) for _ in range(12)]
    scored = [engine.score(score_request(sampler, t, logprobs=True)) for t in long]
    drawn = engine.sample(sample_request(sampler, [1], 1, SamplingSettings(max_tokens=8, seed=0)))
    drawn.result(SECONDS)
    assert not scored[-1].done()
    assert all(future.result(SECONDS).logprobs is not None for future in scored)


def test_weights_that_give_nan_are_named(engine, stories_base):
    adapter = ref.random_adapter(stories_base)
    next(iter(adapter.tensors.values()))[1].fill_(float("nan"))
    bad, good = Sampler(stories_base, adapter, "run 7"), Sampler(stories_base, None)
    for what in ({"logprobs": True}, {"topk": 3}, {"targets": np.full((4, 2), 7)}):
        asked = [engine.score(score_request(one, [1, 5, 6, 7, 8], **what)) for one in (bad, good)]
        with pytest.raises(TrainingError, match=r"the weights of run 7 give .* NaN"):
            asked[0].result(30)
        asked[1].result(30)
