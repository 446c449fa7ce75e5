"""The table of docs/scale.md: what each loop needs of a server, by its settings."""

from __future__ import annotations

import chz
import pytest

from tinker_cookbook.distillation import sdft, train_off_policy, train_on_policy
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.rl import train as rl_train
from tinker_cookbook.rl.config import AsyncConfig
from tinker_cookbook.supervised import train as supervised_train
from tinker_cookbook.training.config import TrainingConfig

ASYNC = AsyncConfig(max_steps_off_policy=1, groups_per_batch=4)


def config_of(cls: type[TrainingConfig], **settings):
    # Needs depend on settings alone, so builders of data are left out.
    required = {"dataset_builder": None, "dataset_configs": [], "max_tokens": 4}
    fields = chz.chz_fields(cls)
    given = {"log_path": "/tmp/x", "model_name": "org/model", "max_tokens": 4, **settings}
    needed = {name: value for name, value in required.items() if name in fields}
    return cls(**{k: v for k, v in {**needed, **given}.items() if k in fields})


@pytest.mark.parametrize(
    ("cls", "settings", "expected"),
    [
        (supervised_train.Config, {}, {"loss:cross_entropy"}),
        (
            supervised_train.Config,
            {"grad_clip_norm": 1.0, "train_unembed": False},
            {"loss:cross_entropy", "adam:grad_clip_norm", "lora:train_unembed"},
        ),
        (rl_train.Config, {}, {"loss:importance_sampling"}),
        (rl_train.Config, {"loss_fn": "gspo"}, {"loss:gspo"}),
        (rl_train.Config, {"loss_fn": "ppo"}, {"loss:ppo"}),
        (
            rl_train.Config,
            {"importance_ratio_cap": 2.0},
            {"loss:importance_sampling", "loss:ppo"},
        ),
        (rl_train.Config, {"async_config": ASYNC}, {"loss:stable_reinforce"}),
        (
            rl_train.Config,
            {"kl_penalty_coef": 0.1},
            {"loss:importance_sampling", "prompt_logprobs"},
        ),
        (
            train_dpo.Config,
            {},
            {"loss:cross_entropy", "custom_loss", "prompt_logprobs"},
        ),
        (train_dpo.Config, {"dpo_loss": "simpo"}, {"loss:cross_entropy", "custom_loss"}),
        (
            train_on_policy.Config,
            {},
            {"loss:importance_sampling", "prompt_logprobs"},
        ),
        (
            train_on_policy.Config,
            {"n_teacher_targets": 4},
            {"custom_loss", "topk_targets", "topk_prompt_logprobs"},
        ),
        (
            train_off_policy.Config,
            {},
            {"loss:cross_entropy", "topk_targets", "topk_prompt_logprobs"},
        ),
        (sdft.Config, {}, {"loss:cross_entropy", "topk_targets", "topk_prompt_logprobs"}),
        (
            sdft.Config,
            {"reverse": True},
            {"loss:cross_entropy", "topk_targets", "topk_prompt_logprobs", "custom_loss"},
        ),
    ],
)
def test_needs_of_each_loop(cls, settings, expected):
    needs = config_of(cls, **settings).server_needs()
    assert {need.feature for need in needs} == expected
