"""Micro-batch planning, padding, shared prefixes."""

from __future__ import annotations

import engine_reference as ref
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinker_cookbook.engine.training import tree_attention
from tinker_cookbook.engine.training.packing import pad, plan
from tinker_cookbook.engine.training.prefix_tree import group_by_prefix, lay_out

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=9)
LONG_SEQUENCES = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 150), st.integers(1, 60)), min_size=1, max_size=9
)


def seen(row) -> np.ndarray:
    """[T, T] bool: which places of a row each place attends to."""
    out = np.zeros((len(row.tokens), len(row.tokens)), dtype=bool)
    for siblings in row.siblings:
        for own in siblings.segments:
            out[np.ix_(own, siblings.path)] = True
            for i, place in enumerate(own):
                out[place, own[: i + 1]] = True
    return out


@given(SEQUENCES, st.sampled_from([1, 3, 16]))
@settings(max_examples=300, deadline=None)
def test_tree_row_shows_each_sequence_its_own_past_and_nothing_else(token_lists, shortest):
    sequences = [np.array(tokens) for tokens in token_lists]
    row = lay_out(sequences, shortest)
    if shortest == 1:  # each distinct beginning is computed once
        assert len(row.tokens) == len(
            {tuple(s[: i + 1]) for s in token_lists for i in range(len(s))}
        )
    assert len(row.tokens) <= sum(map(len, sequences))
    sees = seen(row)
    for sequence, where in zip(sequences, row.where, strict=True):
        assert row.tokens[where].tolist() == sequence.tolist()
        assert row.positions[where].tolist() == list(range(len(sequence)))
        for position, place in enumerate(where):
            assert sorted(np.flatnonzero(sees[place])) == sorted(where[: position + 1])


@given(LONG_SEQUENCES, st.integers(1, 500))
@settings(max_examples=200, deadline=None)
def test_plan_holds_every_sequence_once_within_the_budget(kinds, budget):
    rng = np.random.default_rng(0)
    stems = [np.arange(150), np.arange(150) + 7]
    sequences = [
        np.concatenate([stems[which][:stem], rng.integers(0, 50, tail)])
        for which, stem, tail in kinds
    ]
    for share in (False, True):
        groups = plan(sequences, budget, shared_budget=budget if share else 0)
        found = sorted(i for group in groups for i in group.indices)
        assert found == list(range(len(sequences)))
        for group in groups:
            assert group.padded_tokens <= budget or len(group.indices) == 1
            batch = pad(group, sequences, torch.device("cpu"))
            flat = batch.tokens.flatten()[batch.flat].numpy()
            assert flat.tolist() == np.concatenate([sequences[i] for i in group.indices]).tolist()
            lengths = [len(sequences[i]) for i in group.indices]
            assert torch.bincount(batch.sequence).tolist() == lengths
            for half in group.halves(sequences):
                assert set(half.indices) < set(group.indices)


def test_groups_form_only_where_they_save_enough():
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 100, 200)
    samples = [np.concatenate([prompt, rng.integers(0, 100, 50)]) for _ in range(8)]
    header = [np.concatenate([prompt[:20], rng.integers(0, 100, 230)]) for _ in range(8)]
    assert [sorted(g) for g in group_by_prefix(samples, 720)] == [list(range(8))]
    assert all(len(g) == 1 for g in group_by_prefix(header, 10_000))
    assert [len(g) for g in group_by_prefix(samples, 380)] == [3, 3, 2]
    short = [samples[0][:40], samples[0][:40]]
    assert all(len(g) == 1 for g in group_by_prefix(short, 720))


def family(base, rng: np.random.Generator) -> list[np.ndarray]:
    """Two groups of samples of one prompt each, unmerged turns, duplicates, a lone sequence."""
    first, second = ref.text(base, rng, 90), ref.text(base, rng, 70)
    out = [np.concatenate([first, rng.integers(3, base.vocab_size, n)]) for n in (9, 14, 1, 20)]
    out += [np.concatenate([second, rng.integers(3, base.vocab_size, n)]) for n in (30, 3)]
    out += [second[:60], out[-2][:80], out[-2].copy(), first[:75], ref.text(base, rng, 40)]
    return out


