"""The pair losses, their gradients through the engine, and their metrics, by plain torch."""

from __future__ import annotations

import asyncio
import json
import math

import numpy as np
import pytest
import tinker
import torch
from pairs import make_pairs, plain_loss, plain_scores
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tinker_cookbook.backends import connect
from tinker_cookbook.checkpoint_utils import CheckpointRecord
from tinker_cookbook.preference.dpo_loss import PairLoss, PairObjective, pair_metrics
from tinker_cookbook.preference.train_dpo import (
    Config,
    Pairs,
    compute_dpo_loss,
    create_dpo_clients,
    do_update,
)
from tinker_cookbook.run.ml_log import start_logging
from tinker_cookbook.supervised.nll_evaluator import NLLEvaluator
from tinker_cookbook.supervised.types import SupervisedDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

LOSSES = [
    PairLoss(),
    PairLoss(beta=0.5, label_smoothing=0.1),
    PairLoss("ipo", beta=0.2),
    PairLoss("simpo", beta=2.0, gamma=1.0),
]
ids = [f"{loss.name}-{loss.label_smoothing}" for loss in LOSSES]


def score_answers(client, data):
    """Log-probabilities of the answers, as the objective takes them from its reference."""
    return asyncio.run(Pairs(PairLoss(), client).prepare(0, data)).prepared


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    with connect("local", device="cpu", dtype="float32", root=root).service as service:
        yield service


@pytest.fixture(scope="module")
def moved(service, stories_model):
    """A policy some steps away from its base model, and the base model as its reference."""
    client = service.create_lora_training_client(stories_model, rank=4, seed=1).result()
    data = make_pairs(4, seed=9)
    for _ in range(3):
        client.forward_backward(data, "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=2e-2)).result()
    return client, service.create_sampling_client(base_model=stories_model)


@pytest.mark.parametrize("loss", LOSSES, ids=ids)
def test_loss_and_gradient_equal_plain_torch(moved, stories_model, tmp_path, loss):
    client, reference_client = moved
    data = make_pairs(5)
    reference = score_answers(reference_client, data)
    used = reference if loss.needs_reference else np.zeros(len(data))
    run = client._created.result()
    run._gradients = {}
    output = client.forward_backward_custom(data, PairObjective(loss, data, used)).result()

    model = as_peft(run, stories_model, tmp_path)
    with torch.no_grad(), model.disable_adapter():
        plain_reference = plain_scores(model, data)
    np.testing.assert_allclose(reference, plain_reference.numpy(), atol=2e-4)
    scores = plain_scores(model, data, mean=loss.name == "simpo")
    losses = plain_loss(
        loss.name, scores, plain_reference, loss.beta, loss.label_smoothing, loss.gamma
    )
    losses.mean().backward()
    assert output.metrics["loss:sum"] == pytest.approx(losses.mean().item(), rel=1e-5)
    compare_gradients(run, model)
    logprobs = [record["logprobs"] for record in output.loss_fn_outputs]
    metrics = pair_metrics(loss, data, used, logprobs)
    assert metrics["dpo_loss"] == pytest.approx(losses.mean().item(), rel=1e-5)


def as_peft(run, folder, tmp_path):
    """The run's adapter as peft files, loaded onto a plain model."""
    config = json.dumps(run.adapter.peft_config(str(folder)))
    (tmp_path / "adapter_config.json").write_text(config)
    tensors = {name: t.detach().contiguous() for name, t in run.adapter.parameters().items()}
    save_file(tensors, str(tmp_path / "adapter_model.safetensors"))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return PeftModel.from_pretrained(plain, str(tmp_path), is_trainable=True).eval()


def compare_gradients(run, model):
    """Relative error of the whole gradient, and of no tensor alone more than ten times as much."""
    plain = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert set(plain) == set(run._gradients)
    wrong = sum(float((run._gradients[n] - g).square().sum()) for n, g in plain.items())
    size = sum(float(g.square().sum()) for g in plain.values())
    assert math.sqrt(wrong / size) < 1e-5


def test_metrics_of_known_rewards():
    data = make_pairs(4)
    logprobs = [np.zeros(datum.model_input.length) for datum in data]
    # log-ratios 2 and 1; 1 and 3; equal; 4 and 0
    reference = np.array([-2.0, -1.0, -1.0, -3.0, -5.0, -5.0, -4.0, 0.0])
    metrics = pair_metrics(PairLoss(beta=0.5), data, reference, logprobs)
    assert metrics["accuracy"] == pytest.approx((1 + 0 + 0.5 + 1) / 4)
    assert metrics["margin"] == pytest.approx((0.5 - 1 + 0 + 2) / 4)
    assert metrics["chosen_reward"] == pytest.approx((1 + 0.5 + 2.5 + 2) / 4)
    assert metrics["rejected_reward"] == pytest.approx((0.5 + 1.5 + 2.5 + 0) / 4)


def test_the_loss_is_a_sum_over_pairs():
    data = make_pairs(3)
    logprobs = [torch.full((d.model_input.length,), -1.0, requires_grad=True) for d in data]
    objective = PairObjective(PairLoss(), data, np.zeros(len(data)))
    whole, _ = objective(data, logprobs)
    parts = [objective(data[i : i + 2], logprobs[i : i + 2])[0] for i in (0, 2, 4)]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item())


