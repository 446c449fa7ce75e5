"""Soft targets from a teacher: against plain transformers, peft and autograd."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import soft_samples as ref
import tinker
import torch

from tinker_cookbook.distillation.topk_distributions import (
    SoftDatum,
    TopK,
    distance_metrics,
    score_with_topk,
    soft_datum,
    soft_targets,
)
from tinker_cookbook.exceptions import (
    BackendError,
    DataValidationError,
)


def data_of(place) -> list[tinker.Datum]:
    return [ref.datum(place.tokenizer, *story) for story in ref.STORIES]


def soften(place, data, k=20) -> list[SoftDatum]:
    async def ask():
        return [await soft_targets(item, place.teacher, k) for item in data]

    return asyncio.run(ask())


def student_logprobs(place, soft):
    output = place.student.forward([s.datum for s in soft], "cross_entropy").result()
    return [record["logprobs"] for record in output.loss_fn_outputs]


def test_the_teachers_top_k_are_those_of_transformers(place, plain_stories):
    ids = place.tokenizer.encode(" ".join(map("".join, ref.STORIES)))
    found, _ = asyncio.run(score_with_topk(place.teacher, tinker.ModelInput.from_ints(ids), 20))
    with torch.no_grad():
        expected = plain_stories(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).topk(20)
    assert np.array_equal(found.ids, expected.indices.numpy())
    assert np.abs(found.logprobs - expected.values.numpy()).max() < 2e-5


def test_targets_stand_where_the_example_is_trained(place, plain_stories):
    item = ref.datum(place.tokenizer, *ref.STORIES[0])
    weights = item.loss_fn_inputs["weights"].to_numpy()
    (soft,) = soften(place, [item], k=5)
    got = soft.datum.loss_fn_inputs["weights"].to_numpy()
    assert got.shape == (item.model_input.length, 5)
    # Renormalised: they add up to the weight that the example has at each position.
    assert np.allclose(got.sum(-1), weights, atol=1e-6)
    assert np.array_equal(soft.mass > 0, weights > 0)
    with torch.no_grad():
        logits = plain_stories(torch.tensor([item.model_input.to_ints()])).logits[0]
    at = int(np.flatnonzero(weights)[0])
    top = logits[at].softmax(-1).topk(5)
    targets = soft.datum.loss_fn_inputs["target_tokens"].to_numpy()
    assert targets[at].tolist() == top.indices.tolist()
    assert np.allclose(got[at], (top.values / top.values.sum()).numpy(), atol=1e-6)
    assert soft.mass[at] == pytest.approx(float(top.values.sum()), abs=1e-5)


def test_loss_and_gradient_equal_autograd_through_peft(place):
    soft = soften(place, data_of(place))
    data = [item.datum for item in soft]
    output = place.student.forward_backward(data, "cross_entropy").result()

    def cross_entropy(item, logits):
        targets = item.loss_fn_inputs["target_tokens"].to_torch()
        weights = item.loss_fn_inputs["weights"].to_torch().double()
        return -(weights * logits.log_softmax(-1).gather(1, targets)).sum()

    value, expected = ref.reference_gradients(place.peft_model(), data, cross_entropy)
    assert output.metrics["loss:sum"] == pytest.approx(value, rel=1e-5)
    assert ref.relative_error(place.gradients(), expected) < 1e-5


def test_distances_with_all_tokens_are_the_exact_ones(place, plain_stories):
    soft = soften(place, data_of(place), k=512)
    found = distance_metrics(soft, student_logprobs(place, soft))
    model = place.peft_model()
    kls, entropies, crosses = [], [], []
    for item in data_of(place):
        tokens = torch.tensor([item.model_input.to_ints()])
        at = item.loss_fn_inputs["weights"].to_torch() > 0
        with torch.no_grad():
            t = plain_stories(tokens).logits[0].log_softmax(-1)[at]
            s = model(input_ids=tokens).logits[0].log_softmax(-1)[at]
        kls += (t.exp() * (t - s)).sum(-1).tolist()
        entropies += (-t.exp() * t).sum(-1).tolist()
        crosses += (-t.exp() * s).sum(-1).tolist()
    assert found["teacher/forward_kl"] == pytest.approx(np.mean(kls), abs=1e-5)
    assert found["teacher/entropy"] == pytest.approx(np.mean(entropies), abs=1e-5)
    assert found["teacher/cross_entropy"] == pytest.approx(np.mean(crosses), abs=1e-5)
    assert found["teacher/topk_mass"] == pytest.approx(1, abs=1e-5)
    assert np.mean(kls) > 0.01  # else all of this would hold of anything


def test_the_kl_of_the_top_k_rises_to_the_exact_one(place):
    kls, masses = [], []
    for k in (1, 5, 20, 512):
        soft = soften(place, data_of(place), k)
        found = distance_metrics(soft, student_logprobs(place, soft))
        kls.append(found["teacher/forward_kl"])
        masses.append(found["teacher/topk_mass"])
    assert 0 < kls[0] < kls[1] < kls[2] <= kls[3]
    assert masses == sorted(masses)


def test_tokens_that_the_student_lacks_are_left_out():
    logprobs = np.log(np.array([[0.5, 0.3, 0.1]], np.float32))
    topk = TopK(np.array([[7, 2, 9]]), logprobs).within(8)
    assert topk.ids.tolist() == [[7, 2, 0]]
    assert np.allclose(topk.renormalised(), [[0.625, 0.375, 0]])
    soft = soft_datum(tinker.ModelInput.from_ints([1, 2]), np.array([1]), topk)
    assert soft.mass.tolist() == pytest.approx([0, 0.8])
    # The place of a missing token holds another one's id, whose log-probability must not count.
    found = distance_metrics([soft], [np.log([[0.1] * 3, [0.5, 0.3, 1e-30]])])
    assert found["teacher/forward_kl"] == pytest.approx(0, abs=1e-6)
    with pytest.raises(DataValidationError, match="same tokenizer"):
        TopK(np.array([[7, 9]]), logprobs[:, :2]).within(5)


class _Answer:
    """A backend that answers with something else than distributions."""

    def __init__(self, topk) -> None:
        self._topk = topk

    async def sample(self, **_):
        from tinker.types.topk_logprobs import TopkLogprobs

        topk = self._topk and TopkLogprobs(*self._topk)
        return tinker.types.SampleResponse(sequences=[], topk_prompt_logprobs_np=topk)


def test_a_backend_without_distributions_is_refused():
    prompt = tinker.ModelInput.from_ints([1, 2, 3])
    with pytest.raises(BackendError, match="cannot serve as a teacher"):
        asyncio.run(score_with_topk(_Answer(None), prompt, 2))
    empty = np.zeros((3, 2), np.int32), np.full((3, 2), -99999.0, np.float32)
    with pytest.raises(BackendError, match="row 0 of 2 is empty"):
        asyncio.run(score_with_topk(_Answer(empty), prompt, 2))
