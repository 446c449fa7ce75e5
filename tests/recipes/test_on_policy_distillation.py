"""On-policy distillation from end to end: it learns, it goes on after a kill, its recipes start."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from homes import new_home
from recipe_runs import REPO, RecipeRuns
from taught_stories import taught, train_teacher

from recipes.distillation import on_policy_distillation, on_policy_multi_teacher
from recipes.distillation.on_policy_settings import TeacherSettings
from recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.distillation.datasets import PromptOnlyDatasetBuilder
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.config import load_config
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments

SCORED = "tinker_cookbook.distillation.on_policy_teachers:add_reverse_kl"
GROUP_DONE = "tinker_cookbook.rl.loop.sources:RolloutWorker.count"


def test_a_student_gets_closer_to_its_teacher_and_does_what_it_does(stories_model, tmp_path):
    """The teacher says "dog" in 39% of its stories, the student in 3% at first."""
    config = taught(stories_model, tmp_path, train_teacher(stories_model), steps=6)
    asyncio.run(train_on_policy.main(config))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "teacher_kl" in row]
    assert rows[0]["teacher_kl"] > 0.4
    assert rows[-1]["teacher_kl"] < 0.5 * rows[0]["teacher_kl"]
    assert rows[-1]["teacher_kl/per_episode"] < 0.5 * rows[0]["teacher_kl/per_episode"]
    assert rows[0]["env/all/named"] < 0.15
    assert rows[-1]["env/all/named"] > 0.2


# --- killed and continued ----------------------------------------------------------------------


class TaughtRuns(RecipeRuns):
    """Runs of ``taught_stories``: 6 iterations of 8 groups, in two substeps."""

    teacher = ""

    def arguments(self, name: str, behavior: str = "raise") -> list[str]:
        return [
            f"model_name={self.model}",
            f"log_path={self.folder / name}",
            f"teacher={self.teacher}",
            f"behavior_if_log_dir_exists={behavior}",
            "num_substeps=2",
            "save_every=2",
            "eval_every=100",
            "lora_rank=4",
            "backend=local",
            "device=cpu",
            "dtype=float32",
        ]

    def environment(self, **extra: str) -> dict[str, str]:
        path = os.pathsep.join([str(REPO), str(Path(__file__).parent)])
        return {**super().environment(), "PYTHONPATH": path, **extra}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, stories_model):
    """The finished run that was never killed."""
    place = TaughtRuns(tmp_path_factory.mktemp("taught"), stories_model, "taught_stories")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_COOKBOOK_HOME", new_home(place.folder / "home"))
        place.teacher = train_teacher(stories_model)
    straight = place.run("straight")
    assert straight.returncode == 0, straight.stderr[-2000:]
    return place


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "count", "when"),
    [
        pytest.param(SCORED, 4, "after", id="when the teacher has scored"),
        pytest.param(GROUP_DONE, 20, "after", id="while sampling"),
    ],
)
def test_killed_and_resumed_equals_never_killed(runs, request, point, count, when):
    name = request.node.callspec.id.replace(" ", "-")
    runs.check_killed_and_resumed(name, point, count, when)
    assert {row["optim/num_steps"] for row in runs.rows(name)} == {2}


# --- the recipes -------------------------------------------------------------------------------


def settings(*arguments, of=on_policy_distillation):
    return parse_arguments(of.CLIConfig, arguments)


def test_by_default_the_teacher_sees_the_answers_of_sums(stories_model):
    config = settings(f"model_name={stories_model}").resolved()
    (part,) = config.dataset_configs
    assert isinstance(part.dataset_builder, ArithmeticDatasetBuilder)
    assert part.teacher_config.base_model == stories_model
    assert "{answer}" in part.teacher_config.answer_hint
    assert part.teacher_config.convo_prefix[0]["content"] == "What is 120 + 345? Say 465."
    assert (config.max_tokens, config.reward_coef, config.center_teacher_kl) == (12, 0.0, True)


def test_distributions_as_targets_need_no_other_setting(stories_model):
    words = (f"model_name={stories_model}", f"teacher_model={stories_model}", "n_teacher_targets=8")
    config = settings(*words).resolved()
    config.check()
    assert not config.center_teacher_kl
    with pytest.raises(ConfigurationError, match="center_teacher_kl: got True with n_teacher_t"):
        settings(*words, "center_teacher_kl=true").resolved().check()


def test_a_teacher_of_its_own_gets_no_hint(stories_model, tmp_path):
    prompt = tmp_path / "style.txt"
    prompt.write_text("Write like a pirate.\n")
    config = settings(
        f"model_name={stories_model}",
        "dataset=example",
        f"teacher_prompt={prompt}",
        "teacher_checkpoint=tinker://a/sampler_weights/b",
        "teacher_renderer_name=role_colon",
    ).resolved()
    (part,) = config.dataset_configs
    assert isinstance(part.dataset_builder, PromptOnlyDatasetBuilder)
    assert part.teacher_config.system_prompt == "Write like a pirate."
    assert part.teacher_config.answer_hint is None
    assert config.max_tokens == 256


def test_two_teachers_by_default_and_by_name(stories_model):
    model = f"model_name={stories_model}"
    config = settings(model, of=on_policy_multi_teacher).resolved()
    sums, brief = (part.teacher_config for part in config.dataset_configs)
    assert "{answer}" in sums.answer_hint
    assert brief.system_prompt == "Answer in one short sentence."
    given = settings(model, "second.teacher_prompt=Be odd.", of=on_policy_multi_teacher)
    config = given.resolved()
    assert config.dataset_configs[1].teacher_config.system_prompt == "Be odd."
    assert isinstance(config.dataset_configs[1].dataset_builder, PromptOnlyDatasetBuilder)
    assert TeacherSettings().dataset == "sums"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dataset=sumz"], "dataset: got 'sumz'.* did you mean"),
        (["dataset=deepmath"], "teacher_model, teacher_checkpoint, teacher_prompt: got none"),
    ],
)
def test_what_cannot_work_is_said(stories_model, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        settings(f"model_name={stories_model}", *arguments).resolved()


@pytest.mark.slow
def test_one_step_of_the_recipe_as_a_command(stories_model, tmp_path):
    """And its config is read back as it was."""
    runs = RecipeRuns(tmp_path, stories_model, "recipes.distillation.on_policy_distillation")
    runs.arguments = lambda name, behavior="raise": [  # type: ignore[method-assign]
        f"model_name={stories_model}",
        f"log_path={tmp_path / name}",
        "max_steps=1",
        "groups_per_batch=2",
        "group_size=2",
        "num_test=1",
        "device=cpu",
        "dtype=float32",
    ]
    done = runs.run("run")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "teacher KL" in done.stdout
    rows = runs.rows("run")
    assert rows[1]["teacher_kl"] > 0.005
    assert "test/env/all/correct" in rows[0]
    assert isinstance(load_config(tmp_path / "run" / "config.json"), train_on_policy.Config)
