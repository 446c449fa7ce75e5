"""The loop with teachers: what it checks before, what it writes, and that its modes all work."""

from __future__ import annotations

import asyncio
import json
import logging

import chz
import numpy as np
import pytest
import tinker
from chat_model import SPECIAL, make_chat_model

from tinker_cookbook.backends import connect
from tinker_cookbook.checkpoint_utils import CheckpointManager
from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.distillation.datasets import (
    CompositeDataset,
    DistillationDatasetConfig,
    PromptOnlyDatasetBuilder,
    TeacherConfig,
)
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.record.read import open_record
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.config import AsyncConfig, StreamMinibatchConfig
from tinker_cookbook.rl.envs.problem_dataset import ProblemDataset
from tinker_cookbook.rl.envs.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.loop.async_source import group_from_row, group_to_row
from tinker_cookbook.rl.loop.sources import RolloutGroup
from tinker_cookbook.rl.rollouts import do_group_rollout_and_filter_constant_reward
from tinker_cookbook.rl.types import RLDatasetBuilder, TrajectoryGroup, Transition
from tinker_cookbook.run import ml_log
from tinker_cookbook.tokenizer_utils import get_tokenizer

MOMENT = ("time/", "tokens/prefill_", "progress/", "sampling_client/", "async/")


@pytest.fixture(scope="module")
def other_model(tmp_path_factory) -> str:
    """Other weights, the same vocabulary."""
    return make_chat_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture
def prompts(tmp_path) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Say {i}."}) + "\n" for i in range(4)))
    return str(file)


def part(model, prompts, teacher, groups=2, **settings) -> DistillationDatasetConfig:
    return DistillationDatasetConfig(
        dataset_builder=PromptOnlyDatasetBuilder(
            dataset_name=prompts,
            groups_per_batch=groups,
            group_size=2,
            model_name_for_tokenizer=model,
            renderer_name=settings.pop("student_renderer", "chatml"),
        ),
        teacher_config=teacher
        if isinstance(teacher, TeacherConfig)
        else TeacherConfig(base_model=teacher, **settings),
        groups_per_batch=groups,
    )


def config(model, log_path, *parts, **settings) -> train_on_policy.Config:
    return train_on_policy.Config(
        model_name=model,
        log_path=str(log_path),
        dataset_configs=list(parts),
        renderer_name="chatml",
        **{
            "max_tokens": 6,
            "lora_rank": 4,
            "learning_rate": 0.01,
            "backend": "local",
            "device": "cpu",
            "dtype": "float32",
            "save_every": 0,
            **settings,
        },
    )


def run(config: train_on_policy.Config) -> list[dict]:
    asyncio.run(train_on_policy.main(config))
    with open(f"{config.log_path}/metrics.jsonl") as file:
        return [json.loads(line) for line in file]


def lasting(rows: list[dict]) -> list[dict]:
    return [
        {
            key: value
            for key, value in row.items()
            if not key.startswith(MOMENT) and not key.endswith("cached_ob_tokens")
        }
        for row in rows
    ]


def test_two_teachers_each_score_their_own_and_a_run_repeats_itself(
    model, other_model, prompts, tmp_path, caplog, capsys
):
    parts = [part(model, prompts, other_model), part(model, prompts, model, system_prompt="Be odd")]
    with caplog.at_level(logging.WARNING):
        rows = run(config(model, tmp_path / "a", *parts, num_epochs=2))
    again = run(config(model, tmp_path / "b", *parts, num_epochs=2))
    assert lasting(rows) == lasting(again)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        both = (row["teacher_kl/dataset_0"] + row["teacher_kl/dataset_1"]) / 2
        assert row["teacher_kl"] == pytest.approx(both, abs=0.2)
        assert row["optim/num_steps"] == 1  # though all rewards are 0
        assert row["reward/total"] == 0
        assert row["time/scoring"] > 0
    assert rows[0]["teacher_kl/dataset_0"] > 0.02
    assert rows[0]["teacher_kl/dataset_1"] != rows[0]["teacher_kl/dataset_0"]
    assert "env/dataset_1/ac_tokens_per_turn" in rows[0]
    assert "nothing can be learned" not in caplog.text
    shown = capsys.readouterr().out
    assert "teacher KL" in shown
    assert "all_bad 100%" not in shown


