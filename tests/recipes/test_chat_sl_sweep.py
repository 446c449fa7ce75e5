"""Sweeps of chat_sl from Python, with the story model (10 s)."""

from __future__ import annotations

import json
import shlex

import pytest

from recipes.chat_sl import sweep
from recipes.chat_sl.sweep import analyze, cli, launch_all
from recipes.chat_sl.train import CLIConfig, cli_main
from recipes.start import example_data
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments


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
        ({}, "At least one sweep axis"),
        ({"dataset": "tulu3"}, r"dataset: got 'tulu3', must be a list"),
        ({"learning_rat": [1e-4]}, "unexpected keyword argument 'learning_rat'"),
        ({"lora_rank": [4, -1]}, "lora_rank: got -1"),
    ],
)
def test_axes_that_cannot_work_start_nothing(tmp_path, axes, message):
    folder = tmp_path / "sweep"
    with pytest.raises((ConfigurationError, TypeError), match=message):
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
        assert config.lora_rank != 5
        cli_main(config)

    # One run fails, and the others train.
    ranks = {"lora_rank": [4, 5, 8]}
    table = sweep.run(main, base, sweep_dir=str(tmp_path / "sweep"), **ranks)
    assert started == [4, 5, 8]
    assert table["lora_rank"].tolist() == [4, 8]
    for row in table.to_dict("records"):
        assert row["log_path"].endswith(f"lora_rank={row['lora_rank']}")
        lines = (tmp_path / "sweep" / f"lora_rank={row['lora_rank']}" / "metrics.jsonl").read_text()
        logged = [json.loads(line) for line in lines.splitlines()]
        assert row["test/nll"] == [r["test/nll"] for r in logged if "test/nll" in r][-1]
    again = sweep.run(main, base, sweep_dir=str(tmp_path / "sweep"), skip_existing=True, **ranks)
    assert started == [4, 5, 8, 5]
    assert again.equals(table)
    keys = ["lora_rank", "dataset_builder.common_config.batch_size"]
    assert sweep.collect(tmp_path / "sweep", config_keys=keys)["batch_size"].tolist() == [2, 2]


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def sweep_command(tmp_path, monkeypatch):
    """Runs the command with made-up runs; gives the words of the sweep that it starts."""
    given: list[str] = []

    def sweep_main(words):
        given.extend(words)
        rows = [
            {"run": f"{rate},{rank}", "metric": "test/nll", "value": rate * rank, "state": "done"}
            | {"learning_rate": rate, "lora_rank": rank}
            for rate in (1e-4, 3e-4)
            for rank in (8, 32)
        ]
        # A run that failed is no recommendation, whatever it logged.
        rows.append({**rows[0], "value": 0.0, "state": "failed"})
        (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return 0

    monkeypatch.setattr(cli, "sweep_main", sweep_main)

    def run(*words):
        cli.main([*words, f"sweep_dir={tmp_path}"])
        return given

    return run


def test_the_command_is_a_sweep_of_the_recipe(sweep_command, tmp_path, capsys):
    words = sweep_command(
        "recipe=sft", "base.model_name=m", "base.dataset=a,b.jsonl", "base.batch_size=16",
        "base.device=cpu", "learning_rates=[1e-4, 3e-4]", "lora_ranks=[8,32]",
        "training_budget_examples=1000", "max_parallel=2", "metric=test/nll",
    )  # fmt: skip
    assert words[0] == "tinker_cookbook.recipes.chat_sl.train"
    assert set(words[1:]) == {
        "model_name=m", r"dataset=a\,b.jsonl", "batch_size=16", "device=cpu", "max_steps=62",
        "learning_rate=0.0001,0.0003", "lora_rank=8,32", f"log_dir={tmp_path}", "jobs=2",
        "metric=test/nll",
    }  # fmt: skip
    written = json.loads((tmp_path / "recommendations.json").read_text())
    assert written == {
        "recipe": "sft",
        "model_name": "m",
        "metric": "test/nll",
        "recommendations": {
            "rank_8": {"learning_rate": 1e-4, "lora_rank": 8, "test/nll": 8e-4},
            "rank_32": {"learning_rate": 1e-4, "lora_rank": 32, "test/nll": 32e-4},
        },
    }
    assert "best for rank 8: learning_rate=0.0001 (test/nll 0.0008)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipe=sfd"], "No module named 'sfd'; did you mean 'sft'"),
        (["base.bathc_size=3"], "did you mean 'base.batch_size'"),
        (["learning_rates=[x]"], "learning_rates"),
    ],
)
def test_settings_of_the_command_that_cannot_work(sweep_command, capsys, words, message):
    with pytest.raises(SystemExit):
        sweep_command(*words)
    assert message in capsys.readouterr().err


