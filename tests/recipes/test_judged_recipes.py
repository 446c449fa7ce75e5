"""Recipes with judges and numerics, to their end on small models (under 30 s)."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_model import make_tiny_model

from tinker_cookbook.recipes.rl_numerics_check import train as numerics
from tinker_cookbook.recipes.rubric import train as rubric
from tinker_cookbook.recipes.rubric import train_judge
from tinker_cookbook.recipes.start import example_data

pytestmark = pytest.mark.slow


def settings(model: str, log_path: Path, **more: Any) -> dict[str, Any]:
    common = {"renderer_name": "role_colon", "backend": "local", "device": "cpu"}
    common |= {"dtype": "float32", "save_every": 0, "behavior_if_log_dir_exists": "raise"}
    return {**common, "model_name": model, "log_path": str(log_path), **more}


def rows(log_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]


def test_a_judge_is_trained_measured_and_grades_a_run(stories_model, tmp_path, capsys):
    """15 s. That such a run learns, in minutes, is in docs/environments.md."""
    few = tmp_path / "labelled.jsonl"
    few.write_text("\n".join(example_data("rubric_labelled.jsonl").read_text().splitlines()[:8]))
    judge = settings(stories_model, tmp_path / "judge", max_steps=2, learning_rate=3e-3)
    asyncio.run(train_judge.main(train_judge.CLIConfig(**judge, test_path=str(few))))
    shown = capsys.readouterr().out
    assert "On held-out labels:\n  judged 16 labelled answers" in shown
    path = re.findall(r"grader_model_path=(\S+)", shown)[-1]
    policy = settings(stories_model, tmp_path / "policy", max_steps=2, max_tokens=16, eval_every=0)
    policy |= {"grader_model_path": path, "labelled_path": str(few), "group_size": 4}
    asyncio.run(rubric.main(rubric.CLIConfig(**policy)))
    shown = capsys.readouterr().out
    assert f"Judge: {path}, mode=labels\n  judged 16 labelled answers" in shown
    steps = [row for row in rows(tmp_path / "policy") if "env/all/rubric_score" in row]
    assert len(steps) == 2
    assert all(0 < step["env/all/rubric_score"] < 1 for step in steps)
    assert all(step["env/all/by_group/frac_mixed"] == 1 for step in steps)


def test_sampler_and_trainer_agree_at_every_depth(tmp_path):
    """10 s: eight turns, 3,700 tokens."""
    model = Path(make_tiny_model(tmp_path / "tiny"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    run = settings(
        str(model),
        tmp_path / "run",
        task=numerics.CountingTaskConfig(
            num_pages_min=8, num_pages_max=8, page_chars=350, require_tool_calls=False
        ),
        group_size=4,
        groups_per_batch=2,
        max_tokens=16,
        max_steps=2,
        learning_rate=1e-3,
        random_rewards=True,
        kl_depth_edges=(1024, 2048),
    )
    asyncio.run(numerics.main(numerics.CLIConfig(**run)))
    steps = [row for row in rows(tmp_path / "run") if "optim/kl_sample_train_v1" in row]
    assert len(steps) == 2
    for step in steps:
        assert step["env/all/turns_per_episode"] == 8
        for depth in ("0_1024", "1024_2048", "2048_up"):
            assert step[f"optim/kl_tokens/{depth}"] > 100
            assert abs(step[f"optim/kl_sample_train_v1/{depth}"]) < 1e-5
            assert step[f"optim/kl_sample_train_v2/{depth}"] < 1e-8
