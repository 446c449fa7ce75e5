"""The loops over a client, a dataset and a logger of the caller, on the real engine. 5 seconds."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from animal_stories import StoryDataset, story_config

from tinker_cookbook.backends import connect
from tinker_cookbook.checkpoint_utils import CheckpointManager
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.train import AsyncConfig, StreamMinibatchConfig
from tinker_cookbook.run import ml_log
from tinker_cookbook.utils.cost_estimation import CostTracker

ASYNC = AsyncConfig(max_steps_off_policy=1, groups_per_batch=2)
STREAM = StreamMinibatchConfig(groups_per_batch=2, num_minibatches=2)


class Steps(SamplingClientEvaluator):
    async def __call__(self, sampling_client) -> dict[str, float]:
        return {"eval/clients": 1.0}


def run(loop: Any, config: train.Config, batches: int, **more: Any) -> list[dict[str, Any]]:
    """Runs a loop of the public functions; gives the rows of ``metrics.jsonl``."""
    data = config.dataset_builder

    async def go() -> None:
        service = connect("local", device="cpu", dtype="float32").service
        client = await service.create_lora_training_client(config.model_name, rank=4, seed=0)
        log = ml_log.setup_logging(config.log_path, config=config)
        manager = CheckpointManager(client, service, config.log_path, config.save_every)
        try:
            await loop(
                start_batch=more.pop("start_batch", 0),
                end_batch=batches,
                num_batches=batches,
                config=config,
                training_client=client,
                kl_reference_client=None,
                evaluators=[Steps()],
                dataset=StoryDataset(data),
                ml_logger=log,
                tokenizer=client.get_tokenizer(),
                checkpoint_mgr=manager,
                **more,
            )
        finally:
            log.close()

    asyncio.run(go())
    lines = (Path(config.log_path) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def make_config(model: Any, tmp_path: Any, **settings: Any) -> train.Config:
    data = {
        "num_batches": 3, "groups_per_batch": 2, "group_size": 2,
        "reward_for": settings.pop("reward_for", "length"),
    }  # fmt: skip
    return story_config(model, tmp_path, data, **{"eval_every": 2, **settings})


def test_synchronous_rows_are_those_of_the_official_loop(stories_model, tmp_path):
    tracker = CostTracker()
    config = make_config(stories_model, tmp_path, save_every=2)
    rows = run(train.do_sync_training, config, 3, cost_tracker=tracker)
    # The row of batch i is step i; the last weights are evaluated in a row of their own.
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert ["eval/clients" in row for row in rows] == [True, False, True, True]
    trained = [row["tokens/trained"] for row in rows[:3]]
    assert all(trained)
    assert tracker.cumulative.trained == sum(trained)
    assert rows[2]["tokens/cumulative/trained"] == sum(trained)
    (saved,) = (Path(tmp_path) / "checkpoints.jsonl").read_text().splitlines()
    # The checkpoint counts the step that it holds.
    assert json.loads(saved)["batch"] == 2
    assert json.loads(saved)["cumulative_tokens"]["trained"] == sum(trained[:2])


def test_the_loops_continue_at_a_batch_and_refuse_a_missing_config(stories_model, tmp_path):
    config = make_config(stories_model, tmp_path, eval_every=0)
    assert [row["step"] for row in run(train.do_sync_training, config, 3, start_batch=2)] == [2]
    for loop, name in (
        (train.do_async_training, "async_config"),
        (train.do_sync_training_with_stream_minibatch, "stream_minibatch_config"),
    ):
        with pytest.raises(ConfigurationError, match=f"{name}: got None"):
            run(loop, config, 3)


@pytest.mark.parametrize("stream", [None, STREAM], ids=["batches", "streaming"])
def test_an_asynchronous_loop_trains_each_problem_once(stories_model, tmp_path, stream):
    config = make_config(
        stories_model, tmp_path, async_config=ASYNC, stream_minibatch_config=stream
    )
    config.check()
    rows = [r for r in run(train.do_async_training, config, 3) if "async/staleness_max" in r]
    assert [row["training_client/step"] for row in rows] == [0, 1, 2]
    assert [row["env/all/total_episodes"] for row in rows] == [4, 4, 4]
    assert max(row["async/staleness_max"] for row in rows) <= 1
