"""Settings of an RL run: each that cannot work is refused before anything is loaded."""

from __future__ import annotations

import asyncio

import chz
import pytest
from animal_stories import StoryDataset, StoryDatasetBuilder, story_config

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.train import AsyncConfig, StreamMinibatchConfig

ASYNC = AsyncConfig(max_steps_off_policy=1, groups_per_batch=4)
STREAM = StreamMinibatchConfig(groups_per_batch=4, num_minibatches=2)


def test_the_defaults_pass_and_are_the_public_ones(stories_model, tmp_path):
    config = story_config(stories_model, tmp_path)
    config.check()
    assert config.lr_schedule == "constant"
    assert config.loss_fn == "importance_sampling"
    assert (config.eval_every, config.num_substeps, config.temperature) == (20, 1, 1.0)
    assert (config.top_p, config.top_k, config.seed) == (1.0, -1, 0)
    assert (config.num_groups_to_log, config.rollout_json_export) == (4, True)
    assert (config.kl_penalty_coef, config.kl_reference_config) == (0.0, None)


WRONG = [
    ({"kl_penalty_coef": 0.1}, "kl_reference_config"),
    ({"kl_penalty_coef": -0.1}, "kl_penalty_coef"),
    ({"kl_discount_factor": 1.5}, "kl_discount_factor"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 512}, "max_tokens: got 512, but the context"),
    ({"temperature": 0.0}, "temperature: got 0"),
    ({"temperature": float("nan")}, "temperature"),
    ({"eval_temperature": -1.0}, "eval_temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_k": 0}, "top_k"),
    ({"num_substeps": 0}, "num_substeps"),
    ({"loss_fn": "pp0"}, "did you mean 'ppo'"),
    ({"loss_fn": "cross_entropy"}, "loss_fn: got 'cross_entropy'"),
    ({"loss_normalization": "token"}, "did you mean 'tokens'"),
    ({"loss_normalization": "tokens", "async_config": ASYNC}, "the loss stable_reinforce"),
    (
        {"loss_normalization": "tokens", "stream_minibatch_config": STREAM},
        "with stream_minibatch_config",
    ),
    ({"loss_fn": "ppo", "async_config": ASYNC}, "async_config.loss_fn=ppo"),
    (
        {"async_config": ASYNC, "kl_penalty_coef": 0.1, "kl_discount_factor": 0.9},
        "kl_discount_factor: got 0.9 with loss_fn='stable_reinforce'",
    ),
    ({"loss_fn": "dro"}, "beta"),
    ({"loss_fn": "ppo", "loss_fn_config": {"clip": 0.2}}, "loss_fn_config['clip']"),
    ({"async_config": chz.replace(ASYNC, loss_fn="gspo")}, "clip_low_threshold"),
    ({"async_config": ASYNC, "num_substeps": 3}, "async_config.groups_per_batch is 4"),
    ({"stream_minibatch_config": STREAM, "num_substeps": 3}, "multiple of num_substeps"),
    ({"warmup_steps": -1}, "warmup_steps"),
    ({"renderer_name": "qwen33"}, "qwen33"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=[str(w[0])[:60] for w in WRONG])
def test_invalid_settings_are_refused(stories_model, tmp_path, settings, message):
    with pytest.raises(ConfigurationError) as error:
        story_config(stories_model, tmp_path, **settings).check()
    assert message in str(error.value)


def test_an_asynchronous_run_trains_with_the_loss_of_its_async_config(stories_model, tmp_path):
    plain = story_config(stories_model, tmp_path)
    stale = story_config(stories_model, tmp_path, async_config=ASYNC)
    named = story_config(
        stories_model, tmp_path, loss_fn="ppo", async_config=chz.replace(ASYNC, loss_fn="ppo")
    )
    for config in (plain, stale, named):
        config.check()
    losses = [config.training_loss_fn() for config in (plain, stale, named)]
    assert losses == ["importance_sampling", "stable_reinforce", "ppo"]
    assert [config.records_stability_info() for config in (plain, stale, named)] == [
        False,
        True,
        False,
    ]


def test_a_kl_penalty_without_reference_fails_before_anything_is_made(stories_model, tmp_path):
    """The public package finds out after the clients and the dataset were created."""
    config = story_config(stories_model, tmp_path / "run", kl_penalty_coef=0.1)
    config = chz.replace(config, dataset_builder=_MustNotBeBuilt(model=stories_model))
    with pytest.raises(ConfigurationError, match="KLReferenceConfig"):
        asyncio.run(train.main(config))
    assert not (tmp_path / "run").exists()


@chz.chz
class _MustNotBeBuilt(StoryDatasetBuilder):
    async def __call__(self):
        raise AssertionError("the dataset was built")


def test_the_first_batch_must_fit_the_settings(stories_model, tmp_path):
    def check(groups: int, **settings) -> int:
        config = story_config(stories_model, tmp_path, {"groups_per_batch": groups}, **settings)
        return train.check_first_batch(config, StoryDataset(config.dataset_builder))

    assert check(4, num_substeps=2) == 4
    with pytest.raises(ConfigurationError, match="num_substeps: got 3, but groups_per_batch is 4"):
        check(4, num_substeps=3)
    with pytest.raises(ConfigurationError, match="first batch has 6 groups"):
        check(6, stream_minibatch_config=STREAM)
    with pytest.raises(DataValidationError, match="batch 0 of StoryDataset is empty"):
        check(0)
    # An asynchronous run makes its own batches.
    assert check(3, async_config=ASYNC, num_substeps=2) == 3
