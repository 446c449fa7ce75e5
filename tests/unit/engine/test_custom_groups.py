"""Custom losses that are sums over groups: equal to the whole batch, in the memory of a part."""

from __future__ import annotations

from typing import Any

import engine_reference as ref
import numpy as np
import pytest
import torch

from tinker_cookbook.engine.model.head import Head
from tinker_cookbook.engine.training.micro_batch import MicroBatchPass
from tinker_cookbook.engine.training.packing import plan
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError, OutOfMemoryError


def pairs(base, seed: int = 0) -> list:
    """Three pairs: with a long prompt in common, of short texts, and with nothing in common."""
    rng = np.random.default_rng(seed)
    stem = ref.text(base, rng, 110)
    texts = [np.concatenate([stem, ref.text(base, rng, n)]) for n in (25, 12)]
    texts += [ref.text(base, rng, n) for n in (9, 14, 40, 33)]
    return [ref.example(t, weights=np.zeros(len(t) - 1)) for t in texts]


class PairLoss:
    """DPO's shape: a log-sigmoid of the difference within each pair, each pair of other weight."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []

    def __call__(self, indices, lps) -> tuple[torch.Tensor, dict[str, float]]:
        self.parts.append(list(indices))
        total = torch.zeros(())
        for at in range(0, len(lps), 2):
            margin = 0.1 * (lps[at].sum() - lps[at + 1].sum())
            total = total - torch.nn.functional.logsigmoid(margin) * (1 + indices[at])
        return total, {"pairs": len(lps) / 2}


@pytest.mark.parametrize("budget", [1, 60, 170, 10_000])
def test_groups_equal_the_whole_batch_and_autograd(stories_base, budget, tmp_path, record_property):
    data = pairs(stories_base)
    whole = ref.make_run(stories_base)
    expected = whole.forward_backward_custom(data, PairLoss())
    run, loss_fn = ref.make_run(stories_base, budget), PairLoss()
    found = run.forward_backward_custom(data, loss_fn, group_size=2)
    assert sorted(i for part in loss_fn.parts for i in part) == list(range(6))
    assert all(part[::2] == [i - 1 for i in part[1::2]] for part in loss_fn.parts)
    assert len(loss_fn.parts) == {1: 3, 60: 3, 170: 2, 10_000: 2}[budget]
    assert found.metrics["pairs"] == 3
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    error = ref.relative_error(run._gradients, whole._gradients)
    record_property("gradient_relative", error)
    assert error <= 1e-5
    assert found.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    ref.errors_of(
        run, stories_base, tmp_path, data, lambda lps: PairLoss()(range(6), lps)[0], found,
        record_property,
    ).check()  # fmt: skip


class TrainedPairLoss(PairLoss):
    """Reads what has a weight alone."""

    def __init__(self, data) -> None:
        super().__init__()
        self.masks = [torch.from_numpy(example.inputs["weights"] != 0) for example in data]

    def __call__(self, indices, lps) -> tuple[torch.Tensor, dict[str, float]]:
        return super().__call__(
            indices, [lp * self.masks[i] for i, lp in zip(indices, lps, strict=True)]
        )


@pytest.mark.parametrize("group_size", [2, None])
@pytest.mark.parametrize(
    "budget", [60, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 170, 10_000))]
)
def test_logits_of_prompts_can_be_left_out(stories_base, budget, group_size, monkeypatch):
    data = pairs(stories_base)
    for at, example in enumerate(data):  # the pair that shares its prompt keeps none of it
        example.inputs["weights"][(100 if at < 2 else 4) :] = 1
    expected, run = ref.make_run(stories_base, budget), ref.make_run(stories_base, budget)
    everything = expected.forward_backward_custom(data, TrainedPairLoss(data), group_size)
    rows, original = [], Head.logprobs

    def counting(self, hidden, *args):
        rows.append(len(hidden))
        return original(self, hidden, *args)

    monkeypatch.setattr(Head, "logprobs", counting)
    found = run.forward_backward_custom(data, TrainedPairLoss(data), group_size, trained_only=True)
    assert sum(rows) <= sum(int((e.inputs["weights"] != 0).sum()) for e in data)
    for one, other, example in zip(found.logprobs, everything.logprobs, data, strict=True):
        trained = example.inputs["weights"] != 0
        np.testing.assert_allclose(one[trained], other[trained], atol=1e-5)
        assert (one[~trained] == 0).all()
        assert (other[~trained] != 0).all()
    assert found.metrics == pytest.approx(everything.metrics, rel=1e-6)
    assert ref.relative_error(run._gradients, expected._gradients) <= 1e-5


def test_a_group_shares_a_row_where_that_pays(stories_base):
    tokens = [example.tokens for example in pairs(stories_base)]
    micros = plan(tokens, 170, group_size=2, shared_budget=300)
    assert [(micro.shared, micro.indices) for micro in micros] == [
        (True, (0, 1)),
        (False, (4, 5, 2, 3)),
    ]
    long, short = (micro.halves(tokens) for micro in micros)
    assert long == []
    assert [half.indices for half in short] == [(4, 5), (2, 3)]
    assert all(half.halves(tokens) == [] for half in short)
    assert not any(micro.shared for micro in plan(tokens, 150, group_size=2))
    assert not any(micro.shared for micro in plan(tokens, 150, group_size=2, shared_budget=140))


def test_out_of_memory_keeps_groups_whole(stories_base, monkeypatch):
    data, expected = pairs(stories_base), ref.make_run(stories_base)
    expected.forward_backward_custom(data, PairLoss())
    seen, original = [], MicroBatchPass.run_custom

    def scarce(self, loss_fn, *, checkpoint, **more):
        seen.append((self._indices, checkpoint))
        if len(self._examples) > 2 or (len(self._examples[0]) > 100 and checkpoint < 1):
            raise torch.OutOfMemoryError("out of memory")
        original(self, loss_fn, checkpoint=checkpoint, **more)

    monkeypatch.setattr(MicroBatchPass, "run_custom", scarce)
    run = ref.make_run(stories_base)
    run.forward_backward_custom(data, PairLoss(), group_size=2)
    assert ((0, 1), 1) in seen
    # No fewer tokens than the first group, which only fitted recomputed.
    assert ((4, 5, 2, 3), 1) in seen
    assert ref.relative_error(run._gradients, expected._gradients) <= 1e-5

    def never(self, *args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(MicroBatchPass, "run_custom", never)
    with pytest.raises(OutOfMemoryError, match=r"a group of 2 sequences .*set max_length lower"):
        run.forward_backward_custom(data, PairLoss(), group_size=2)


def test_invalid_groups_are_refused(stories_base):
    run, data = ref.make_run(stories_base), pairs(stories_base)
    with pytest.raises(DataValidationError, match=r"got 5 datums, expected a multiple of .*=2"):
        run.forward_backward_custom(data[:5], PairLoss(), group_size=2)
    wrong: list[Any] = [0, -2, 1.5, True, "2"]
    for bad in wrong:
        with pytest.raises(ConfigurationError, match="group_size: got"):
            run.forward_backward_custom(data, PairLoss(), group_size=bad)

    def infinite_slope(indices, lps) -> tuple[torch.Tensor, dict[str, float]]:
        terms = [(lp * 0).sqrt() if i == 5 else lp for i, lp in zip(indices, lps, strict=True)]
        return torch.cat(terms).sum(), {}

    with pytest.raises(DataValidationError, match="not finite at datum 5"):
        run.forward_backward_custom(data, infinite_slope, group_size=2)
