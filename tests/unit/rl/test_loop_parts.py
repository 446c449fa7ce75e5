"""Parts of a training loop for user code."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import tinker
from trajectory_samples import action, episode, group, group_of_rewards, turn

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages


async def done(value):
    return value


@dataclass
class Client:
    """Notes in which order it is asked."""

    asked: list = field(default_factory=list)

    def forward_backward(self, data, loss_fn, loss_fn_config=None):
        assert all("mask" not in datum.loss_fn_inputs for datum in data)
        self.asked.append(len(data))
        outputs = [{"logprobs": datum.loss_fn_inputs["advantages"]} for datum in data]
        return done(SimpleNamespace(loss_fn_outputs=outputs, metrics={}))

    def optim_step(self, adam):
        self.asked.append(adam.learning_rate)
        return done(SimpleNamespace(metrics={"norm": float(len(self.asked))}))

    async def save_weights_and_get_sampling_client(self, **options):
        self.asked.append(options)
        return "sampler"

    def create_sampling_client(self, path):
        return path


def data():
    groups = [group_of_rewards(1, 0), group_of_rewards(0, 1)]
    return assemble_training_data(groups, compute_advantages(groups))[0]


def test_a_step_is_submitted_as_a_whole_and_gives_the_logprobs_in_order():
    client, metrics, given = Client(), {}, data()
    logprobs = asyncio.run(
        train.train_step(given, client, 0.5, 2, "importance_sampling", metrics=metrics)
    )
    half = len(given) // 2
    assert client.asked == [half, 0.5, len(given) - half, 0.5]
    assert metrics == {"optim/norm": 4.0}
    for got, datum in zip(logprobs, given, strict=True):
        np.testing.assert_array_equal(got, datum.loss_fn_inputs["advantages"].to_numpy())
    assert asyncio.run(train.train_step([], client, 0.5, 2, "ppo")) == []
    with pytest.raises(ConfigurationError, match="num_substeps: got 0"):
        asyncio.run(train.train_step(given, client, 0.5, 0, "ppo"))


def test_a_due_checkpoint_is_saved_before_the_client_is_made():
    saved = []

    class Manager:
        def should_save_periodic(self, step):
            return step % 2 == 0

        async def save_periodic_async(self, step, state):
            saved.append((step, state))
            return {"sampler_path": f"tinker://run/sampler_weights/{step:06d}"}

    async def run():
        client = Client()
        for step in range(4):
            found = await train.save_checkpoint_and_get_sampling_client(client, Manager(), step)
            # A checkpoint holds the weights for sampling, so they are not saved a second time.
            path = f"tinker://run/sampler_weights/{step:06d}"
            assert found == (path if step == 2 else "sampler", {})
        assert len(client.asked) == 3

    asyncio.run(run())
    assert saved == [(2, {"batch": 2})]


def test_evaluators_run_together_and_their_metrics_are_one():
    async def one(client):
        return {"a": 1.0, "client": client}

    async def two(client):
        return {"b": 2.0}

    found = asyncio.run(train.run_evaluations_parallel([one, two], "sampler", None, 3))
    assert found == {"a": 1.0, "b": 2.0, "client": "sampler"}
    results = asyncio.run(train.gather_with_progress([done(i) for i in range(3)], "x"))
    assert results == [0, 1, 2]
    assert tinker.AdamParams().beta1 == 0.9


class Words:
    """A tokenizer that names each token by its number."""

    def decode(self, tokens, **_):
        return " ".join(f"t{token}" for token in tokens)


def test_a_minibatch_is_data_metrics_and_tokens(capsys):
    long = episode(
        turn([1], action([2, 3]), done=False),
        turn([1, 2, 3, 4], action([5], prompt_cache_hit_tokens=3), 1.0),
    )
    groups = [group(long, episode(turn([1], action([7]))), final=[0.0, 0.0])]
    builders = [SimpleNamespace(logging_tags=lambda: ["a"])]
    given, metrics, usage = asyncio.run(
        train.prepare_minibatch(builders, groups, Words(), None, 0.1, 0.0)
    )
    expected = assemble_training_data(groups, compute_advantages(groups))[0]
    assert [datum.model_input.to_ints() for datum in given] == [
        datum.model_input.to_ints() for datum in expected
    ]
    assert metrics["env/all/reward/total"] == 0.5
    assert (usage.sampled, usage.prefill_cached, usage.prefill_uncached) == (4, 3, 3)
    assert train.training_usage(given).trained == sum(d.model_input.length for d in given)
    shown = capsys.readouterr().out
    assert shown.index("trajectory 1, reward 0") < shown.index("trajectory 0, reward 1")
