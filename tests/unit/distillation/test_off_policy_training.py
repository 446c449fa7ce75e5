"""Several datasets with their teachers in one run: shares, routing, metrics, repeatability."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import soft_samples as ref

from tinker_cookbook.distillation import train_off_policy
from tinker_cookbook.distillation.datasets import TeacherConfig
from tinker_cookbook.distillation.topk_distributions import number_of, numbered, without_number
from tinker_cookbook.distillation.train_off_policy import MixedDataset, shares
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.supervised.conversation_file import FromConversationFileBuilder
from tinker_cookbook.supervised.data import SupervisedDatasetFromHFDataset
from tinker_cookbook.supervised.types import (
    ChatDatasetBuilderCommonConfig,
    EmptyBatchError,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer

TALKS = [
    ("Who is big?", "The sun is big and bright."),
    ("Who ran?", "Tom ran to the park with his dog."),
    ("Who is Lily?", "Lily is a little girl."),
    ("Why?", "She was happy."),
]


@pytest.mark.parametrize(
    ("weights", "batch_size", "expected"),
    [([1], 5, [5]), ([1, 1], 8, [4, 4]), ([3, 1, 1], 10, [6, 2, 2]), ([1, 100], 8, [1, 7])],
)
def test_a_batch_is_shared_out_by_weight(weights, batch_size, expected):
    assert shares(weights, batch_size) == expected


class TestMixedDataset:
    @pytest.fixture
    def parts(self, stories_model):
        tokenizer = get_tokenizer(stories_model)

        def dataset(rows, size):
            return SupervisedDatasetFromHFDataset(
                rows, size, map_fn=lambda row: ref.datum(tokenizer, *row)
            )

        return dataset(TALKS, 2), dataset([("Go", ""), *TALKS[:2]], 1)

    def test_each_example_knows_its_dataset(self, parts):
        mixed = MixedDataset(parts)
        assert len(mixed) == 2  # the shorter one's
        batch = mixed.get_batch(1)
        assert [number_of(datum) for datum in batch] == [0, 0, 1]
        plain = without_number(batch[2])
        expected = parts[1].get_batch(1)[0]
        assert plain.model_input.to_ints() == expected.model_input.to_ints()
        assert set(plain.loss_fn_inputs) == set(expected.loss_fn_inputs)
        with pytest.raises(DataValidationError, match="without a number"):
            number_of(plain)
        assert number_of(numbered(plain, 7)) == 7

    def test_the_seed_orders_all_of_them(self, parts):
        def tokens(seed):
            mixed = MixedDataset(parts)
            mixed.set_epoch(seed)
            return [d.model_input.to_ints() for i in (1, 0) for d in _batch(mixed, i)]

        assert tokens(3) == tokens(3)
        assert any(tokens(0) != tokens(seed) for seed in range(1, 5))

    def test_a_dataset_without_a_trained_token_in_a_batch_is_passed_over(self, parts):
        mixed = MixedDataset(parts)
        assert [number_of(datum) for datum in mixed.get_batch(0)] == [0, 0]
        assert mixed.num_dropped == 1
        assert mixed.report()[0].startswith("dataset_configs[1]: 1 ")
        with pytest.raises(EmptyBatchError):
            MixedDataset(parts[1:]).get_batch(0)


def _batch(dataset, index):
    try:
        return dataset.get_batch(index)
    except EmptyBatchError:
        return []


def config_of(model, folder, **settings) -> train_off_policy.Config:
    """Two datasets, 2 + 1 examples a step, two steps; the first teacher may be another."""
    path = folder / "talks.jsonl"
    path.write_text(
        "".join(
            json.dumps(
                {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
            )
            + "\n"
            for q, a in TALKS
        )
    )
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name="role_colon", batch_size=9, max_length=33
    )
    builder = FromConversationFileBuilder(
        common_config=common, file_path=str(path), test_file_path=str(path)
    )
    parts = [
        train_off_policy.DatasetWithTeacher(
            dataset_builder=builder, teacher_config=TeacherConfig(base_model=model), weight=weight
        )
        for weight in (2.0, 1.0)
    ]
    values = {
        "model_name": model, "log_path": str(folder / "run"), "backend": "local",
        "renderer_name": "role_colon", "dataset_configs": parts, "batch_size": 3,
        "n_teacher_targets": 8, "lora_rank": 4, "learning_rate": 2e-3, "show_samples": 0,
        "device": "cpu", "dtype": "float32", "max_steps": 2,
    }  # fmt: skip
    return train_off_policy.Config(**{**values, **settings})


def test_a_run_with_two_teachers(stories_model, tmp_path):
    config = config_of(stories_model, tmp_path)
    asyncio.run(train_off_policy.main(config))
    rows = ref.rows(config.log_path)
    assert [row["num_sequences"] for row in rows[1:]] == [3, 3]
    # The student begins as its teachers are, and training towards their top 8 leaves them a bit.
    first = rows[1]
    assert first["teacher/forward_kl"] == pytest.approx(0, abs=1e-5)
    for name in ("teacher/cross_entropy", "teacher/entropy", "teacher/topk_mass"):
        assert first[name] > 0
    assert {"teacher/forward_kl/dataset_0", "teacher/forward_kl/dataset_1"} <= set(first)
    assert rows[0]["test/forward_kl"] == pytest.approx(0, abs=1e-5)
    assert rows[0]["test/nll"] > 0
    assert rows[-1]["test/topk_mass"] == rows[0]["test/topk_mass"]
    again = config_of(stories_model, tmp_path, log_path=str(tmp_path / "again"))
    asyncio.run(train_off_policy.main(again))
    assert ref.rows(again.log_path) == rows


def test_the_distance_to_a_teacher_with_weights_of_its_own_falls(stories_model, tmp_path):
    place = ref.Place.of(stories_model)
    path = place.student.save_weights_for_sampler("teacher").result().path
    place.service.close()
    teacher = TeacherConfig(base_model=stories_model, load_checkpoint_path=path)
    part = config_of(stories_model, tmp_path).dataset_configs[0]
    part = train_off_policy.DatasetWithTeacher(
        dataset_builder=part.dataset_builder, teacher_config=teacher
    )
    config = config_of(
        stories_model, tmp_path, dataset_configs=[part], max_steps=None, num_epochs=6, eval_every=99
    )
    asyncio.run(train_off_policy.main(config))
    rows = ref.rows(config.log_path)
    assert rows[0]["test/forward_kl"] > 0.05
    assert rows[-1]["test/forward_kl"] < 0.5 * rows[0]["test/forward_kl"]
    # The floor of what is trained is the teacher's entropy.
    assert rows[-1]["test/cross_entropy"] > rows[-1]["test/entropy"]
    assert np.isclose(rows[-1]["test/entropy"], rows[0]["test/entropy"])


def test_a_teacher_with_a_prompt_of_its_own_is_for_on_policy(stories_model, tmp_path):
    teacher = TeacherConfig(base_model=stories_model, system_prompt="Be kind.")
    part = config_of(stories_model, tmp_path).dataset_configs[0]
    part = train_off_policy.DatasetWithTeacher(
        dataset_builder=part.dataset_builder, teacher_config=teacher
    )
    with pytest.raises(ConfigurationError, match="train_on_policy"):
        config_of(stories_model, tmp_path, dataset_configs=[part]).check()
    with pytest.raises(ConfigurationError, match="dataset_configs: got none"):
        config_of(stories_model, tmp_path, dataset_configs=[]).check()