def take(run) -> dict[str, torch.Tensor]:
    taken, run._gradients = run._gradients, {}
    return taken


LOSSES = ["cross_entropy", "wide", "ppo", "gspo", "custom"]
KINDS = ["llama", "qwen3", "granite", "gemma3"]
# Each loss with each kind, and both parts with each of them.
PAIRS = [
    (loss, kind, ("_Batch", "_Whole")[(i + j) % 2])
    for i, loss in enumerate(LOSSES)
    for j, kind in enumerate(KINDS)
]


@pytest.mark.parametrize(("loss", "kind", "part"), PAIRS)
def test_shared_prefix_equals_unshared(
    tiny_base, kind, loss, part, record_property, monkeypatch: pytest.MonkeyPatch
):
    limit = -1 if part == "_Batch" else 1 << 30
    monkeypatch.setattr(tree_attention, "_HIDDEN_SCORES", limit)
    base = tiny_base(kind)
    assert base.shares_prefixes
    rng = np.random.default_rng(5)
    data = []
    for tokens in family(base, rng):
        length = len(tokens)
        inputs = {"target_tokens": rng.integers(0, base.vocab_size, length)}
        if loss in ("cross_entropy", "custom"):
            inputs["weights"] = rng.normal(size=length)
        elif loss == "wide":
            inputs["target_tokens"] = rng.integers(0, base.vocab_size, (length, 3))
            inputs["weights"] = rng.normal(size=(length, 3))
        else:
            inputs["target_tokens"] = np.append(tokens[1:], 5)
            inputs |= {
                "logprobs": rng.normal(size=length) - 6,
                "advantages": rng.normal(size=length),
            }
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = np.ones(length)
        data.append(ref.example(tokens, **inputs))
    config = {"clip_low_threshold": 0.2, "clip_high_threshold": 3.0} if loss == "gspo" else {}
    results = []
    for share in (False, True):
        run = ref.make_run(base, 400)
        base.__dict__["shares_prefixes"] = share
        groups = run._plan(data)
        assert any(len(row.indices) > 1 for group in groups for row in group.rows) == share
        trees = [pad(group, [e.tokens for e in data], base.device).layout for group in groups]
        kinds = {type(p).__name__ for tree in trees if tree is not None for p in tree.parts}
        assert kinds == ({part} if share else set())
        if loss == "custom":
            output = run.forward_backward_custom(
                data,
                lambda _, lps: (sum(lp.sigmoid().sum() * (i + 1) for i, lp in enumerate(lps)), {}),
            )
        else:
            name = "cross_entropy" if loss == "wide" else loss
            output = run.forward_backward(data, name, config)
        results.append((output, take(run)))
    (plain, plain_grads), (shared, shared_grads) = results
    worst = max(
        float(np.abs(a - b).max()) for a, b in zip(plain.logprobs, shared.logprobs, strict=True)
    )
    error = ref.relative_error(shared_grads, plain_grads)
    record_property("logprob_max_abs", worst)
    record_property("gradient_relative", error)
    assert worst <= 1e-5
    assert error <= 1e-5
    assert shared.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-5)


def test_soft_capped_attention_is_never_shared(tiny_base):
    assert not tiny_base("gemma2").shares_prefixes


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_any_split_gives_the_same_result(tiny_base, kind, record_property):
    """Also packed against one by one: budget 1 runs every sequence alone."""
    base = tiny_base(kind)
    data = ref.supervised(np.random.default_rng(6), base, (50, 3, 31, 18, 44, 1, 27))
    reference = None
    worst = error = 0.0
    for budget in (1, 20, 64, 100, 10_000):
        run = ref.make_run(base, budget)
        output, gradients = run.forward_backward(data, "cross_entropy"), take(run)
        if reference is None:
            reference = output, gradients
            continue
        for a, b in zip(output.logprobs, reference[0].logprobs, strict=True):
            worst = max(worst, float(np.abs(a - b).max()))
        error = max(error, ref.relative_error(gradients, reference[1]))
        assert output.metrics["loss:sum"] == pytest.approx(reference[0].metrics["loss:sum"])
    record_property("logprob_max_abs", worst)
    record_property("gradient_relative", error)
    assert worst <= 1e-5
    assert error <= 1e-5
