"""Divergences and the KL penalty: by hand, and against what the real small model gives."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import tinker
import torch
from trajectory_samples import action, episode, fields, prompt, turn
from transformers import AutoModelForCausalLM

from tinker_cookbook.backends import connect
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.rl import metrics as rl_metrics
from tinker_cookbook.rl.data_processing import REFERENCE_LOGPROBS, data_for_loss, trajectory_to_data
from tinker_cookbook.rl.loop.adjuster import RolloutData
from tinker_cookbook.rl.metrics import (
    KLPenalty,
    compute_kl_sample_train,
    discounted_future_sum_vectorized,
    post_kl_metrics,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.model_inputs import score_datums, whole_sequence


async def compute_post_kl(data, client):
    return post_kl_metrics(data, await score_datums(client, data))


async def incorporate_kl_penalty(data, client, coef, discount=0.0):
    adjustment = await KLPenalty(client, coef, discount).adjust(RolloutData([], data, []))
    return {name: mean.mean for name, mean in adjustment.means.items()}


class Scorer:
    """A sampling client that gives every token after the first the next of its log-probs."""

    def __init__(self, *logprobs_D):
        self.logprobs, self.asked = list(logprobs_D), []

    def compute_logprobs(self, model_input, prompt_logprobs_last_n=None):
        self.asked.append(model_input.to_ints())
        scores = [None, *self.logprobs[len(self.asked) - 1]]

        async def wait():
            return scores

        return wait()


def two_data():
    """Masks [0, 1, 1] and [1, 0, 0, 1]; the sampler's log-probs are -1, -2 and -3, -4."""
    (first,) = trajectory_to_data(episode(turn([1, 2], action([3, 4], [-1, -2]))), 1.0)
    parted = episode(turn([5], action([6], [-3])), turn([5, 6, 7, 8], action([9], [-4])))
    (second,) = trajectory_to_data(parted, -1.0)
    return [first, second]


LEARNER = [[-9.0, -1.5, -2.0], [-2.0, -9.0, -9.0, -4.25]]
DIFFERENCES = np.array([0.5, 0.0, -1.0, 0.25])

MASKED = [episode(turn([1], [2, 3], masked=True)), episode(turn([4, 5], [6], masked=True))]


@pytest.mark.parametrize(
    "kind", [list, torch.tensor, lambda row: tinker.TensorData.from_torch(torch.tensor(row))]
)
def test_estimators_are_means_over_trained_tokens(kind):
    metrics = compute_kl_sample_train(two_data(), [kind(row) for row in LEARNER])
    assert metrics == pytest.approx(
        {
            "optim/kl_sample_train_v1": DIFFERENCES.mean(),
            "optim/kl_sample_train_v2": (DIFFERENCES**2).mean() / 2,
            "optim/entropy": 2.5,
        }
    )


def test_a_batch_without_a_trained_token_gives_no_metrics():
    data = [datum for traj in MASKED for datum in trajectory_to_data(traj, 1.0)]
    scores = [[-1.0] * datum.model_input.length for datum in data]
    before = [fields(datum) for datum in data]
    assert compute_kl_sample_train(data, scores) == {}
    assert asyncio.run(compute_post_kl(data, Scorer(*scores))) == {}
    assert asyncio.run(incorporate_kl_penalty(data, Scorer(*scores), 0.5, 0.9)) == {}
    # The record has the reference's log-probabilities too.
    kept = [datum.loss_fn_inputs.pop(REFERENCE_LOGPROBS).to_numpy() for datum in data]
    assert [len(values) for values in kept] == [len(values["mask"]) for values in before]
    assert [fields(datum) for datum in data] == before
    assert compute_kl_sample_train([], []) == {}
    # One masked datum among others just does not count.
    mixed = compute_kl_sample_train([*two_data(), *data], [*LEARNER, *scores])
    assert mixed == compute_kl_sample_train(two_data(), LEARNER)


