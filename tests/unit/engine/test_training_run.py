"""Failure atomicity, snapshots, activation checkpointing, memory retries."""

from __future__ import annotations

import engine_reference as ref
import numpy as np
import pytest
import torch

from tinker_cookbook.engine.memory import KnownLimits
from tinker_cookbook.engine.model.lora import AdapterSpec
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.training import run as training_run
from tinker_cookbook.engine.training.examples import Example
from tinker_cookbook.engine.training.micro_batch import MicroBatchPass
from tinker_cookbook.engine.training.optimizer import AdamSettings
from tinker_cookbook.exceptions import (
    DataValidationError,
    OutOfMemoryError,
    TrainingError,
)

STEP = AdamSettings(1e-2)


def batch(base, seed: int = 0) -> list[Example]:
    return ref.supervised(np.random.default_rng(seed), base, (30, 17, 24))


def weights(run) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in run.adapter.parameters().items()}


def same(a, b) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def break_data(data: list[Example]) -> tuple[list[Example], type[Exception]]:
    broken = ref.example(data[2].tokens, target_tokens=data[2].targets, weights=np.full(24, np.nan))
    return [data[0], data[1], broken], DataValidationError


def test_a_bf16_step_moves_every_weight_as_an_fp32_step_does(tiny_base):
    """Gradients of half precision take other paths; each must reach the element it belongs to."""
    moves, data = [], batch(tiny_base("llama"))
    for dtype in (torch.float32, torch.bfloat16):
        run = ref.make_run(tiny_base("llama", dtype))
        before = weights(run)
        run.forward_backward(data, "cross_entropy")
        run.optim_step(STEP)
        moves.append({name: tensor - before[name] for name, tensor in weights(run).items()})
    for name, expected in moves[0].items():
        same_sign = (expected * moves[1][name] > 0).float().mean().item()
        assert same_sign > 0.9, (name, same_sign)


def test_optim_step_needs_a_gradient(stories_base):
    run = ref.make_run(stories_base)
    run.forward_backward(batch(stories_base), "cross_entropy", backward=False)
    with pytest.raises(DataValidationError, match="call forward_backward first"):
        run.optim_step(STEP)
    run.forward_backward(batch(stories_base), "cross_entropy")
    run.optim_step(STEP)
    with pytest.raises(DataValidationError, match="no gradient"):
        run.optim_step(STEP)


def test_failed_pass_adds_no_gradient_and_blocks_one_step(stories_base):
    run, twin = ref.make_run(stories_base), ref.make_run(stories_base)
    data = batch(stories_base)
    before = weights(run)
    run.forward_backward(data, "cross_entropy")
    gradients = {name: g.clone() for name, g in run._gradients.items()}
    broken, error = break_data(data)
    with pytest.raises(error, match="datum 2: weights is nan"):
        run.forward_backward(broken, "cross_entropy")
    assert same(gradients, run._gradients)
    with pytest.raises(TrainingError, match=r"failed \(datum 2: .*was not taken"):
        run.optim_step(STEP)
    assert same(before, weights(run))
    assert run.step == 0
    # Cleared: from here all goes on as in a run that never failed.
    for each in (run, twin):
        each.forward_backward(data, "cross_entropy")
        each.optim_step(STEP)
    assert same(weights(run), weights(twin))


def test_a_gradient_overflow_leaves_the_weights(stories_base):
    run = ref.make_run(stories_base)
    data = [
        ref.example(d.tokens, target_tokens=d.targets, weights=np.full(len(d), 3e38))
        for d in batch(stories_base)
    ]
    before = weights(run)
    run.forward_backward(data, "cross_entropy")
    with pytest.raises(TrainingError, match="gradient norm is"):
        run.optim_step(STEP)
    assert same(before, weights(run))


def test_custom_loss_errors_are_named(stories_base):
    run, data = ref.make_run(stories_base), batch(stories_base)
    for loss_fn, message in (
        (lambda _, lps: lps[0].sum(), "returned Tensor, expected a tuple"),
        (lambda _, lps: (1.0, {}), "returned float"),
        (lambda _, lps: (lps[0], {}), r"\(30,\) as loss, expected a tensor of one element"),
        (lambda _, lps: (torch.tensor(lps[0].sum().item()), {}), "does not depend"),
        (lambda _, lps: ((lps[1] * 0).sqrt().sum(), {}), "not finite at datum 1"),
    ):
        with pytest.raises(DataValidationError, match=message):
            run.forward_backward_custom(data, loss_fn)
        with pytest.raises(TrainingError, match="was not taken"):
            run.optim_step(STEP)


