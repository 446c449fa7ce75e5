"""The RL loop, end to end on a small real model."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import chz
import numpy as np
import pytest
from animal_stories import StoryEnv, story_config
from train_runs import adapter, named_phases, rows, run, without_times

from tinker_cookbook.rl import train
from tinker_cookbook.rl.train import KLReferenceConfig, StreamMinibatchConfig


def test_policy_learns(stories_model, tmp_path):
    config = story_config(
        stories_model,
        tmp_path,
        {"num_batches": 6, "group_size": 16, "groups_per_batch": 8, "test_groups": 4},
        max_tokens=24,
        learning_rate=0.02,
        eval_every=3,
        lora_rank=8,
    )
    found = run(config)
    assert [row["step"] for row in found] == list(range(7))
    assert found[1]["reward/total"] < 0.3
    assert found[-1]["reward/total"] > 0.6
    for row in found[1:]:
        assert row["reward/total"] == row["env/all/reward/total"]
        assert row["optim/entropy"] > 0
        assert row["env/all/total_episodes"] == 128
        assert row["tokens/sampled"] == 128 * 24
        assert row["optim/lr"] == 0.02
        parts = ("sampling", "env", "grading", "train", "other")
        times = [row.get(f"time/{part}", 0.0) for part in parts]
        assert sum(times) == pytest.approx(row["time/total"], abs=0.05)
    assert abs(found[1]["optim/kl_sample_train_v1"]) < 1e-4
    assert found[1]["optim/num_steps"] == 1
    assert found[1]["optim/grad_norm"] > 0
    assert [row["progress/batch"] for row in found[1:]] == list(range(6))
    assert found[-1]["progress/done_frac"] == 1.0
    # Before training, every third iteration, and the final weights.
    evaluated = [row["step"] for row in found if "test/env/all/reward/total" in row]
    assert evaluated == [0, 3, 6]
    assert found[-1]["test/env/all/reward/total"] > 0.5


def test_transcripts_and_the_final_checkpoint_are_there(stories_model, tmp_path, monkeypatch):
    config = story_config(stories_model, tmp_path, {"num_batches": 2, "test_groups": 2})
    named = named_phases(monkeypatch)
    run(config)
    weights, step = "taking the new weights", ["sampling", "waiting for the data", "training"]
    assert named == [
        *("building the dataset", "reading the data", "connecting", "loading the model"),
        *("evaluating", weights),
        *(*step, weights, "writing transcripts", *step, weights, "writing transcripts"),
        *("evaluating", "saving a checkpoint"),
    ]
    names = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.glob("iteration_*/*"))
    assert "iteration_000000/train_logtree.json" in names
    assert "iteration_000000/eval_test_logtree.json" in names
    assert "iteration_000001/train_rollout_summaries.jsonl" in names
    assert "iteration_000002/eval_test_rollout_summaries.jsonl" in names
    lines = (tmp_path / "iteration_000001/train_rollout_summaries.jsonl").read_text().splitlines()
    episodes = [json.loads(line) for line in lines]
    assert len(episodes) == 16
    assert {episode["sampling_client_step"] for episode in episodes} == {1}
    mine = [episode for episode in episodes if episode["group_idx"] == 0]
    total = sum(episode["total_reward"] for episode in mine)
    assert mine[0]["advantage"] == pytest.approx(mine[0]["total_reward"] - total / 4)
    assert "heard:" in (tmp_path / "iteration_000000/train_logtree.json").read_text()
    line = json.loads((tmp_path / "checkpoints.jsonl").read_text())
    assert line["final"]
    assert line["batch"] == 2
    assert line["sampler_path"]


def test_substeps_are_several_optimizer_steps(stories_model, tmp_path):
    data = {"num_batches": 1, "reward_for": "length"}
    one = run(story_config(stories_model, tmp_path / "one", data))
    two = run(story_config(stories_model, tmp_path / "two", data, num_substeps=2))
    assert (one[-1]["optim/num_steps"], two[-1]["optim/num_steps"]) == (1, 2)
    assert two[-1]["step"] == 1
    assert one[-1]["reward/total"] == two[-1]["reward/total"]
    # The second substep trains with weights that did not sample its data.
    assert one[-1]["optim/kl_sample_train_v2"] < 1e-8 < two[-1]["optim/kl_sample_train_v2"]


def test_streaming_gives_the_data_and_gradients_of_synchronous(
    stories_model, tmp_path, monkeypatch
):
    """And it submits training while groups are still playing."""
    from tinker_cookbook.backends.local_training import LocalTrainingClient

    # A large eps, since Adam makes a full step of a gradient that is nothing but rounding.
    data = {"num_batches": 1, "reward_for": "length"}
    settings = {"num_substeps": 2, "adam_eps": 0.1}
    (synchronous,) = run(story_config(stories_model, tmp_path / "sync", data, **settings))

    events: list[str] = []
    original = LocalTrainingClient.forward_backward
    step = StoryEnv.step

    def forward_backward(self, data, *args):
        events.append(f"train {len(data)}")
        return original(self, data, *args)

    async def env_step(self, action):
        result = await step(self, action)
        events.append("played")
        return result

    monkeypatch.setattr(LocalTrainingClient, "forward_backward", forward_backward)
    monkeypatch.setattr(StoryEnv, "step", env_step)
    stream = StreamMinibatchConfig(groups_per_batch=4, num_minibatches=2)
    config = story_config(
        stories_model,
        tmp_path / "stream",
        {**data, "slow_seconds": 1.0},
        stream_minibatch_config=stream,
        **settings,
    )
    (streamed,) = run(config)
    # One group is slow; the other of its substep trains before it is there.
    assert events.count("train 4") == 4
    assert 0 < events[: events.index("train 4")].count("played") < 16
    assert streamed["optim/num_steps"] == synchronous["optim/num_steps"] == 2
    for name in synchronous:
        if name.startswith(("env/", "tokens/")):
            assert streamed[name] == synchronous[name], name
        elif name.startswith("optim/"):
            assert streamed[name] == pytest.approx(synchronous[name], rel=1e-3, abs=1e-6), name
    expected = adapter(tmp_path / "sync")
    for name, tensor in adapter(tmp_path / "stream").items():
        np.testing.assert_allclose(tensor, expected[name], atol=1e-6)


def test_constant_groups_are_left_out_on_request_and_measured_all_the_same(stories_model, tmp_path):
    def trained(remove: bool) -> dict:
        config = story_config(
            stories_model,
            tmp_path / str(remove),
            {"num_batches": 1, "group_size": 8},
            remove_constant_reward_groups=remove,
        )
        return run(config)[-1]

    with_all, without = trained(False), trained(True)
    mixed = without["env/all/by_group/frac_mixed"]
    assert 0 < mixed < 1
    assert without["tokens/trained"] == pytest.approx(mixed * with_all["tokens/trained"], rel=0.1)
    names = [name for name in with_all if name.startswith("env/")]
    assert {name: with_all[name] for name in names} == {name: without[name] for name in names}
    assert {f"env/opening_{i}/reward/total" for i in range(4)} <= set(names)


@pytest.mark.parametrize(
    ("loss_fn", "settings"),
    [
        ("ppo", None),
        ("cispo", None),
        ("dro", {"beta": 0.05}),
        ("gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    ],
)
def test_every_loss_trains(stories_model, tmp_path, loss_fn, settings):
    config = story_config(
        stories_model,
        tmp_path,
        {"num_batches": 1, "reward_for": "length"},
        loss_fn=loss_fn,
        loss_fn_config=settings,
        num_substeps=2,
    )
    assert run(config)[-1]["optim/grad_norm"] > 0


def test_the_optimizer_settings_reach_the_backend(stories_model, tmp_path):
    config = story_config(
        stories_model,
        tmp_path,
        {"num_batches": 4, "reward_for": "length"},
        lr_schedule="linear",
        warmup_steps=2,
        learning_rate=0.01,
        advantage_normalization="std",
        grad_clip_norm=1e-6,
        top_k=20,
        top_p=0.9,
    )
    found = run(config)
    assert [row["optim/lr"] for row in found] == pytest.approx([0.005, 0.01, 0.01, 0.005])


def test_the_mean_over_tokens_divides_the_gradient_of_a_substep_by_its_action_tokens(
    stories_model, tmp_path
):
    def first_step(normalization: str, **settings) -> dict:
        config = story_config(
            stories_model,
            tmp_path / f"{normalization}{len(settings)}",
            {"num_batches": 1, "reward_for": "length"},
            loss_normalization=normalization,
            **settings,
        )
        return run(config)[0]

    plain, divided = first_step("sum"), first_step("tokens")
    tokens = plain["env/all/total_ac_tokens"]
    assert tokens > 16
    assert divided["optim/grad_norm"] * tokens == pytest.approx(plain["optim/grad_norm"], rel=1e-4)
    assert divided["optim/kl_sample_train_v1"] == plain["optim/kl_sample_train_v1"]


def test_the_kl_penalty_pulls_towards_its_reference(stories_model, tmp_path):
    def trained(coef: float, **settings) -> list[dict]:
        config = story_config(
            stories_model,
            tmp_path / str(coef),
            {"num_batches": 3, "reward_for": "length"},
            kl_penalty_coef=coef,
            kl_reference_config=KLReferenceConfig(base_model=stories_model),
            max_tokens=6,
            **settings,
        )
        return run(config)

    free, loose = trained(0.0), trained(1e-9)
    held = trained(10.0, compute_post_kl=True)
    assert "kl_policy_base" not in free[-1]
    assert [row["reward/total"] for row in loose] == [row["reward/total"] for row in free]
    assert abs(held[0]["kl_policy_base"]) < 1e-4
    assert 0 < held[-1]["kl_policy_base"] < loose[-1]["kl_policy_base"]
    assert held[-1]["kl_pre_post_v2"] > 0


def test_a_finished_run_is_left_alone_and_can_be_made_longer(stories_model, tmp_path, capsys):
    config = story_config(stories_model, tmp_path, {"num_batches": 4}, max_steps=2)
    run(config)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    run(config)
    assert "complete" in capsys.readouterr().out
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    longer = run(chz.replace(config, max_steps=None))
    assert [row["step"] for row in longer] == [1, 2, 3, 4]
    straight = run(story_config(stories_model, tmp_path / "straight", {"num_batches": 4}))
    assert [without_times(row)["reward/total"] for row in longer] == [
        row["reward/total"] for row in straight
    ]


def test_groups_are_played_in_an_executor(stories_model, tmp_path, monkeypatch):
    seen: set[str] = set()
    original = StoryEnv.step

    async def step(self, action):
        seen.add(threading.current_thread().name.split("_")[0])
        return await original(self, action)

    monkeypatch.setattr(StoryEnv, "step", step)
    config = story_config(stories_model, tmp_path, {"num_batches": 1, "reward_for": "length"})
    with ThreadPoolExecutor(2, thread_name_prefix="pool") as pool:
        asyncio.run(train.main(config, rollout_executor=pool))
    assert seen == {"pool"}
    (row,) = rows(tmp_path)
    assert row["env/all/total_episodes"] == 16
    assert row["optim/grad_norm"] > 0
