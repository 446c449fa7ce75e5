"""Sweeps of chat_sl from Python, with the story model (10 s)."""

from __future__ import annotations

import json

import pytest

from recipes.chat_sl import sweep
from recipes.chat_sl.train import CLIConfig, cli_main
from recipes.start import example_data
from tinker_cookbook.exceptions import ConfigurationError


def test_a_grid_is_the_product_and_names_its_folders():
    points = sweep.grid({"a.b": [1]}, rate=[1e-4, 3e-4], rank=[8, 32])
    assert [tuple(point.values()) for point in points] == [
        (1, 1e-4, 8),
        (1, 1e-4, 32),
        (1, 3e-4, 8),
        (1, 3e-4, 32),
    ]
    assert sweep.default_run_name({"learning_rate": 3e-4, "lora_rank": 32}) == (
        "learning_rate=0.0003_lora_rank=32"
    )


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({}, "got no setting"),
        ({"learning_rate": 1e-4}, r"learning_rate: got 0.0001, expected a list"),
        ({"dataset": "tulu3"}, r"dataset: got 'tulu3', expected a list"),
        ({"learning_rat": [1e-4]}, "did you mean 'learning_rate'"),
    ],
)
def test_axes_that_cannot_work_start_nothing(tmp_path, axes, message):
    folder = tmp_path / "sweep"
    with pytest.raises(ConfigurationError, match=message):
        sweep.run(pytest.fail, CLIConfig(), sweep_dir=str(folder), **axes)
    assert not folder.exists()


def test_runs_are_trained_collected_and_left_out_the_second_time(tmp_path, stories_model):
    base = CLIConfig(
        model_name=str(stories_model),
        renderer_name="role_colon",
        dataset=str(example_data("conversations.jsonl")),
        test_size=2,
        batch_size=2,
        max_steps=1,
        max_length=128,
        device="cpu",
        dtype="float32",
    )
    started = []

    def main(config):
        started.append(config.lora_rank)
        cli_main(config)

    # Rank 0 is refused by the config itself: its run fails, and the others train.
    ranks = {"lora_rank": [4, 0, 8]}
    table = sweep.run(main, base, sweep_dir=str(tmp_path / "sweep"), **ranks)
    assert started == [4, 8]
    assert table["lora_rank"].tolist() == [4, 8]
    for row in table.to_dict("records"):
        assert row["log_path"].endswith(f"lora_rank={row['lora_rank']}")
        lines = (tmp_path / "sweep" / f"lora_rank={row['lora_rank']}" / "metrics.jsonl").read_text()
        logged = [json.loads(line) for line in lines.splitlines()]
        assert row["test/nll"] == [r["test/nll"] for r in logged if "test/nll" in r][-1]
    again = sweep.run(main, base, sweep_dir=str(tmp_path / "sweep"), skip_existing=True, **ranks)
    assert started == [4, 8]
    assert again.equals(table)
    keys = ["lora_rank", "dataset_builder.common_config.batch_size"]
    assert sweep.collect(tmp_path / "sweep", config_keys=keys)["batch_size"].tolist() == [2, 2]
