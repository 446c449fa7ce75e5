"""The loop learns: rewards rise where they depend on the answer, and not where they do not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from naming_task import NamingDatasetBuilder
from tiny_model import make_tiny_model

from tinker_cookbook.rl import train

pytestmark = pytest.mark.slow

OPENINGS = [
    "Once upon a time, there was a little",
    "One day, Lily went to the park and saw a",
    "Tom was in the garden with his",
    "Mom said: look, there is a",
    "Ben and Mia wanted to play with the",
    "In the house there lived a small",
    "The sun was warm. On the grass sat a",
    "Sue had a new friend. It was a",
]
STORIES = {"words": ["dog", "cat"], "openings": OPENINGS}
LETTERS = {"words": ["z"], "openings": ["a", "b", "c", "d"], "groups_per_batch": 4}


def learn(model: str, log_path: Path, data: dict, **settings) -> list[dict]:
    """Trains; gives the rows of ``metrics.jsonl``."""
    config = train.Config(
        recipe_name="naming",
        model_name=model,
        log_path=str(log_path),
        dataset_builder=NamingDatasetBuilder(model=model, **data),
        backend="local",
        device="cpu",
        dtype="float32",
        save_every=0,
        **settings,
    )
    asyncio.run(train.main(config))
    lines = (log_path / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "env/all/named" in row]


def curve(rows: list[dict]) -> list[float]:
    return [row["env/all/named"] for row in rows]


def test_a_story_model_learns_to_name_a_dog_or_a_cat(stories_model, tmp_path):
    rows = learn(
        stories_model,
        tmp_path,
        {**STORIES, "num_batches": 7},
        max_tokens=48,
        learning_rate=2e-3,
    )
    found = curve(rows)
    assert found[0] < 0.2
    assert found[-1] >= 0.9, found
    assert [row["env/all/reward/total"] for row in rows] == found


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_a_model_of_noise_learns_to_say_a_letter(tiny_model, tmp_path):
    rows = learn(
        tiny_model, tmp_path, {**LETTERS, "num_batches": 9}, max_tokens=16, learning_rate=0.02
    )
    found = curve(rows)
    assert found[0] < 0.3
    assert found[-1] >= 0.9, found
    # Sampler and trainer are one model: they agree to rounding error.
    assert abs(rows[0]["optim/kl_sample_train_v1"]) < 1e-4


def test_noise_paid_by_lot_stays_noise(tiny_model, tmp_path):
    data = {**LETTERS, "num_batches": 9, "random_rewards": True}
    found = curve(learn(tiny_model, tmp_path, data, max_tokens=16, learning_rate=0.02))
    assert max(found) < 0.3, found