def test_the_loss_of_log_probabilities_has_the_gradient_of_plain_torch():
    torch.manual_seed(0)
    policy = torch.randn(8, requires_grad=True)
    reference = torch.randn(8)
    sides = [[*values[start::2]] for values in (policy, reference) for start in (0, 1)]
    loss, metrics = compute_dpo_loss(*sides, dpo_beta=0.3)
    loss.backward()
    again = policy.detach().clone().requires_grad_()
    expected = plain_loss("dpo", again, reference, 0.3).mean()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item())
    assert metrics["dpo_loss"] == pytest.approx(expected.item())
    torch.testing.assert_close(policy.grad, again.grad)
    rewards = 0.3 * (policy - reference).detach()
    assert metrics["chosen_reward"] == pytest.approx(rewards[::2].mean().item())
    assert metrics["accuracy"] == (rewards[::2] > rewards[1::2]).float().mean().item()


class OneBatch:
    """The same pairs in each step."""

    def get_batch(self, index):
        return make_pairs(3, seed=4)


def test_a_loop_of_user_code_from_the_parts(service, stories_model, tmp_path, capsys):
    config = Config(
        model_name=str(stories_model),
        log_path=str(tmp_path),
        dataset_builder=SupervisedDatasetBuilder(),
        learning_rate=1e-3,
        lora_rank=4,
        eval_every=2,
    )
    policy, reference = create_dpo_clients(config, service)
    log = start_logging(tmp_path, print_metrics=False)
    evaluators = [NLLEvaluator(make_pairs(1))]
    tokenizer = get_tokenizer(str(stories_model))
    for batch in range(3):
        do_update(
            0, batch, 3, 3, config, policy, reference, evaluators, [], OneBatch(), log,
            str(tmp_path), tokenizer,
        )  # fmt: skip
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [row["dpo_loss"] for row in rows]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[2] < losses[1] < losses[0]
    assert ["test/nll" in row for row in rows] == [True, False, True]
    assert [row["learning_rate"] for row in rows] == sorted(
        (row["learning_rate"] for row in rows), reverse=True
    )
    assert "Chosen" in capsys.readouterr().out
    # A continued run has the reference that it began with.
    saved = CheckpointRecord(
        name="a", batch=3, state_path=policy.save_state("a").result().path, sampler_path=None
    )
    continued, same_reference = create_dpo_clients(config, service, saved)
    data = make_pairs(2)
    scores = [score_answers(one, data) for one in (reference, same_reference)]
    np.testing.assert_allclose(*scores, atol=1e-5)
    now = continued.save_weights_and_get_sampling_client().result()
    assert np.abs(score_answers(now, data) - scores[0]).max() > 1e-3
