"""The three stages of RLHF as one command: killed anywhere, the same command goes on."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest
from homes import new_home
from recipe_runs import RecipeRuns, last_of_each

from recipes.preference.rlhf import rlhf_pipeline
from recipes.preference.rlhf.settings import STAGES, CLIConfig
from recipes.preference.rlhf.stages import rl_config, rm_config, sft_config
from tinker_cookbook.checkpoint_utils import CheckpointRecord
from tinker_cookbook.exceptions import ConfigurationError, DataError
from tinker_cookbook.run.config import load_config
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments

PIPELINE = "recipes.preference.rlhf.rlhf_pipeline"
OPTIM_STEP = "tinker_cookbook.engine.training.run:TrainingRun.optim_step"
CHECKPOINT_LINE = "tinker_cookbook.run.checkpoints:append_row"
MEASURE = "recipes.preference.rlhf.win_rate:comparisons_that_fit"


def write_comparisons(path: Path, animals: str) -> str:
    """The preferred answer names the animal; the other one evades."""
    rows = [
        {"prompt": f"Who is at the door, {a}?", "chosen": f"The {a}.", "rejected": "It is not me."}
        for a in animals.split()
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class PipelineRuns(RecipeRuns):
    """Three steps a stage, a checkpoint every second one."""

    def __init__(self, folder: Path, model: str) -> None:
        animals = "cat dog bird fish frog hen cow pig hare fox owl elk"
        train = write_comparisons(folder / "pairs.jsonl", animals)
        test = write_comparisons(folder / "pairs_test.jsonl", "ant bee")
        options = f"""dataset={train} test_path={test} max_steps=3 batch_size=4 rl_batch_size=2
            rl_group_size=2 rl_max_tokens=8 save_every=2 sft_learning_rate=0.01
            rm_learning_rate=0.01 rl_learning_rate=0.01"""
        super().__init__(folder, model, PIPELINE, options)

    def arguments(self, name: str, behavior: str = "") -> list[str]:
        return super().arguments(name, "resume")

    def outcome(self, name: str) -> dict[str, object]:
        """All that must not depend on where a run was killed."""
        result = json.loads((self.folder / name / "win_rate.json").read_text())
        return {
            **{f"{stage} rows": self.rows(f"{name}/{stage}") for stage in STAGES},
            **{f"{stage} weights": self.adapter(f"{name}/{stage}") for stage in STAGES},
            "result": {k: v for k, v in result.items() if not str(v).startswith("tinker://")},
        }


@pytest.fixture(scope="module")
def runs(tmp_path_factory, stories_model):
    """The finished pipeline that was never killed."""
    place = PipelineRuns(tmp_path_factory.mktemp("rlhf"), stories_model)
    straight = place.run("straight")
    assert straight.returncode == 0, straight.stderr[-2000:]
    place.said = straight.stdout
    return place


def test_each_stage_has_its_folder_and_the_result_its_file(runs):
    rows = {stage: runs.rows(f"straight/{stage}") for stage in STAGES}
    for stage in STAGES:
        assert [row["step"] for row in rows[stage]] == [0, 1, 2, 3], stage
    assert {"rm/accuracy", "rm/nll", "test/nll"} <= rows["rm"][-1].keys()
    assert rows["rm"][0]["rm/accuracy"] == pytest.approx(0.5, abs=0.5)
    last = rows["rl"][-1]
    assert {"env/all/win_minus_loss", "env/all/format", "kl_policy_base"} <= last.keys()
    assert 0 <= last["test/env/all/win_rate"] <= 1
    # The reference is where stage 3 begins.
    assert rows["rl"][1]["kl_policy_base"] == pytest.approx(0, abs=1e-4)
    result = json.loads((runs.folder / "straight" / "win_rate.json").read_text())
    assert result["win_rate_low"] <= result["win_rate"] <= result["win_rate_high"]
    assert result["num_comparisons"] == 2
    assert "win rate of stage 3 against stage 1: 0." in runs.said
    assert "stage 1 against itself (a control): 0." in runs.said


def test_one_file_repeats_all_stages(runs):
    words = [f"config={runs.folder}/straight/settings.json", "log_path=/tmp/other"]
    repeated = parse_arguments(CLIConfig, words)
    assert (repeated.rl_learning_rate, repeated.log_path) == (0.01, "/tmp/other")


def test_the_stages_build_on_each_other(runs):
    folder = runs.folder / "straight"
    final = {
        stage: json.loads((folder / stage / "checkpoints.jsonl").read_text().splitlines()[-1])
        for stage in STAGES
    }
    config = load_config(folder / "rl")
    assert config.load_checkpoint_path == final["sft"]["state_path"]
    assert config.kl_reference_config.load_checkpoint_path == final["sft"]["sampler_path"]
    judge = config.dataset_builder.preference_model_builder
    assert judge.rm_weights_path == final["rm"]["sampler_path"]
    result = json.loads((folder / "win_rate.json").read_text())
    assert [result[key] for key in ("policy", "baseline", "reward_model")] == [
        final[stage]["sampler_path"] for stage in ("rl", "sft", "rm")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "count", "when"),
    [
        pytest.param(OPTIM_STEP, 3, "before", id="in stage 1"),
        pytest.param(CHECKPOINT_LINE, 4, "after", id="between"),
        pytest.param(OPTIM_STEP, 9, "after", id="in stage 3"),
        pytest.param(MEASURE, 1, "before", id="before the end"),
    ],
)
def test_the_same_command_goes_on_where_it_was(runs, request, point, count, when):
    name = request.node.callspec.id.replace(" ", "-")
    killed = runs.run(name, kill=[point, str(count), when])
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    resumed = runs.run(name)
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert runs.outcome(name) == runs.outcome("straight")


def test_a_finished_pipeline_is_left_alone(runs, monkeypatch, capsys):
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", new_home(runs.folder / "home"))
    files = {path: path.read_bytes() for path in (runs.folder / "straight").rglob("*.json*")}
    asyncio.run(rlhf_pipeline.main(parse(runs.arguments("straight"))))
    said = capsys.readouterr().out
    assert said.count("finished before, 3 steps, tinker://") == 3
    assert "win rate of stage 3" in said
    one = parse(runs.arguments("straight"), "run_rm=False", "run_rl=False")
    asyncio.run(rlhf_pipeline.main(one))
    assert {path: path.read_bytes() for path in files} == files


# --- the command line ------------------------------------------------------------------------


@pytest.fixture
def arguments(runs, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rlhf_pipeline.py", *runs.arguments("new")])
    return runs.arguments("new")


def parse(arguments, *more) -> CLIConfig:
    return parse_arguments(CLIConfig, last_of_each([*arguments, *more]))


def test_rl_without_a_reward_model_names_the_checkpoint(runs, arguments):
    words = f"run_rm=False: {runs.folder / 'new' / 'rm'}/checkpoints.jsonl has no checkpoint"
    with pytest.raises(ConfigurationError, match=words):
        rlhf_pipeline.check(parse(arguments, "run_rm=False"))


def test_a_prompted_judge_needs_no_stage_2_which_otherwise_only_measures(runs, arguments):
    cli = parse(arguments, "judge=prompted", "run_rm=False")
    rlhf_pipeline.check(cli)
    assert not rlhf_pipeline.has_rm(cli)
    assert rlhf_pipeline.has_rm(parse(arguments, "judge=prompted"))
    # An earlier call has trained it.
    assert rlhf_pipeline.has_rm(parse(runs.arguments("straight"), "judge=prompted", "run_rm=False"))
    one = CheckpointRecord("final", state_path="tinker://x/weights/y", sampler_path="tinker://x/s")
    dataset = rl_config(cli, one, one).dataset_builder
    assert dataset.preference_model_builder.rm_weights_path is None


def test_an_unfinished_stage_is_not_taken_for_a_finished_one(runs, arguments):
    folder = runs.folder / "unfinished" / "sft"
    folder.mkdir(parents=True)
    line = {"name": "000002", "batch": 2, "state_path": "tinker://a/weights/b"}
    row = json.dumps({**line, "sampler_path": "tinker://a/sampler_weights/b"})
    (folder / "checkpoints.jsonl").write_text(row + "\n")
    cli = parse(arguments, "run_sft=False", f"log_path={folder.parent}")
    with pytest.raises(ConfigurationError, match=r"has only an unfinished run \(step 2\)"):
        rlhf_pipeline.check(cli)


def test_stage_3_does_not_go_on_from_other_weights(runs):
    later = CheckpointRecord(
        "final", state_path="tinker://x/weights/y", sampler_path="tinker://x/s/y"
    )
    config = rl_config(parse(runs.arguments("straight")), later, later)
    with pytest.raises(ConfigurationError, match=r"began from other weights.*load_checkpoint_path"):
        asyncio.run(rlhf_pipeline.run_stage("rl", config, _never))


async def _never(config) -> None:
    raise AssertionError("it must not train")


def test_a_stages_folder_stands_for_the_pipelines(runs):
    cli = parse(runs.arguments("straight"), f"log_path={runs.folder / 'straight' / 'rm'}")
    assert cli.folder == runs.folder / "straight"
    assert parse(runs.arguments("new"), "log_path=/tmp/x/rm").folder == Path("/tmp/x/rm")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["run_sft=False", "run_rm=False", "run_rl=False"], "got none, expected one True"),
        (["sft_max_steps=0"], "sft_max_steps: got 0"),
        (["rl_group_size=1"], "group_size: got 1, expected at least 2"),
        (["rl_max_tokens=100000"], "max_tokens: got 100000"),
        (["dataset=hh"], "dataset: got 'hh'.*did you mean 'hhh'"),
    ],
)
def test_invalid_settings_are_refused(arguments, more, words):
    with pytest.raises((ConfigurationError, DataError), match=words):
        rlhf_pipeline.check(parse(arguments, *more))


def test_a_dataset_without_a_held_out_part(runs, arguments):
    kept = [a for a in arguments if not a.startswith("test_path")]
    with pytest.raises(DataError, match=r"no held-out comparisons.*test_size=100"):
        rlhf_pipeline.check(parse(kept, "test_size=0"))


def test_the_steps_of_a_stage(arguments):
    assert sft_config(parse(arguments, "sft_max_steps=2")).max_steps == 2
    assert rm_config(parse(arguments)).max_steps == 3
