"""Recorded runs of recipes, of which random groups are sampled again: all are identical.

Costs about 15 s for each recipe. ``REPLAYS=20`` in the environment repeats the study, whose table
is in ``docs/replay.md``.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

import pytest
from recipe_runs import RecipeRuns

from recipes.tiny_models.vlm import RENDERER, make_tiny_vlm
from recipes.vision_rl.pictures import texts
from tinker_cookbook.record.read import open_record
from tinker_cookbook.replay.command import ReplaySettings, compare

pytestmark = pytest.mark.slow

REPLAYS = int(os.environ.get("REPLAYS", "3"))
# Models that know nothing get random rewards, so that there is something to train.
TINY = (
    "groups_per_batch=4 group_size=4 max_steps=6 save_every=3 num_test=2 random_rewards=True "
    "learning_rate=0.003"
)
TOOLS = f"model_name=tiny tiny_steps=1 renderer_name=qwen3_instruct {TINY}"
RUNS = {
    "pairs": (
        "recipes.preference.shorter.train",
        "groups_per_batch=4 max_tokens=16 learning_rate=0.003 max_steps=6 save_every=4 "
        "test_group_size=2",
    ),
    "distillation": (
        "recipes.distillation.on_policy_distillation",
        "groups_per_batch=4 group_size=4 max_tokens=12 learning_rate=0.003 max_steps=6 "
        "save_every=3",
    ),
    "tools": ("recipes.tool_use.train", f"{TOOLS} num_substeps=2"),
    "asynchronous": ("recipes.tool_use.train", f"{TOOLS} max_steps_off_policy=2"),
    "pictures": ("recipes.vision_rl.train", f"renderer_name={RENDERER} train_vision=True {TINY}"),
}


@pytest.mark.parametrize("name", list(RUNS))
def test_random_groups_are_identical(name, stories_model, tmp_path, monkeypatch):
    recipe, options = RUNS[name]
    if name == "pictures":
        make_tiny_vlm(str(tmp_path / "model"), texts())
        options = f"model_name={tmp_path / 'model'} {options}"
    runs = RecipeRuns(tmp_path, stories_model, recipe, f"backend=local {options}")
    done = runs.execute([recipe, *runs.words("run")])
    assert done.returncode == 0, done.stderr[-3000:]
    assert sum(row.get("optim/num_steps", 0) for row in runs.rows("run")) >= 5
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", runs.environment()["TINKER_COOKBOOK_HOME"])
    folder = Path(runs.folder / "run")
    record = open_record(folder)
    pairs = {
        (step, group)
        for step, splits in record.steps().items()
        if "train" in splits
        for group in record.table(step, columns=["group"])["group"].to_pylist()  # type: ignore[index]
    }
    chosen = random.Random(39).sample(sorted(pairs), min(REPLAYS, len(pairs)))
    turns = tokens = 0
    for step, group in chosen:
        result = asyncio.run(compare(ReplaySettings(run=str(folder), step=step, group=group)))
        assert result.compared
        assert result.identical, (step, group, list(result.lines()))
        turns += len(result.compared)
        tokens += sum(len(one.tokens[0]) for one in result.compared)
    print(f"{name}: {len(chosen)} replays, {turns} turns, {tokens} tokens", file=sys.stderr)
    update = asyncio.run(compare(ReplaySettings(run=str(folder), step=6, what="update")))
    assert update.identical, list(update.lines())
