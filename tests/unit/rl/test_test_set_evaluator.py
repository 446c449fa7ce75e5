"""The evaluator plays a whole test set, with the real small model where sampling matters."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import tinker

from tinker_cookbook.backends import connect
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.exceptions import (
    AllTrajectoriesFailedError,
    DataValidationError,
)
from tinker_cookbook.official import rl_metric_util
from tinker_cookbook.official.rl_rollout_logging import RolloutSummaryExportConfig
from tinker_cookbook.rl.metric_util import RLTestSetEvaluator, compute_trajectory_metrics
from tinker_cookbook.rl.rollouts.group import do_group_rollout
from tinker_cookbook.rl.rollouts.strategy import MinViableGroup
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, StepResult
from tinker_cookbook.stores import LocalStorage, TrainingRunStore


class Story(Env):
    """One turn; the reward is the mean token id, scaled."""

    def __init__(self, tokens, watch):
        self.tokens, self.watch = tokens, watch

    async def initial_observation(self):
        self.watch.enter()
        return tinker.ModelInput.from_ints(self.tokens), [0]

    async def step(self, action):
        self.watch.leave()
        if self.watch.fails(self.tokens):
            raise KeyError("broken problem")
        await self.watch.turn_of(self.tokens[-1])
        reward = float(np.mean(action)) / 777
        return StepResult(reward, True, tinker.ModelInput.empty(), [], metrics={"again": reward})


class Watch:
    """How many episodes play at once, and which problems fail."""

    def __init__(self, failing=(), backwards_from=None):
        self.playing, self.most, self.failing = 0, 0, failing
        self.ended, self.backwards_from = asyncio.Condition(), backwards_from
        self.threads = set()

    def enter(self):
        self.threads.add(threading.current_thread().name)
        self.playing += 1
        self.most = max(self.most, self.playing)

    def leave(self):
        self.playing -= 1

    async def turn_of(self, number):
        """Lets problems end from the last to the first, if asked to."""
        if self.backwards_from is not None:
            async with self.ended:
                await self.ended.wait_for(lambda: number >= self.backwards_from)
                self.backwards_from = min(self.backwards_from, number - 1)
                self.ended.notify_all()

    def fails(self, tokens):
        return tokens[-1] in self.failing


class Builder(EnvGroupBuilder):
    def __init__(self, tokens, size, watch, tags):
        self.tokens, self.size, self.watch, self.tags = tokens, size, watch, tags

    async def make_envs(self):
        return [Story(self.tokens, self.watch) for _ in range(self.size)]

    def logging_tags(self):
        return self.tags


class Stories(RLDataset):
    """Batches of up to three groups: problem i ends with token 300 + i."""

    def __init__(
        self, num_groups=7, size=2, watch=None, tags=lambda i: ["even" if i % 2 == 0 else "odd"]
    ):
        self.watch = watch or Watch()
        self.builders = [
            Builder([1, 300 + i], size, self.watch, [("even", "odd")[i % 2]])
            for i in range(num_groups)
        ]
        self.threads = set()

    def get_batch(self, index):
        self.threads.add(threading.current_thread())
        return self.builders[3 * index : 3 * index + 3]

    def __len__(self):
        return -(-len(self.builders) // 3)


@pytest.fixture(scope="module")
def sampler(stories_model):
    service = connect("local", device="cpu", dtype="float32").service
    return service.create_sampling_client(base_model=stories_model).result()


def evaluate(evaluator, client):
    return asyncio.run(evaluator(client))


def test_the_whole_test_set_is_played_and_measured(sampler):
    dataset = Stories()
    evaluator = RLTestSetEvaluator(dataset, max_tokens=5, seed=1)
    metrics = evaluate(evaluator, sampler)

    async def play():
        policy = TinkerTokenCompleter(sampler, 5, seed=1)
        return [
            await do_group_rollout(builder, policy.derived(i))
            for i, builder in enumerate(dataset.builders)
        ]

    # Any policy can be evaluated.
    policy = TinkerTokenCompleter(sampler, 5, seed=1)
    assert asyncio.run(evaluator.eval_token_completer(policy)) == metrics

    groups = asyncio.run(play())
    tags = [builder.logging_tags() for builder in dataset.builders]
    expected = compute_trajectory_metrics(groups, tags)
    cached = "total_cached_ob_tokens"  # depends on what was sampled before
    assert {k: v for k, v in metrics.items() if not k.endswith(cached)} == {
        f"test/{k}": v for k, v in expected.items() if not k.endswith(cached)
    }
    assert metrics["test/env/all/total_episodes"] == 14
    assert metrics["test/env/odd/total_episodes"] == 6
    assert 0 < metrics["test/env/all/reward/total"] < 1
    assert metrics["test/env/all/again"] == pytest.approx(metrics["test/env/all/reward/total"])
    # Batches are built in threads, off the loop that drives sampling.
    assert dataset.threads
    assert threading.main_thread() not in dataset.threads


def test_episodes_are_written_to_a_store(sampler, tmp_path):
    dataset, store = Stories(), TrainingRunStore(LocalStorage(tmp_path))
    names = RolloutSummaryExportConfig("eval/test", 7, "eval_test", sampling_client_step=3)
    evaluator = rl_metric_util.RLTestSetEvaluator(dataset, max_tokens=2, seed=0)
    metrics = asyncio.run(evaluator(sampler, rollout_summary_export=names, store=store))
    rows = store.read_rollouts(7, "eval_test")
    assert [row["group_idx"] for row in rows] == sorted(row["group_idx"] for row in rows)
    assert {row["sampling_client_step"] for row in rows} == {3}
    assert metrics["test/env/all/reward/total"] == pytest.approx(
        np.mean([row["total_reward"] for row in rows])
    )


def test_failures_end_the_evaluation_unless_they_are_tolerated(sampler):
    def dataset():
        return Stories(watch=Watch(failing=(301,)))

    with pytest.raises(Exception, match="broken problem"):
        evaluate(RLTestSetEvaluator(dataset(), max_tokens=2), sampler)
    tolerant = RLTestSetEvaluator(dataset(), 2, strategy=MinViableGroup(max_retries=0))
    metrics = evaluate(tolerant, sampler)
    assert metrics["test/env/all/total_episodes"] == 12
    assert metrics["test/rollout_errors/groups_skipped"] == 1
    hopeless = Stories(2, watch=Watch(failing=(300, 301)))
    none = RLTestSetEvaluator(hopeless, 2, strategy=MinViableGroup(max_retries=0))
    with pytest.raises(AllTrajectoriesFailedError, match="test: none of 2 groups succeeded"):
        evaluate(none, sampler)


def test_what_cannot_be_played_is_said(sampler):
    with pytest.raises(DataValidationError, match="test dataset: got no group in 0 batches"):
        evaluate(RLTestSetEvaluator(Stories(0), max_tokens=2), sampler)