def test_the_penalty_moves_advantages_of_trained_tokens_to_the_reference():
    data = two_data()
    metrics = asyncio.run(incorporate_kl_penalty(data, Scorer(*LEARNER), 0.5))
    mean = DIFFERENCES.mean()
    assert metrics == pytest.approx({"kl_policy_base": mean})
    first, second = (fields(datum)["advantages"] for datum in data)
    assert first == pytest.approx([0, 1 + 0.5 * (mean - 0.5), 1 + 0.5 * mean], abs=1e-7)
    assert second == pytest.approx(
        [-1 + 0.5 * (mean + 1), 0, 0, -1 + 0.5 * (mean - 0.25)], abs=1e-7
    )
    assert data[0].loss_fn_inputs["advantages"].to_numpy().dtype == np.float32
    assert sum(first) + sum(second) == pytest.approx(0, abs=1e-6)  # the penalty is centred


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 64, 1000])
def test_discounted_future_sums_equal_a_plain_loop(gamma, length):
    x = np.random.default_rng(length).normal(size=length)
    expected, later = np.zeros(length), 0.0
    for t in reversed(range(length)):
        later = x[t] + gamma * later
        expected[t] = later
    kept = x.copy()
    result = discounted_future_sum_vectorized(x, gamma)
    assert result.dtype == np.float64
    assert np.abs(result - expected).max(initial=0) <= 1e-11
    assert (x == kept).all()
    single = discounted_future_sum_vectorized(x.astype(np.float32), gamma)
    assert np.abs(single - expected).max(initial=0) <= 1e-4


# --- the real model -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service():
    return connect("local", device="cpu", dtype="float32").service


@pytest.fixture
def client(service, stories_model):
    return service.create_lora_training_client(stories_model, rank=4, seed=0).result()


def sampled_data(client, tokenizer):
    """Two conversations of two turns each, and a masked turn, of the present weights."""
    policy = TinkerTokenCompleter(
        client.save_weights_and_get_sampling_client().result(), max_tokens=12, seed=3
    )

    async def play(text, number):
        turns, ids = [], tokenizer.encode(text)
        for i, more in enumerate([" Then the dog", " At last"]):
            ac = await policy.derived(number, i)(prompt(ids), [])
            turns.append(turn(prompt(ids), ac, masked=(number, i) == (1, 0)))
            ids = ids + ac.tokens + tokenizer.encode(more, add_special_tokens=False)
        return episode(*turns)

    texts = ["Once upon a time,", "Tom and Mia saw a cat."]
    data = []
    for number, (text, advantage) in enumerate(zip(texts, [1.0, -1.0], strict=True)):
        data += trajectory_to_data(asyncio.run(play(text, number)), advantage)
    assert len(data) == 2
    return data


def exact_logprobs(stories_model, datum):
    """Log-probabilities of the targets by plain transformers, in float64."""
    model = AutoModelForCausalLM.from_pretrained(stories_model, dtype=torch.float64).eval()
    ids = torch.tensor([datum.model_input.to_ints()])
    targets = torch.tensor(datum.loss_fn_inputs["target_tokens"].tolist())
    with torch.no_grad():
        scores = model(ids).logits[0].log_softmax(-1)
    return scores.gather(1, targets[:, None])[:, 0].numpy()


def forward(client, data):
    loss = "importance_sampling"
    output = client.forward(data_for_loss(data, loss), loss).result()
    return [record["logprobs"] for record in output.loss_fn_outputs]


def update(client, data):
    loss = "importance_sampling"
    client.forward_backward(data_for_loss(data, loss), loss)
    client.optim_step(tinker.AdamParams(learning_rate=0.02)).result()


