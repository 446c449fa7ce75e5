"""On-policy distillation towards distributions: the loss against plain autograd, and its run."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import soft_samples as ref
import tinker
import torch

from tinker_cookbook.distillation.on_policy_teachers import Teacher, TopKReverseKL, TopKSignal
from tinker_cookbook.distillation.sdft_targets import answer_datum
from tinker_cookbook.rl.types import Trajectory

ANSWERS = [("Who ran?", " Tom and the dog ran and ran."), ("What is big?", " The sun is.")]
VOCABULARY = 512


def judged(place, k):
    """The data after the teacher has judged them, and its log-probabilities of their tokens."""
    data = []
    for prompt, answer in ANSWERS:
        tokens = place.tokenizer.encode(answer, add_special_tokens=False)
        text = tinker.ModelInput.from_ints(place.tokenizer.encode(prompt))
        data.append(answer_datum(text, tokens))
    rollouts = [(Trajectory([], tinker.ModelInput.empty()), [datum]) for datum in data]
    scores = asyncio.run(Teacher(place.teacher, None, k, VOCABULARY).score(rollouts))
    return data, scores


def kl(p, q):
    return (p * (p / q).log()).sum()


@pytest.mark.parametrize("k", [3, VOCABULARY])
def test_the_loss_is_the_reverse_kl_of_the_places_and_its_gradient_autograds(
    place, plain_stories, k
):
    data, scores = judged(place, k)
    signal = TopKSignal([], coef=0.5)
    output = signal.submit(place.student, data, None).result()

    def expected_loss(item, logits):
        with torch.no_grad():
            tokens = torch.tensor([item.model_input.to_ints()])
            teacher = plain_stories(input_ids=tokens, use_cache=False).logits[0].softmax(-1)
        total = torch.zeros((), dtype=torch.float64)
        for t in np.flatnonzero(item.loss_fn_inputs["mask"].to_numpy()):
            p, q = logits[t].softmax(-1), teacher[t]
            if k < VOCABULARY:  # the teacher's most probable, and one outcome for all others
                best = q.topk(k).indices
                p, q = (torch.cat([x[best], 1 - x[best].sum()[None]]) for x in (p, q))
            total = total + kl(p, q)
        return total / 2

    value, expected = ref.reference_gradients(place.peft_model(), data, expected_loss)
    assert value > 0.5
    assert output.metrics["loss:sum"] == pytest.approx(value, rel=1e-4)
    assert ref.relative_error(place.gradients(), expected) < 2e-5
    learned = signal.trained_logprobs(output)
    sampled = [item.loss_fn_inputs["target_tokens"].to_numpy() for item in data]
    model = place.peft_model()
    for item, tokens, found, teacher in zip(data, sampled, learned, scores, strict=True):
        ids = torch.tensor([item.model_input.to_ints()])
        at = np.flatnonzero(item.loss_fn_inputs["mask"].to_numpy())
        for answers, client in ((found[at], model), (teacher, plain_stories)):
            logits = client(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
            own = logits[at, tokens[at]].detach().numpy()
            np.testing.assert_allclose(answers, own, atol=1e-4)


def test_probability_outside_of_the_teachers_tokens_is_pulled_in():
    """Renormalised over the K tokens the loss would not see it."""
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.array([[5, 6]])),
            "weights": tinker.TensorData.from_numpy(np.array([[0.9, 0.0]], np.float32)),
        },
    )
    log_p = torch.tensor([[0.3, 0.6]]).log().requires_grad_()
    loss, _ = TopKReverseKL()([datum], [log_p])
    assert float(loss.detach()) == pytest.approx(
        0.3 * np.log(0.3 / 0.9) + 0.7 * np.log(0.7 / 0.1), rel=1e-5
    )
    (gradient,) = torch.autograd.grad(loss, log_p)
    assert gradient[0, 0] < -0.5
    assert gradient[0, 1] == 0
