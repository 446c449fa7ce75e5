"""Datasets by name or local path, and mixtures of them."""

from __future__ import annotations

import json
import threading
import time

import chz
import pytest

from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataError,
    DataFormatError,
    DataValidationError,
)
from tinker_cookbook.supervised.hf_datasets import NoRobotsBuilder, load_hf_dataset
from tinker_cookbook.supervised.mixtures import (
    HFDatasetSource,
    InterleavedChatDatasetBuilder,
    hold_out,
)
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig


def row(question, answer="Yes."):
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


@pytest.fixture
def no_hub(monkeypatch):
    """No Hub answers: its address is a closed port of this machine, its cache is elsewhere."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", "http://127.0.0.1:9")


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def common(tokenizer_folder, batch_size=2):
    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=tokenizer_folder("smollm2"),
        renderer_name="chatml",
        batch_size=batch_size,
    )


def questions(dataset, tokenizer):
    data = [datum for i in range(len(dataset)) for datum in dataset.get_batch(i)]
    texts = [tokenizer.decode(datum.model_input.to_ints()) for datum in data]
    return [text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0] for text in texts]


def test_without_hub_and_cache_the_way_out_is_named_in_seconds(no_hub, empty_cache, monkeypatch):
    from huggingface_hub import constants

    waits: list[float] = []
    sleep, here = time.sleep, threading.current_thread()

    def wait(seconds):
        (waits.append if threading.current_thread() is here else sleep)(seconds)

    monkeypatch.setattr(time, "sleep", wait)
    with pytest.raises(DataError, match=r"not in the local cache.*dataset=FILE or dataset=FOLDER"):
        load_hf_dataset("HuggingFaceH4/no_robots", "train")
    assert sum(waits) < 8  # the Hub's client alone waits for 23 s
    assert constants.HF_HUB_OFFLINE is False


def test_parquet_folders_like_those_of_the_hub(tmp_path):
    import datasets

    (tmp_path / "data").mkdir()
    for shard, names in enumerate((["a", "b"], ["c"])):
        part = datasets.Dataset.from_list([row(name) for name in names])
        part.to_parquet(tmp_path / "data" / f"train-0000{shard}-of-00002.parquet")
    loaded = load_hf_dataset(str(tmp_path), "train")
    assert [loaded[i]["messages"][0]["content"] for i in range(len(loaded))] == ["a", "b", "c"]
    with pytest.raises(DataValidationError, match=r"has no split 'test', only train; exp"):
        load_hf_dataset(str(tmp_path), "test")


@pytest.mark.parametrize(
    ("name", "content", "split", "error", "word"),
    [
        ("rows.txt", "a,b", "train", DataValidationError, r"ends in '\.txt', expected \.jsonl"),
        ("rows.json", "{}", "train", DataFormatError, "got a JSON dict, expected an array"),
        ("rows.json", "{", "train", DataFormatError, r"not JSON .*one object per line"),
        ("rows.jsonl", "{}\n{", "train", DataFormatError, r"rows\.jsonl:2: not JSON"),
        ("rows.parquet", "no", "train", DataFormatError, "not readable as parquet"),
        ("rows.jsonl", "{}", "test", DataValidationError, "split: got 'test', but .* single file"),
    ],
)
def test_invalid_local_files_are_refused(tmp_path, name, content, split, error, word):
    (tmp_path / name).write_text(content)
    with pytest.raises(error, match=word):
        load_hf_dataset(str(tmp_path / name), split)


def test_no_robots_from_a_local_copy(tmp_path, tokenizer_folder):
    for split, count in (("train", 5), ("test", 1)):
        lines = [json.dumps(row(f"{split} {i}")) for i in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    made = NoRobotsBuilder(common_config=common(tokenizer_folder), path=str(tmp_path))
    train, test = made()
    assert questions(train, made.tokenizer) == [f"train {i}" for i in range(5)]
    assert questions(test, made.tokenizer) == ["test 0"]
    assert made.held_out_prompts(3) == [[{"role": "user", "content": "test 0"}]]


def test_rows_are_held_out_by_weight_and_the_rest_is_trained_on():
    """Shares of the held-out part: 0.9 by weight, 0.1 by size; every row is in one part."""
    from datasets import Dataset

    sources = [Dataset.from_dict({"row": [f"{name}{i}" for i in range(n)]}) for name, n in SIZES]
    for weights, low, high in (([9.0, 1.0], 80, 99), (None, 1, 20)):
        kept, _, test = hold_out(sources, weights, 100, 3)
        held_out = test["row"]
        assert low <= sum(row.startswith("a") for row in held_out) <= high
        everything = [*held_out, *kept[0]["row"], *kept[1]["row"]]
        assert sorted(everything) == sorted([*sources[0]["row"], *sources[1]["row"]])


SIZES = (("a", 100), ("b", 900))


@pytest.fixture
def two_files(tmp_path):
    for name, count in (("a", 12), ("b", 4)):
        lines = [json.dumps(row(f"{name}{i}")) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return [HFDatasetSource(path=str(tmp_path / f"{name}.jsonl")) for name in "ab"]


def mixture(tokenizer_folder, sources, **settings):
    return InterleavedChatDatasetBuilder(
        common_config=common(tokenizer_folder), sources=sources, **settings
    )


def test_a_mixture_repeats_small_sources_but_never_trains_what_is_held_out(
    tokenizer_folder, two_files
):
    weighted = [chz.replace(source, weight=1.0) for source in two_files]
    made = mixture(tokenizer_folder, weighted, test_size=4, shuffle_seed=1)
    train, test = made()
    trained, held_out = questions(train, made.tokenizer), questions(test, made.tokenizer)
    everything = {f"a{i}" for i in range(12)} | {f"b{i}" for i in range(4)}
    assert len(held_out) == len(set(held_out)) == 4
    assert set(trained) == everything - set(held_out)
    assert len(trained) > len(set(trained))  # "b" is sampled as often as "a"
    assert [prompt[0]["content"] for prompt in made.held_out_prompts(9)] == held_out
    once = mixture(
        tokenizer_folder, two_files, stopping_strategy="all_exhausted_without_replacement"
    )
    dataset, none = once()
    assert none is None
    assert sorted(questions(dataset, once.tokenizer)) == sorted(everything)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"sources": []}, "sources: got none. At least one"),
        ({"test_size": 16}, r"test_size: got 16, expected at most 14"),
        ({"weight": -1.0}, "Either all sources must have explicit weights or none"),
    ],
)
def test_invalid_mixtures_are_refused(tokenizer_folder, two_files, change, word):
    if "weight" in change:
        change = {"sources": [chz.replace(two_files[0], **change), two_files[1]]}
    with pytest.raises(ConfigurationError, match=word):
        mixture(tokenizer_folder, **{"sources": two_files, **change})()


def test_a_mixture_of_tables_is_a_table_with_their_rows(tokenizer_folder, tmp_path):
    """Callers of the official builder use methods of ``datasets.Dataset``."""
    import datasets

    for name, count in (("a", 6), ("b", 3)):
        rows = [{**row(f"{name}{i}"), "label": i != 1, "source": name} for i in range(count)]
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / f"{name}.parquet")
    sources = [HFDatasetSource(path=str(tmp_path / f"{name}.parquet")) for name in "ab"]
    strategy = "all_exhausted_without_replacement"
    made = mixture(tokenizer_folder, sources, stopping_strategy=strategy, test_size=2)
    train, test = made()
    assert isinstance(train.hf_dataset, datasets.Dataset)
    assert isinstance(test.hf_dataset, datasets.Dataset)
    rows = [*train.hf_dataset.to_list(), *test.hf_dataset.to_list()]
    # Rows with label false are left out; columns that do not affect training are not read.
    found = sorted(one["messages"][0]["content"] for one in rows)
    assert found == ["a0", "a2", "a3", "a4", "a5", "b0", "b2"]
    assert sorted(train.hf_dataset.column_names) == ["label", "messages"]
    assert len(questions(train, made.tokenizer)) == 5