def test_sampler_and_trainer_agree_until_a_step_parts_them(client, stories_model):
    data = sampled_data(client, get_tokenizer(stories_model))
    before = compute_kl_sample_train(data, forward(client, data))
    assert abs(before["optim/kl_sample_train_v1"]) < 1e-5
    assert 0 <= before["optim/kl_sample_train_v2"] < 1e-9

    masks = [np.array(fields(datum)["mask"]) != 0 for datum in data]
    assert [int(mask.sum()) for mask in masks] == [24, 12]
    exact = np.concatenate(
        [exact_logprobs(stories_model, d)[m] for d, m in zip(data, masks, strict=True)]
    )
    assert before["optim/entropy"] == pytest.approx(-exact.mean(), abs=1e-5)

    update(client, data)
    after = compute_kl_sample_train(data, forward(client, data))
    assert after["optim/kl_sample_train_v2"] > 1e-3
    assert after["optim/entropy"] == before["optim/entropy"]  # the sampler's, which did not change

    post = client.save_weights_and_get_sampling_client().result()
    rescored = asyncio.run(compute_post_kl(data, post))
    assert rescored["kl_pre_post_v1"] == pytest.approx(after["optim/kl_sample_train_v1"], abs=1e-5)
    assert rescored["kl_pre_post_v2"] == pytest.approx(after["optim/kl_sample_train_v2"], abs=1e-5)


def test_the_penalty_of_the_real_model_against_its_base(client, service, stories_model):
    tokenizer = get_tokenizer(stories_model)
    base = service.create_sampling_client(base_model=stories_model).result()
    data = sampled_data(client, tokenizer)
    untouched = [fields(datum)["advantages"] for datum in data]
    start = asyncio.run(incorporate_kl_penalty(data, base, 1.0))
    assert abs(start["kl_policy_base"]) < 1e-5  # a new adapter changes nothing
    for datum, advantages in zip(data, untouched, strict=True):
        assert fields(datum)["advantages"] == pytest.approx(advantages, abs=1e-4)

    # Make samples of the first conversation likelier, then sample anew: the policy has moved.
    for _ in range(3):
        client.forward_backward(
            data_for_loss(data[:1], "importance_sampling"), "importance_sampling"
        )
        client.optim_step(tinker.AdamParams(learning_rate=0.02)).result()
    moved = sampled_data(client, tokenizer)
    metrics = asyncio.run(incorporate_kl_penalty(moved, base, 0.1))
    assert metrics["kl_policy_base"] > 0.05
    exact = [exact_logprobs(stories_model, datum) for datum in moved]
    for datum, reference, advantage in zip(moved, exact, [1.0, -1.0], strict=True):
        f = {name: np.array(values) for name, values in fields(datum).items()}
        expected = f["mask"] * (
            advantage + 0.1 * (metrics["kl_policy_base"] - (f["logprobs"] - reference))
        )
        assert f["advantages"] == pytest.approx(expected, abs=1e-5)


def test_the_functions_of_the_official_cookbook_also_give_the_tokens_that_this_took(
    client, stories_model
):
    data = sampled_data(client, get_tokenizer(stories_model))
    sampler = client.save_weights_and_get_sampling_client().result()
    post, usage = asyncio.run(rl_metrics.compute_post_kl(data, sampler))
    assert post == pytest.approx(asyncio.run(compute_post_kl(data, sampler)), abs=1e-6)
    assert usage.sampled == len(data)
    total = sum(whole_sequence(datum).length for datum in data)
    assert usage.prefill_cached + usage.prefill_uncached == total
    same = sampled_data(client, get_tokenizer(stories_model))
    penalty, usage = asyncio.run(rl_metrics.incorporate_kl_penalty(data, sampler, 0.5))
    assert penalty == pytest.approx(
        asyncio.run(incorporate_kl_penalty(same, sampler, 0.5)), abs=1e-6
    )
    assert usage.sampled == len(data)
    for one, other in zip(data, same, strict=True):
        assert fields(one)["advantages"] == pytest.approx(fields(other)["advantages"], abs=1e-6)
