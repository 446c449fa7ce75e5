"""Held-out losses of a real small model, against plain transformers."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from tinker_cookbook.backends import connect
from tinker_cookbook.supervised.common import datum_from_tokens_weights
from tinker_cookbook.supervised.data import SupervisedDatasetFromHFDataset
from tinker_cookbook.supervised.nll_evaluator import NLLEvaluator, SamplerNLLEvaluator
from tinker_cookbook.tokenizer_utils import get_tokenizer

STORIES = [
    ("Once upon a time,", " there was a little girl named Lily."),
    ("Tom had a dog.", " The dog liked to run and play in the park all day."),
    ("The sun", " was bright."),
]


@pytest.fixture(scope="module")
def client(stories_model):
    service = connect("local", device="cpu", dtype="float32").service
    return service.create_lora_training_client(stories_model, rank=4, seed=0).result()


@pytest.fixture(scope="module")
def examples(stories_model):
    """(token ids, weights) of each story: its second half is trained on."""
    tokenizer = get_tokenizer(stories_model)
    out = []
    for prompt, answer in STORIES:
        head = tokenizer.encode(prompt)
        tail = tokenizer.encode(answer, add_special_tokens=False)
        out.append((head + tail, [0.0] * len(head) + [1.0] * len(tail)))
    return out


@pytest.fixture(scope="module")
def expected_nll(stories_model, examples):
    """Sum of the trained tokens' negative log-probabilities over their number."""
    model = AutoModelForCausalLM.from_pretrained(stories_model, dtype=torch.float32).eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for ids, weights in examples:
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            for i in range(1, len(ids)):
                if weights[i]:
                    total -= float(logprobs[i - 1, ids[i]])
                    count += 1
    return total / count, count


def data_of(examples, reduction="none"):
    return [datum_from_tokens_weights(ids, w, reduction=reduction) for ids, w in examples]


@pytest.mark.parametrize("batch_size", [1, 2, 64])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_forward_gives_the_mean_over_all_trained_tokens(
    client, examples, expected_nll, batch_size, reduction
):
    evaluator = NLLEvaluator(data_of(examples, reduction), name="held", batch_size=batch_size)
    metrics = asyncio.run(evaluator(client))
    assert metrics["held/nll"] == pytest.approx(expected_nll[0], abs=1e-5)
    assert metrics["held/num_loss_tokens"] == expected_nll[1]
    assert set(metrics) == {"held/nll", "held/num_loss_tokens"}


def test_a_sampling_client_gives_the_same_metrics(client, stories_model, examples, expected_nll):
    tokenizer = get_tokenizer(stories_model)
    sampler = client.save_weights_and_get_sampling_client().result()
    data = data_of(examples, "mean")
    by_sampler = asyncio.run(SamplerNLLEvaluator(data, "test", tokenizer)(sampler))
    by_trainer = asyncio.run(NLLEvaluator(data, "test", tokenizer)(client))
    assert by_sampler == pytest.approx(by_trainer, abs=1e-4)
    assert by_sampler["test/nll"] == pytest.approx(expected_nll[0], abs=1e-4)
    num_bytes = sum(len(answer.encode()) for _, answer in STORIES)
    bits = expected_nll[0] * expected_nll[1] / math.log(2)
    # Decoding drops the space before the first word of each answer: a byte in each.
    most = bits / (num_bytes - len(STORIES))
    assert bits / num_bytes - 1e-5 <= by_sampler["test/bpb"] <= most + 1e-5


def test_a_dataset_is_scored_whole_without_what_was_dropped(client, examples, expected_nll):
    nothing = ([1, 2, 3], [0.0, 0.0, 0.0])
    rows = [examples[0], nothing, examples[1], examples[2], nothing, nothing]
    dataset = SupervisedDatasetFromHFDataset(
        rows, 2, map_fn=lambda row: datum_from_tokens_weights(*row)
    )
    metrics = asyncio.run(NLLEvaluator.from_dataset(dataset)(client))
    assert metrics["test/nll"] == pytest.approx(expected_nll[0], abs=1e-5)
    assert metrics["test/num_loss_tokens"] == expected_nll[1]
    assert dataset.num_dropped == 3


def test_all_requests_are_submitted_before_the_first_is_awaited(client, examples):
    events = []

    class Recorder:
        def forward(self, data, loss_fn):
            assert loss_fn == "cross_entropy"
            events.append(f"submit {len(data)}")
            future = client.forward(data, loss_fn)

            async def wait():
                events.append("await")
                return await future

            return wait()

    asyncio.run(NLLEvaluator(data_of(examples), batch_size=2)(Recorder()))
    assert events == ["submit 2", "submit 1", "await", "await"]