def test_snapshots_are_immutable(stories_base):
    run, prompt = ref.make_run(stories_base), list(range(1, 30))
    first = run.snapshot()
    a = next(iter(first.tensors.values()))[0]
    assert a.data_ptr() == next(iter(run.adapter.tensors.values()))[0].data_ptr()  # no copy

    def scores(snapshot) -> np.ndarray:
        return ref.score(Sampler(stories_base, snapshot), prompt, logprobs=True).logprobs[1:]

    frozen = scores(first)
    for _ in range(2):
        run.forward_backward(batch(stories_base), "cross_entropy")
        run.optim_step(STEP)
        assert np.array_equal(scores(first), frozen)
    second = run.snapshot()
    moved = scores(second)
    assert np.abs(moved - frozen).max() > 1e-3
    trained = run.forward_backward(
        [ref.example(np.array(prompt), weights=np.zeros(28))], "cross_entropy", backward=False
    )
    assert np.abs(trained.logprobs[0] - moved).max() <= 1e-4
    run.forward_backward(batch(stories_base), "cross_entropy")
    run.optim_step(STEP)
    assert np.array_equal(scores(first), frozen)
    assert np.array_equal(scores(second), moved)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "opt"])
def test_activation_checkpointing_changes_nothing_but_memory(
    tiny_base, tmp_path, kind, record_property
):
    if kind == "opt":  # its layers call dropout themselves
        import transformers as tf

        shape = {"vocab_size": 99, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 3}
        config = tf.OPTConfig(**shape, num_attention_heads=4, word_embed_proj_dim=32, dropout=0.5)
        tf.OPTForCausalLM(config).save_pretrained(tmp_path)
        base = ref.load_base(tmp_path)
        spec = AdapterSpec(rank=4, train_mlp=False)
    else:
        base, spec = tiny_base(kind), AdapterSpec(rank=4)
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, base.vocab_size, 65)
    data = [ref.example(tokens, weights=rng.normal(size=64))]
    results = []
    for budget in (10_000, 8):  # 64 tokens are more than four times 8
        run = ref.make_run(base, budget, spec=spec)
        assert run._recomputed_share(run._plan(data)[0]) == (budget == 8)
        saved, calls = [], []
        layers = [m for n, m in base._decoder.named_modules() if n.endswith("layers.1")]
        inner = next(m for m in layers[0].modules() if m is not layers[0])
        layer_hook = inner.register_forward_hook(lambda *_, calls=calls: calls.append("layer"))
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: (saved.append(t.numel()), t)[1], lambda t: t
        ):
            output = run.forward_backward(data, "cross_entropy")
        layer_hook.remove()
        results.append((output, run._gradients, sum(saved), calls.count("layer")))
        assert "forward" not in vars(layers[0])  # the layer is as it was
    (plain, plain_grads, plain_saved, plain_calls), (again, grads, saved, calls) = results
    assert calls == plain_calls + 1  # the layer ran a second time
    assert saved < plain_saved / 3  # what the graph keeps between the passes
    assert np.array_equal(plain.logprobs[0], again.logprobs[0])
    error = ref.relative_error(grads, plain_grads)
    record_property("gradient_relative", error)
    assert error <= 1e-6


