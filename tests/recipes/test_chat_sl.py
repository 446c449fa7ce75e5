"""recipes.chat_sl: named datasets by local copies, own files, and evaluations."""

from __future__ import annotations

import json

import numpy as np
import pytest

from recipes.chat_sl import chat_datasets, train
from recipes.start import example_data
from tinker_cookbook.eval.benchmark_evaluator import BenchmarkEvaluator
from tinker_cookbook.exceptions import (
    BenchmarkNotFoundError,
    ConfigurationError,
    DataValidationError,
)
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised.hf_datasets import ChatDataBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments


def common(model, **settings):
    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name="role_colon", batch_size=4, **settings
    )


def turns(i):
    return [
        {"role": "user", "content": f"question {i}"},
        {"role": "assistant", "content": f"first {i}"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": f"second {i}"},
    ]


def first_questions(dataset):
    return [dataset.hf_dataset[i][0]["content"] for i in range(len(dataset.hf_dataset))]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_tulu3_is_split_as_by_the_original(tmp_path, stories_model, suffix):
    import datasets

    rows = [{"id": str(i), "messages": turns(i), "source": "made up"} for i in range(1100)]
    table = datasets.Dataset.from_list(rows)
    if suffix == "parquet":
        table.to_parquet(tmp_path / "train-00000-of-00001.parquet")
    else:
        (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    builder = chat_datasets.Tulu3Builder(common_config=common(stories_model), path=str(tmp_path))
    train_set, test_set = builder()
    # What the original's builder does with the datasets library.
    shuffled = table.shuffle(seed=0)
    expected = [shuffled[i]["messages"][0]["content"] for i in range(1100)]
    assert first_questions(test_set) == expected[:1024]
    assert first_questions(train_set) == expected[1024:]
    # Only the last answer of a conversation is trained.
    (datum,) = train_set.get_batch(0)[:1]
    mask = datum.loss_fn_inputs["weights"].to_numpy() != 0
    text = builder.tokenizer.decode(datum.loss_fn_inputs["target_tokens"].to_numpy()[mask].tolist())
    assert "second" in text
    assert "first" not in text
    every = common(stories_model, train_on_what=TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    made = chat_datasets.Tulu3Builder(common_config=every, path=str(tmp_path))
    weights = made()[0].get_batch(0)[0].loss_fn_inputs["weights"].to_numpy()
    assert np.count_nonzero(weights) > mask.sum()


def test_tulu3_of_too_few_rows(tmp_path, stories_model):
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": turns(0)}))
    builder = chat_datasets.Tulu3Builder(common_config=common(stories_model), path=str(tmp_path))
    with pytest.raises(DataValidationError, match="has 1 rows, of which tulu3 holds out 1024"):
        builder()


def test_datasets_by_name_and_path(stories_model):
    make = train.get_dataset_builder
    for name, kind in (
        ("no_robots", chat_datasets.NoRobotsBuilder),
        ("tulu3", chat_datasets.Tulu3Builder),
        ("owner/name", ChatDataBuilder),
        (str(example_data("conversations.jsonl")), ChatDataBuilder),
    ):
        assert type(make(name, stories_model, "role_colon", 64, 4)) is kind
    with pytest.raises(ConfigurationError, match="expected one of no_robots, tulu3; did you mean"):
        make("norobots", stories_model, "role_colon", 64, 4)
    with pytest.raises(ConfigurationError, match="test_size: got 3 with dataset=tulu3"):
        make("tulu3", stories_model, "role_colon", 64, 4, test_size=3)


def test_inline_evaluations(stories_model):
    assert train.get_infrequent_evaluator_builders(None, "role_colon", "m") == []
    made = train.get_infrequent_evaluator_builders("gsm8k, ifeval", "role_colon", stories_model)
    assert [builder.args[0] for builder in made] == ["gsm8k", "ifeval"]
    assert isinstance(made[0](), BenchmarkEvaluator)
    with pytest.raises(BenchmarkNotFoundError, match="gsm8k"):
        train.get_infrequent_evaluator_builders("gsm9k", "role_colon", stories_model)


def test_the_context_of_the_model_may_be_shorter_than_the_default(stories_model):
    given = [f"model_name={stories_model}", "renderer_name=role_colon"]
    cli = parse_arguments(train.CLIConfig, given)
    assert cli.resolved().dataset_builder.common_config.max_length == 512