@pytest.mark.slow  # a server and two runs: 20 s
def test_the_command_trains_compares_and_leaves_finished_runs_out(tmp_path, stories_model, capsys):
    words = [
        "recipe=sft", f"base.model_name={stories_model}", "base.renderer_name=role_colon",
        f"base.dataset={example_data('conversations.jsonl')}", "base.test_size=4",
        "base.batch_size=4", "base.max_length=128", "base.device=cpu", "base.dtype=float32",
        "training_budget_examples=8", "learning_rates=[1e-3, 1e-2]", "lora_ranks=[4]",
        f"sweep_dir={tmp_path}", "max_parallel=2",
    ]  # fmt: skip
    cli.main(words)
    found = json.loads((tmp_path / "recommendations.json").read_text())["recommendations"]
    (best,) = found.values()
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert best["train_mean_nll"] == min(row["value"] for row in rows)
    assert [row["step"] for row in rows] == [2, 2]
    capsys.readouterr()
    cli.main([*words, "skip_existing=True"])
    assert "server" not in capsys.readouterr().out


def test_all_models_of_the_lineup_have_a_sweep_of_their_tier(capsys):
    launch_all.main(["--dry-run", "--tier", "large"])
    printed = capsys.readouterr().out
    assert "base.model_name=moonshotai/Kimi-K2.6" in printed
    assert "'lora_ranks=[1, 2, 4]'" in printed
    assert "Qwen3-8B" not in printed
    launch_all.main(["--dry-run", "--only", "Qwen/Qwen3-8B"])
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "python" in x]
    words = shlex.split(line)[3:]
    # The command takes its own words.
    config = parse_arguments(cli.sweep_config(CLIConfig), words)
    assert (config.base.model_name, config.lora_ranks) == ("Qwen/Qwen3-8B", [4, 16, 64, 128])
    with pytest.raises(SystemExit):
        launch_all.main(["--dry-run", "--only", "Qwen/Qwen3-8"])
    assert "Qwen/Qwen3-8B" in capsys.readouterr().err


def test_sweeps_of_several_models_become_a_page(tmp_path, capsys):
    for model, rate, end in (("o/a", 1e-4, 1.5), ("o/a", 1e-3, 1.2), ("o/a", 1e-2, 7.0),
                             ("o/b", 1e-4, float("nan"))):  # fmt: skip
        run = tmp_path / "sweeps" / model.replace("/", "-") / f"learning_rate={rate}"
        run.mkdir(parents=True)
        config = {"model_name": model, "lora_rank": 8, "learning_rate": rate}
        (run / "config.json").write_text(json.dumps(config))
        rows = [{"step": 0, "test/nll": 3.0}, {"step": 1, "train_mean_nll": 2.0, "time/step": 90}]
        rows.append({"step": 2, "test/nll": end})
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sweeps" / "o-c" / "unfinished").mkdir(parents=True)
    words = ["--local-dir", str(tmp_path / "sweeps"), "--output-dir", str(tmp_path / "out")]
    analyze.main(words)
    page = (tmp_path / "out" / "sft_sweep.md").read_text()
    assert "| o/a | 8 | 0.001 | 1.2000 |" in page
    assert "| 0.001 | 8 | **1.2000** | — | 2.0000 | — | 1.5 |" in page
    assert "| 0.01 | 8 | 7.0000 |" in page
    assert "| o/b | 8 |" not in page
    assert (tmp_path / "out" / "o-a_nll_curves.png").stat().st_size > 1000
    assert page in capsys.readouterr().out
