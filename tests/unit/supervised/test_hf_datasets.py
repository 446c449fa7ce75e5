"""Datasets by name or local path, and mixtures of them."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataError,
    DataFormatError,
    DataValidationError,
)
from tinker_cookbook.supervised.hf_datasets import NoRobotsBuilder, load_hf_dataset
from tinker_cookbook.supervised.interleaved import (
    HFDatasetSource,
    InterleavedChatDatasetBuilder,
    interleave,
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


def test_without_hub_and_cache_the_way_out_is_named_in_seconds(no_hub, empty_cache):
    from huggingface_hub import constants

    start = time.monotonic()
    with pytest.raises(DataError, match=r"not in the local cache.*dataset_path=FILE\.jsonl"):
        load_hf_dataset("HuggingFaceH4/no_robots", "train")
    assert time.monotonic() - start < 8
    assert constants.HF_HUB_OFFLINE is False


def test_a_path_that_does_not_exist_is_not_taken_for_a_hub_name(tmp_path):
    for path in (str(tmp_path / "nowhere"), "nowhere.jsonl"):
        with pytest.raises(DataValidationError, match=r"there is no file or folder .*nowhere"):
            load_hf_dataset(path, "train")


def test_local_rows_are_not_unified_into_columns(tmp_path):
    rows = [row("a"), {"messages": [{"role": "user", "content": [{"type": "text", "text": "b"}]}]}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    assert load_hf_dataset(str(tmp_path), "train") == rows
    assert load_hf_dataset(str(tmp_path / "rows.json"), "train") == rows


def test_parquet_folders_like_those_of_the_hub(tmp_path):
    import datasets

    (tmp_path / "data").mkdir()
    for shard, names in enumerate((["a", "b"], ["c"])):
        part = datasets.Dataset.from_list([row(name) for name in names])
        part.to_parquet(tmp_path / "data" / f"train-0000{shard}-of-00002.parquet")
    loaded = load_hf_dataset(str(tmp_path), "train")
    assert [loaded[i]["messages"][0]["content"] for i in range(len(loaded))] == ["a", "b", "c"]
    with pytest.raises(DataValidationError, match=r"split: got 'test', but .* has only train; exp"):
        load_hf_dataset(str(tmp_path), "test")


@pytest.mark.parametrize(
    ("name", "content", "split", "error", "word"),
    [
        ("rows.csv", "a,b", "train", DataValidationError, r"ends in '\.csv', expected \.jsonl"),
        ("rows.json", "{}", "train", DataFormatError, "got a JSON dict, expected an array"),
        ("rows.json", "{", "train", DataFormatError, r"not JSON .*name a file of one object"),
        ("rows.jsonl", "{}\n{", "train", DataFormatError, r"rows\.jsonl:2: not JSON"),
        ("rows.parquet", "no", "train", DataFormatError, "not readable as parquet"),
        ("rows.jsonl", "{}", "test", DataValidationError, "split: got 'test', but .* single file"),
    ],
)
def test_bad_local_files(tmp_path, name, content, split, error, word):
    (tmp_path / name).write_text(content)
    with pytest.raises(error, match=word):
        load_hf_dataset(str(tmp_path / name), split)


def test_named_configurations_belong_to_the_hub(tmp_path):
    with pytest.raises(DataValidationError, match="name: got 'main', but"):
        load_hf_dataset(str(tmp_path), "train", "main")


def test_no_robots_from_a_local_copy(tmp_path, tokenizer_folder):
    for split, count in (("train", 5), ("test", 1)):
        lines = [json.dumps(row(f"{split} {i}")) for i in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    made = NoRobotsBuilder(common_config=common(tokenizer_folder), path=str(tmp_path))
    train, test = made()
    assert questions(train, made.tokenizer) == [f"train {i}" for i in range(5)]
    assert questions(test, made.tokenizer) == ["test 0"]
    assert made.held_out_prompts(3) == [[{"role": "user", "content": "test 0"}]]


sizes_and_weights = st.lists(
    st.tuples(st.integers(1, 12), st.floats(0.1, 3.0)), min_size=1, max_size=4
)


@given(sizes_and_weights, st.integers(0, 5))
def test_what_each_stopping_strategy_promises(sources, seed):
    sizes, weights = [s for s, _ in sources], [w for _, w in sources]
    for strategy in ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement"):
        pairs = interleave(sizes, weights, strategy, seed)
        counts = np.bincount(pairs[:, 0], minlength=len(sizes))
        for k, size in enumerate(sizes):  # rows of a source come in their order, again and again
            assert pairs[pairs[:, 0] == k, 1].tolist() == [i % size for i in range(counts[k])]
        last = pairs[-1, 0]
        if strategy == "first_exhausted":
            assert counts[last] == sizes[last]
            assert all(counts[k] < sizes[k] for k in range(len(sizes)) if k != last)
        elif strategy == "all_exhausted":
            assert counts[last] == sizes[last]
            assert all(counts >= sizes)
        else:
            assert counts.tolist() == sizes
        np.testing.assert_array_equal(pairs, interleave(sizes, weights, strategy, seed))


def test_sources_are_drawn_by_weight():
    pairs = interleave([30_000, 30_000], [1.0, 3.0], "first_exhausted", 0)
    assert len(pairs) > 39_000
    assert np.mean(pairs[:, 0]) == pytest.approx(0.75, abs=0.01)


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
    made = mixture(tokenizer_folder, two_files, test_size=4, shuffle_seed=1)
    train, test = made()
    trained, held_out = questions(train, made.tokenizer), questions(test, made.tokenizer)
    everything = {f"a{i}" for i in range(12)} | {f"b{i}" for i in range(4)}
    assert len(held_out) == len(set(held_out)) == 4
    assert set(trained) == everything - set(held_out)
    assert len(trained) > len(set(trained))  # "b" is drawn as often as "a"
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
        ({"sources": []}, "sources: got none, expected at least one"),
        ({"test_size": 16}, "test_size: got 16, expected 0 to 15"),
        ({"weight": 0.0}, r"sources\[0\].weight: got 0.0, expected a positive number"),
    ],
)
def test_impossible_mixtures_are_refused(tokenizer_folder, two_files, change, word):
    import chz

    if "weight" in change:
        change = {"sources": [chz.replace(two_files[0], **change), two_files[1]]}
    with pytest.raises(ConfigurationError, match=word):
        mixture(tokenizer_folder, **{"sources": two_files, **change})()


def test_a_message_field_that_is_not_there_is_named(tokenizer_folder, two_files):
    import chz

    sources = [chz.replace(two_files[0], message_field="chat")]
    with pytest.raises(DataFormatError, match=r"sources\[0\].message_field: got 'chat'.*messages"):
        mixture(tokenizer_folder, sources)()[0].get_batch(0)