@pytest.mark.parametrize(
    "settings",
    [
        {"stream_minibatch_config": StreamMinibatchConfig(groups_per_batch=2, num_minibatches=2)},
        {"async_config": AsyncConfig(max_steps_off_policy=1, groups_per_batch=2)},
        {"num_substeps": 2, "center_teacher_kl": True, "kl_discount_factor": 0.5},
    ],
    ids=["streaming", "asynchronous", "substeps"],
)
def test_every_mode_learns_from_the_teacher(model, other_model, prompts, tmp_path, settings):
    """With a chat format of its own, too."""
    teacher = TeacherConfig(base_model=other_model, renderer_name="role_colon")
    rows = run(config(model, tmp_path, part(model, prompts, teacher), max_steps=2, **settings))
    assert all(row["teacher_kl"] > 0.02 and row["optim/num_steps"] >= 1 for row in rows)
    for row in rows:
        table = open_record(tmp_path).table(row["step"])
        assert table is not None
        trained = [turn for turn in table.to_pylist() if turn["datum"] is not None]
        student, scored = (
            np.concatenate([turn[name] for turn in trained])
            for name in ("logprobs", "reference_logprobs")
        )
        # The teacher's are float16.
        assert (student - scored).mean() == pytest.approx(row["teacher_kl"], rel=5e-3)


TARGETS = {"n_teacher_targets": 8, "reward_coef": 0}


@pytest.mark.parametrize(
    "settings",
    [
        {"num_epochs": 4},
        {"stream_minibatch_config": StreamMinibatchConfig(groups_per_batch=2, num_minibatches=2)},
        {"async_config": AsyncConfig(max_steps_off_policy=1, groups_per_batch=2)},
        {"num_substeps": 2},
    ],
    ids=["plain", "streaming", "asynchronous", "substeps"],
)
def test_every_mode_learns_from_the_teachers_distributions(
    model, other_model, prompts, tmp_path, settings
):
    taught = part(model, prompts, other_model)
    rows = run(config(model, tmp_path / "a", taught, **TARGETS, **settings))
    assert all(row["teacher_kl"] > 0.005 and row["optim/num_steps"] >= 1 for row in rows)
    if "num_substeps" not in settings:  # the learner's own log-probabilities: of sampled tokens
        assert abs(rows[0]["optim/kl_sample_train_v1"]) < 1e-4
    if "num_epochs" in settings:
        assert len(rows) == 8
        again = run(config(model, tmp_path / "b", taught, **TARGETS, **settings))
        assert lasting(rows) == lasting(again)


class SumEnv(ProblemEnv):
    def get_question(self):
        return "1+1?"

    def check_answer(self, sample_str):
        return "2" in sample_str

    def check_format(self, sample_str):
        return True

    def get_reference_answer(self):
        return "2"


@chz.chz
class SumBuilder(RLDatasetBuilder):
    model: str
    renderer_name: str = "chatml"

    async def __call__(self):
        renderer = get_renderer(self.renderer_name, get_tokenizer(self.model))

        def group(_):
            return ProblemGroupBuilder(lambda: SumEnv(renderer), 2)

        return ProblemDataset([0, 1], group, 2), ProblemDataset([0], group, 1)


def test_problems_keep_their_rewards_and_their_test_set(model, tmp_path):
    teacher = TeacherConfig(base_model=model, answer_hint=" It is {answer}.")
    one = DistillationDatasetConfig(
        dataset_builder=SumBuilder(model=model), teacher_config=teacher, groups_per_batch=2
    )
    rows = run(config(model, tmp_path, one))
    assert "test/env/all/correct" in rows[0]
    assert rows[1]["teacher_kl"] > 0
    assert "env/all/correct" in rows[1]
    table = open_record(tmp_path).table(1)
    assert table is not None
    question, answer = json.loads(table["episode_messages"][0].as_py())
    assert (question["role"], answer["role"]) == ("user", "assistant")


# --- what is refused ------------------------------------------------------------------------