@pytest.mark.usefixtures("unlearned_limits")
def test_out_of_memory_halves_then_checkpoints_then_says_so(stories_base, monkeypatch):
    data = batch(stories_base)
    expected = ref.make_run(stories_base)
    expected.forward_backward(data, "cross_entropy")
    original = MicroBatchPass.run
    seen = []

    def short_of_memory(self, *args, checkpoint, **kwargs):
        seen.append((len(self._examples), checkpoint))
        if len(self._examples) > 1 or (len(self._examples[0]) > 25 and not checkpoint):
            raise torch.OutOfMemoryError("out of memory")
        original(self, *args, checkpoint=checkpoint, **kwargs)

    monkeypatch.setattr(MicroBatchPass, "run", short_of_memory)
    run = ref.make_run(stories_base)
    run.forward_backward(data, "cross_entropy")
    assert seen[0] == (3, False)
    assert (1, 0.5) in seen
    assert run.token_budget < 100
    assert ref.relative_error(run._gradients, expected._gradients) <= 1e-5

    def never(self, *args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(MicroBatchPass, "run", never)
    with pytest.raises(OutOfMemoryError, match=r"a sequence of \d+ tokens.*set max_length lower"):
        run.forward_backward(data, "cross_entropy")


@pytest.fixture
def unlearned_limits(stories_base):
    stories_base.limits = KnownLimits()
    yield
    stories_base.limits = KnownLimits()


def short_of_memory(monkeypatch):
    """25 tokens fit, or 50 recomputed; returns the list of (tokens, recomputed share) tried."""
    original, seen = MicroBatchPass.run, []

    def run(self, *args, checkpoint, **kwargs):
        tokens = sum(len(example) for example in self._examples)
        seen.append((tokens, checkpoint))
        if tokens > 25 * (1 + checkpoint):
            raise torch.OutOfMemoryError("out of memory")
        original(self, *args, checkpoint=checkpoint, **kwargs)

    monkeypatch.setattr(MicroBatchPass, "run", run)
    return seen


@pytest.mark.usefixtures("unlearned_limits")
def test_activation_checkpointing_limit_is_remembered(stories_base, monkeypatch):
    """By later passes, and by other runs of the model; shorter rows are not recomputed, and longer
    ones begin with what is known."""
    seen = short_of_memory(monkeypatch)
    rng = np.random.default_rng(0)
    long, short, longest = (ref.supervised(rng, stories_base, (n,)) for n in (37, 20, 50))
    run = ref.make_run(stories_base)
    for _ in range(3):
        run.forward_backward(long, "cross_entropy")
    run.forward_backward(short, "cross_entropy")
    ref.make_run(stories_base).forward_backward(long, "cross_entropy")
    for _ in range(2):
        run.forward_backward(longest, "cross_entropy")
    recomputed = (37, 0.5)
    assert seen == [
        *((37, 0), recomputed, recomputed, recomputed),
        *((20, 0), recomputed),
        *((50, 0.5), (50, 1), (50, 1)),
    ]


@pytest.mark.usefixtures("unlearned_limits")
def test_a_pass_in_step_with_other_ranks_fails_once_for_each_limit(stories_base, monkeypatch):
    seen = short_of_memory(monkeypatch)
    rng, run = np.random.default_rng(0), ref.make_run(stories_base)
    run.in_step = 1
    for data, reason in (
        (ref.supervised(rng, stories_base, (37,)), "a sequence of 37 tokens"),
        (ref.supervised(rng, stories_base, (8, 8, 8, 8)), "a micro-batch of 32 tokens"),
    ):
        with pytest.raises(OutOfMemoryError, match=reason):
            run.forward_backward(data, "cross_entropy")
        run.in_step = len(run._plan(data))
        run.forward_backward(data, "cross_entropy")
    assert seen == [(37, 0), (37, 0.5), (32, 0), (16, 0), (16, 0)]
    assert run.token_budget == 16


def test_replace_by_takes_everything(stories_base):
    run, other = ref.make_run(stories_base), ref.make_run(stories_base, seed=9)
    run.forward_backward(batch(stories_base), "cross_entropy")
    other.step = 7
    run.replace_by(other)
    assert run.step == 7
    assert run._gradients == {}
    assert same(weights(run), weights(other))


def test_out_of_memory_leaves_the_run_unchanged(stories_base, monkeypatch):
    """Whatever asks for memory: here the sums over micro-batches, behind the first of them."""
    data = batch(stories_base)
    run, other = ref.make_run(stories_base), ref.make_run(stories_base)
    for one in (run, other):
        one.token_budget = 20
        one.forward_backward(data, "cross_entropy")
    before = {name: gradient.clone() for name, gradient in run._gradients.items()}
    add_to = training_run._add_to

    def short_of_memory(total, gradients):
        if total:
            raise MemoryError
        add_to(total, gradients)

    monkeypatch.setattr(training_run, "_add_to", short_of_memory)
    with pytest.raises(OutOfMemoryError, match="pass does not fit into the memory of cpu"):
        run.forward_backward(data, "cross_entropy")
    monkeypatch.undo()
    assert all(torch.equal(run._gradients[name], before[name]) for name in before)
    with pytest.raises(TrainingError, match="since the last step failed"):
        run.optim_step(AdamSettings())
    for one in (run, other):
        one._gradients = {}
        one.forward_backward(data, "cross_entropy")
        one.optim_step(AdamSettings())
    assert same(weights(run), weights(other))
