"""Off-policy distillation and self-distillation as they are run: killed, resumed, refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from recipe_runs import RecipeRuns, last_of_each
from tiny_model import make_tiny_model

from recipes.distillation import off_policy_reasoning
from recipes.sdft import train as sdft
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

OPTIM_STEP = "tinker_cookbook.engine.training.run:TrainingRun.optim_step"


class DistillationRuns(RecipeRuns):
    """The recipes on eight short conversations; ``settings`` are those of the recipe."""

    def __init__(self, folder: Path, model: str, recipe: str, *settings: str) -> None:
        super().__init__(folder, model, recipe)
        rows = (folder / "train.jsonl").read_text().splitlines()
        short = sorted(rows, key=len)[:8]
        (folder / "train.jsonl").write_text("\n".join(short) + "\n")
        self.settings = settings

    def arguments(self, name: str, behavior: str = "raise") -> list[str]:
        shared = [
            f"model_name={self.model}",
            f"dataset_path={self.folder / 'train.jsonl'}",
            f"log_path={self.folder / name}",
            f"behavior_if_log_dir_exists={behavior}",
            "renderer_name=role_colon",
            "num_epochs=2",
            "save_every=2",
            "lora_rank=4",
            "learning_rate=0.002",
            "device=cpu",
            "dtype=float32",
            "show_samples=0",
        ]
        return [*shared, *self.settings]


def off_policy(folder: Path, model: str) -> DistillationRuns:
    settings = (f"teacher_model={model}", "n_teacher_targets=8", "batch_size=3", "test_size=2")
    return DistillationRuns(
        folder, model, "recipes.distillation.off_policy_reasoning", *settings, "eval_every=2"
    )


def self_distillation(folder: Path, model: str) -> DistillationRuns:
    # A checkpoint at every step: the run is resumed from one that the teacher does not have.
    settings = ("groups_per_batch=3", "max_tokens=10", "topk=8", "teacher_sync_every=2")
    return DistillationRuns(folder, model, "recipes.sdft.train", *settings, "save_every=1")


@pytest.mark.slow
@pytest.mark.parametrize("make", [off_policy, self_distillation])
def test_killed_and_resumed_equals_never_killed(tmp_path, stories_model, make):
    place = make(tmp_path, stories_model)
    straight = place.run("straight")
    assert straight.returncode == 0, straight.stderr[-2000:]
    # After the update of step 4 but before its row: step 3 has been written and is trained again.
    # The straight run is a run of the same settings too: what is drawn follows from the seed.
    place.check_killed_and_resumed("killed", OPTIM_STEP, 4, "after")


@pytest.fixture(scope="module")
def place(tmp_path_factory, stories_model):
    return off_policy(tmp_path_factory.mktemp("refused"), stories_model)


@pytest.fixture
def refused(place, monkeypatch, capsys):
    """Runs a recipe with arguments that cannot work; gives the message."""
    import tinker_cookbook.engine.model.base_model as base_model

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(base_model.BaseModel, "__init__", never)

    def run(*arguments: str, recipe=off_policy_reasoning) -> str:
        line = [a for a in place.arguments("refused") if not a.startswith("teacher_model=")]
        if recipe is sdft:
            line = [a for a in line if not a.startswith(("batch_size", "n_teacher"))]
        monkeypatch.setattr(sys, "argv", ["recipe", *last_of_each([*line, *arguments])])
        with pytest.raises(SystemExit) as ended:
            run_entrypoint(recipe.main)
        printed = capsys.readouterr()
        assert ended.value.code == 1
        assert "Traceback" not in printed.err
        assert not (place.folder / "refused" / "metrics.jsonl").exists()
        return printed.err.strip()

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["n_teacher_targets=513"], ["n_teacher_targets: got 513", "1 to 512"]),
        (["max_length=512"], ["max_length is 512", "less than 512", "context of the teacher"]),
        (["teacher_checkpoint=old"], ["load_checkpoint_path: got 'old'", "tinker://"]),
        (["dataset=openthoughts3"], ["dataset_path=", "dataset=openthoughts3", "contradict"]),
    ],
)
def test_invalid_settings_are_refused(refused, place, arguments, words):
    message = refused(f"teacher_model={place.model}", *arguments)
    for word in words:
        assert word in message


def test_a_teacher_that_is_not_there(refused):
    message = refused("teacher_model=nobody/nothing")
    assert "nobody/nothing" in message


def test_a_teacher_with_another_vocabulary(refused, tmp_path):
    message = refused(f"teacher_model={make_tiny_model(tmp_path)}")
    assert "dataset_configs[0].teacher_config.base_model" in message
    assert "vocabulary differs" in message


def test_weights_of_a_teacher_without_its_model(refused):
    message = refused("teacher_checkpoint=tinker://run/sampler_weights/final")
    assert "without teacher_model" in message


def test_a_conversation_without_an_answer(refused, place, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n")
    for recipe in (off_policy_reasoning, sdft):
        message = refused(f"dataset_path={path}", "test_size=0", recipe=recipe)
        assert f"{path}:1" in message
        assert "at least one to train on" in message


def test_a_local_copy_of_openthoughts_is_streamed(tmp_path, stories_model):
    rows = [
        {"conversations": [{"from": "human", "value": f"{i}?"}, {"from": "gpt", "value": f"{i}."}]}
        for i in range(40)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=stories_model, renderer_name="role_colon", batch_size=4
    )

    def texts(buffer_size):
        builder = off_policy_reasoning.OpenThoughts3Builder(
            common_config=common, path=str(tmp_path), max_prompts=40, buffer_size=buffer_size
        )
        data = builder()[0]
        found = [datum for i in range(len(data)) for datum in data.get_batch(i)]
        return [builder.tokenizer.decode(datum.model_input.to_ints()) for datum in found]

    in_order, shuffled = texts(1), texts(20)
    assert len(in_order) == 40
    assert "0?" in in_order[0]
    assert sorted(shuffled) == sorted(in_order)
    assert shuffled != in_order
    assert texts(20) == shuffled
