"""What goes wrong in an RL run: it is named, counted, and costs no more than it must."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from animal_stories import StoryGroupBuilder, story_config
from train_runs import adapter, run

from tinker_cookbook.exceptions import BackendError, DataValidationError, TinkerCookbookError
from tinker_cookbook.rl.rollouts.strategy import MinViableGroup


def test_a_reward_that_is_no_number_ends_the_run_with_its_place(stories_model, tmp_path):
    with pytest.raises(DataValidationError, match=r"StoryEnv.*reward is nan"):
        run(story_config(stories_model, tmp_path, {"reward_for": "nan"}))


def test_an_environment_that_raises_is_named(stories_model, tmp_path):
    with pytest.raises(TinkerCookbookError, match=r"StoryEnv.*the judge is away"):
        run(story_config(stories_model, tmp_path, {"reward_for": "error"}))


def test_groups_that_cannot_be_played_are_left_out_and_counted(
    stories_model, tmp_path, monkeypatch
):
    original = StoryGroupBuilder.make_envs

    async def make_envs(self):
        if self.tag == "opening_1":
            raise OSError("no room")
        return await original(self)

    monkeypatch.setattr(StoryGroupBuilder, "make_envs", make_envs)
    config = story_config(
        stories_model,
        tmp_path,
        {"num_batches": 2, "reward_for": "length"},
        rollout_error_tolerance=MinViableGroup(max_retries=0),
        num_substeps=2,
    )
    found = run(config)
    assert [row["rollout_errors/groups_skipped"] for row in found] == [1, 1]
    assert [row["env/all/total_episodes"] for row in found] == [12, 12]
    assert [row["optim/num_steps"] for row in found] == [2, 2]


def test_where_no_group_can_be_played_the_run_ends(stories_model, tmp_path):
    config = story_config(
        stories_model,
        tmp_path,
        {"reward_for": "error"},
        rollout_error_tolerance=MinViableGroup(max_retries=0),
    )
    with pytest.raises(TinkerCookbookError, match="all 4 groups failed"):
        run(config)


@pytest.mark.parametrize("how", ["the request is refused", "the request is dropped"])
def test_a_sampling_client_whose_model_was_unloaded(stories_model, tmp_path, monkeypatch, how):
    from tinker_cookbook.backends.local_sampling import LocalSamplingClient

    original = LocalSamplingClient.sample

    def sample(self, *args, **kwargs):
        if how == "the request is refused":
            raise LookupError("404: no such model")
        answer = original(self, *args, **kwargs)
        self._engine.close(wait=False)
        return answer

    monkeypatch.setattr(LocalSamplingClient, "sample", sample)
    with pytest.raises(BackendError) as error:
        run(story_config(stories_model, tmp_path))
    assert "weights after 0 updates" in str(error.value)
    assert "unloaded" in str(error.value)


def test_what_was_played_before_an_error_can_be_read(stories_model, tmp_path, monkeypatch):
    original = StoryGroupBuilder.compute_group_rewards

    async def compute_group_rewards(self, trajectories, envs):
        if self.tag == "opening_3":
            await asyncio.sleep(0.5)
            raise OSError("the judge is away")
        return await original(self, trajectories, envs)

    monkeypatch.setattr(StoryGroupBuilder, "compute_group_rewards", compute_group_rewards)
    with pytest.raises(TinkerCookbookError, match="the judge is away"):
        run(story_config(stories_model, tmp_path))
    text = (tmp_path / "iteration_000000" / "train_rollout_summaries.jsonl").read_text()
    groups = {tuple(json.loads(line)["tags"]) for line in text.splitlines()}
    assert groups == {("opening_0",), ("opening_1",), ("opening_2",)}


def test_equal_rewards_train_nothing_and_are_said(stories_model, tmp_path, caplog):
    config = story_config(
        stories_model, tmp_path, {"num_batches": 2, "reward_for": "constant"}, save_every=1
    )
    with caplog.at_level(logging.WARNING):
        found = run(config)
    assert [row["step"] for row in found] == [1, 2]
    for row in found:
        assert row["optim/num_steps"] == 0
        assert row["tokens/trained"] == 0
        assert row["env/all/by_group/frac_all_bad"] == 1.0
        assert row["optim/entropy"] > 0
        assert "optim/kl_sample_train_v1" not in row
    assert any("step 1:" in record.message for record in caplog.records)
    # B of a fresh LoRA adapter is zero, and stays so.
    assert all(not t.any() for name, t in adapter(tmp_path).items() if "lora_B" in name)


def test_a_group_of_one_is_said(stories_model, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        found = run(story_config(stories_model, tmp_path, {"num_batches": 1, "group_size": 1}))
    assert found[-1]["optim/num_steps"] == 0
    assert any("single sample" in record.message for record in caplog.records)
