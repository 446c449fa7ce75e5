"""What a run asks of a server that implements a part of the protocol (about 10 s).

The server has what SkyRL was recorded to have.
"""

from __future__ import annotations

import asyncio
import json

import chz
import pytest
from restricted_server import restricted_server

from recipes import rl_basic, rl_loop, sl_loop
from tinker_cookbook.backends import connect, server_probe
from tinker_cookbook.backends.server_probe import ServerProbe
from tinker_cookbook.exceptions import BackendError
from tinker_cookbook.rl.config import AsyncConfig
from tinker_cookbook.training.server_needs import Need, ServerCheck


@pytest.fixture(scope="module")
def server(stories_model, tmp_path_factory):
    with restricted_server(stories_model, tmp_path_factory.mktemp("restricted")) as running:
        yield running


@pytest.fixture
def remote(server, stories_model, monkeypatch, tmp_path):
    """Settings of a recipe on the server."""
    monkeypatch.setenv("TINKER_API_KEY", server.key)
    return {
        "backend": server.url,
        "model_name": stories_model,
        "renderer_name": "role_colon",
        "log_path": str(tmp_path / "run"),
        "lora_rank": 4,
        "max_steps": 2,
        "eval_every": 0,
    }


def rl(remote, **settings):
    few = {"groups_per_batch": 2, "group_size": 2, "num_test": 0, "max_tokens": 4}
    config = rl_basic.CLIConfig(**remote, **few)
    return chz.replace(config.resolved(), **settings)


def run_rl(config):
    from tinker_cookbook.rl import train

    asyncio.run(train.main(config))


def test_a_run_of_rl_on_a_server_with_a_part_of_the_protocol(server, remote, capsys):
    before = server.optim_steps
    config = rl(remote)
    run_rl(config)
    assert "learning_rate found on another backend may not fit" in capsys.readouterr().out
    # Both steps sampled through an SDK that expects the ids which this server does not send.
    with open(f"{config.log_path}/metrics.jsonl") as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == 2
    assert server.optim_steps - before <= 2  # a batch of equal rewards has no step


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kl_penalty_coef": 0.1}, r"kl_penalty_coef=0.1 needs log-probabilities of prompts \(.*"),
        ({"loss_fn": "ppo", "num_substeps": 2}, "loss_fn=ppo needs the loss ppo .*Set loss_fn="),
        ({"loss_fn": "gspo"}, "loss_fn=gspo needs the loss gspo"),
        (
            {
                "async_config": AsyncConfig(max_steps_off_policy=2, groups_per_batch=2),
                "loss_normalization": "sum",
            },
            "async_config.loss_fn=stable_reinforce needs",
        ),
        ({"grad_clip_norm": 1.0}, "AdamParams have no grad_clip_norm, which it would ignore"),
        ({"train_mlp": False}, "train_mlp=False needs the choice of adapted layers"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_missing_ends_the_run_before_its_first_step(server, remote, settings, expected):
    if "kl_penalty_coef" in settings:
        from tinker_cookbook.rl.config import KLReferenceConfig

        settings["kl_reference_config"] = KLReferenceConfig(base_model=remote["model_name"])
    before = server.optim_steps
    with pytest.raises(BackendError, match=expected) as error:
        run_rl(rl(remote, **settings))
    assert str(error.value).count(". ") == 1  # one sentence, and the advice
    assert server.optim_steps == before


def own_loop(recipe, config_class, remote, **settings):
    known = chz.chz_fields(config_class)
    recipe.main(config_class(**{k: v for k, v in remote.items() if k in known}, **settings))


def test_short_loops_ask_too(server, remote, caplog):
    before = server.optim_steps
    with caplog.at_level("INFO"):
        own_loop(sl_loop, sl_loop.Config, remote, batch_size=2, max_length=64)
    assert server.optim_steps == before + 2
    assert "checking the features of the server at" in caplog.text
    assert "reports no summed loss" in caplog.text


@pytest.mark.parametrize(
    ("recipe", "config_class", "settings", "expected"),
    [
        (rl_loop, rl_loop.Config, {"loss_fn": "ppo"}, "loss_fn=ppo needs .*Set loss_fn=imp"),
        (rl_loop, rl_loop.Config, {"model_name": "tiny"}, "model_name: got tiny, but the server"),
    ],
)
def test_a_short_loop_is_refused_before_its_first_step(
    server, remote, recipe, config_class, settings, expected, monkeypatch
):
    monkeypatch.setattr(recipe, "train", lambda *_: pytest.fail("it trained"))
    monkeypatch.setattr(recipe, "check_model", lambda config: None)
    if recipe is rl_loop:
        settings = {"learning_rate": 1e-4, "num_steps": 1, **settings}
    before = server.optim_steps
    with pytest.raises(BackendError, match=expected):
        own_loop(recipe, config_class, {**remote, **settings})
    assert server.optim_steps == before


def test_each_feature_is_asked_for(server, remote):
    features = {
        "loss:cross_entropy": None,
        "loss:importance_sampling": None,
        "loss:cispo": "not supported",
        "loss:dro": "not supported",
        "custom_loss": "does not report loss:sum",
        "topk_targets": None,
        "prompt_logprobs": "",
        "topk_prompt_logprobs": "no most probable tokens",
        "lora:train_unembed": "LoRAConfig have no train_unembed",
    }

    async def ask(connection):
        probe = ServerProbe(server.url, connection.service, remote["model_name"])
        probe.client = await connection.service.create_lora_training_client(probe.model_name, 4)
        return {feature: await probe.lacks(feature) for feature in features}

    with connect(server.url) as connection:
        found = asyncio.run(ask(connection))
    for feature, expected in features.items():
        assert (found[feature] is None) == (expected is None), found
        assert expected is None or expected in found[feature]


def test_our_own_server_and_the_local_engine_are_not_asked(server, remote, monkeypatch):
    monkeypatch.setattr(server_probe, "_get_json", lambda url: {"server": "tinker_cookbook"})
    need = [Need("loss:none", "a")]
    with connect(server.url) as connection:
        check = ServerCheck(connection, "org/other")
        asyncio.run(check.check_model())
        asyncio.run(check.check_needs(None, need))
        assert check.lines == []
    with connect("local", device="cpu") as connection:
        asyncio.run(ServerCheck(connection, "org/other").check_needs(None, need))
        connection.service.close()
