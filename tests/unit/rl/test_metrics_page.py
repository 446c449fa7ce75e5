"""The page that explains the metrics knows each one that a run writes, and its transcripts."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from animal_stories import story_config

from tinker_cookbook.rl import train

PAGE = Path(__file__).resolve().parents[3] / "docs" / "rl-metrics.md"
FAMILIES = [  # NAME, TAG, REASON and TYPE of the page
    r"(test/)?env/all/(length|format|correct)",
    r"env/opening_\d/.+",
    r"test/env/.+",
    r"(test/)?stop/\w+",
    r"rollout_errors/\w+",
]


def known_keys() -> set[str]:
    """All keys of the page, with ``…/x`` and ``…_x`` written out."""
    keys: set[str] = set()
    for cell in re.findall(r"^\| ([^|]*) \|", PAGE.read_text(), flags=re.MULTILINE):
        last = ""
        for name in re.findall(r"`([^`]*)`", cell):
            if name.startswith("…"):
                separator = name[1]
                stem, found, _ = last.rpartition(separator)
                assert found, (name, last)
                name = stem + name[1:]
            else:
                last = name
            keys.add(name)
    return keys | {"tokens/cumulative/sampled", "tokens/cumulative/trained", "step"}


@pytest.mark.shared
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_every_metric_of_a_run_is_explained(stories_model, tmp_path: Path, mode):
    settings = {}
    if mode == "asynchronous":
        settings["async_config"] = train.AsyncConfig(max_steps_off_policy=1, groups_per_batch=2)
    else:
        settings |= {"compute_post_kl": True, "kl_penalty_coef": 0.1}
        settings["kl_reference_config"] = train.KLReferenceConfig(base_model=stories_model)
    data = {"num_batches": 2, "groups_per_batch": 2, "group_size": 4, "test_groups": 1}
    config = story_config(
        stories_model, tmp_path, {**data, "reward_for": "length"}, max_tokens=8, **settings
    )
    asyncio.run(train.main(config))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    written = {key for row in rows for key in row}
    assert "optim/entropy" in written
    known = known_keys()
    strangers = [
        key for key in sorted(written - known) if not any(re.fullmatch(f, key) for f in FAMILIES)
    ]
    assert strangers == []
    _check_transcripts(tmp_path)


def _check_transcripts(log_path: Path) -> None:
    """Every episode has a row with text, and what its environment logged is in the tree."""
    for step in range(2):
        folder = log_path / f"iteration_{step:06d}"
        lines = (folder / "train_rollout_summaries.jsonl").read_text().splitlines()
        summaries = [json.loads(line) for line in lines]
        assert [(row["group_idx"], row["traj_idx"]) for row in summaries] == [
            (group, member) for group in range(2) for member in range(4)
        ]
        for row in summaries:
            assert row["steps"][0]["ac_len"] == 8
            assert row["steps"][0]["action_text"].strip()
        for group in range(2):
            advantages = [row["advantage"] for row in summaries if row["group_idx"] == group]
            assert sum(advantages) == pytest.approx(0, abs=1e-9)
        tree = (folder / "train_logtree.json").read_text()
        assert tree.count("heard: ") == 8
    assert (log_path / "iteration_000002" / "eval_test_logtree.json").exists()