def test_a_teacher_of_another_vocabulary_is_refused_before_anything_is_loaded(
    model, prompts, tmp_path, tmp_path_factory
):
    special = [SPECIAL[0], SPECIAL[2], SPECIAL[1], *SPECIAL[3:]]
    other = make_chat_model(tmp_path_factory.mktemp("swapped"), special=special)
    message = (
        r"dataset_configs\[0\].teacher_config.base_model: got .*vocabulary differs .* 2 of 261 "
        r"tokens"
    )
    with pytest.raises(ConfigurationError, match=message):
        run(config(model, tmp_path / "run", part(model, prompts, other)))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_penalty_coef": 0}, "kl_penalty_coef: got 0, so the teachers would have no effect"),
        ({"remove_constant_reward_groups": True}, "remove_constant_reward_groups: got True"),
        ({"dataset_configs": []}, "dataset_configs: got none"),
        ({"n_teacher_targets": -1}, "n_teacher_targets: got -1, expected 1 to"),
        ({"n_teacher_targets": 8}, "reward_coef: got 1.0 with n_teacher_targets=8, expected 0"),
        ({**TARGETS, "kl_discount_factor": 0.5}, "kl_discount_factor: got 0.5 with n_teacher_tar"),
        ({**TARGETS, "loss_fn": "ppo"}, "loss_fn: got ppo with n_teacher_targets=8"),
        ({**TARGETS, "loss_normalization": "tokens"}, "tokens with n_teacher_targets=8, expect"),
        ({**TARGETS, "importance_ratio_cap": 2.0}, "ratio_cap: got 2.0 with n_teacher_targets=8"),
        ({**TARGETS, "center_teacher_kl": True}, "center_teacher_kl: got True with n_teacher_tar"),
        (
            {
                "center_teacher_kl": True,
                "stream_minibatch_config": StreamMinibatchConfig(
                    groups_per_batch=2, num_minibatches=2
                ),
            },
            "center_teacher_kl: got True with stream_minibatch_config",
        ),
    ],
)
def test_invalid_settings_are_refused(model, prompts, tmp_path, settings, message):
    whole = config(model, tmp_path, part(model, prompts, model))
    with pytest.raises(ConfigurationError, match=message):
        chz.replace(whole, **settings).check()


def test_the_queue_of_an_asynchronous_run_keeps_what_the_teacher_sees():
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl.types import Trajectory

    seen = tinker.ModelInput.from_ints([7, 8])
    turn = Transition(
        ob=tinker.ModelInput.from_ints([1]),
        ac=TokensWithLogprobs([2], [-0.5]),
        reward=0.0,
        episode_done=True,
        teacher_ob=seen,
    )
    group = TrajectoryGroup([Trajectory([turn], tinker.ModelInput.empty())], [0.0], [{}])
    row = json.loads(json.dumps(group_to_row(RolloutGroup(0, 0, result=group, tags=["dataset_0"]))))
    (back,) = group_from_row(row).group.trajectories_G[0].transitions
    assert back.teacher_ob.to_ints() == [7, 8]
    del row["trajectories"][0]["transitions"][0]["teacher_ob"]  # an earlier version's
    assert group_from_row(row).group.trajectories_G[0].transitions[0].teacher_ob is None


def test_the_loop_and_its_step_over_a_client_of_the_caller(model, other_model, prompts, tmp_path):
    mine = config(model, tmp_path, part(model, prompts, other_model))

    async def go():
        service = connect("local", device="cpu", dtype="float32").service
        client = await service.create_lora_training_client(model, rank=mine.lora_rank, seed=0)
        teacher = await service.create_sampling_client(base_model=other_model)
        inner, _ = await mine.dataset_configs[0].dataset_builder()
        dataset = CompositeDataset([inner], [mine.dataset_configs[0].groups_per_batch])
        manager = CheckpointManager(client, service, mine.log_path)
        log, tokenizer = ml_log.setup_logging(mine.log_path), client.get_tokenizer()
        await train_on_policy.do_sync_training(
            0, 2, 2, mine, client, manager, service, [], dataset, [teacher], log, tokenizer
        )
        log.close()
        builders = list(inner.get_batch(0))
        sampler = await client.save_weights_and_get_sampling_client()
        groups = [
            await do_group_rollout_and_filter_constant_reward(
                sampler, builder, 6, 1.0, do_remove_constant_reward_groups=False
            )
            for builder in builders
        ]
        sampler, metrics = await train_on_policy.do_train_step_and_get_sampling_client(
            mine, 2, client, manager, service, tokenizer, builders, groups, [0] * len(builders),
            [teacher],
        )  # fmt: skip
        return sampler, metrics, await mean_difference(teacher, groups)

    sampler, metrics, expected = asyncio.run(go())
    assert hasattr(sampler, "sample")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    # The groups were sampled without a seed: so few tokens can also give a mean below 0.
    assert metrics["teacher_kl"] == pytest.approx(expected, abs=1e-5)
    assert all(row["teacher_kl"] > 0.02 for row in rows)
    for row in [*rows, metrics]:
        assert row["teacher_kl/dataset_0"] == pytest.approx(row["teacher_kl"])


async def mean_difference(teacher, groups: list[TrajectoryGroup]) -> float:
    """Mean of sampled minus teacher log-probabilities over all tokens, one episode at a time."""
    differences: list[float] = []
    for trajectory in (item for group in groups for item in group.trajectories_G):
        (turn,) = trajectory.transitions
        prompt = turn.ob.to_ints()
        whole = tinker.ModelInput.from_ints([*prompt, *turn.ac.tokens])
        scored = (await teacher.compute_logprobs(whole))[len(prompt) :]
        differences += [a - b for a, b in zip(turn.ac.logprobs, scored, strict=True)]
    return sum(differences) / len(differences)
