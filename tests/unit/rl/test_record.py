"""The record of a run: what was sampled, trained and evaluated."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tinker
import torch
from animal_stories import story_config
from pyarrow import dataset
from train_runs import run
from transformers import AutoModelForCausalLM

from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.exceptions import DataError, TrainingError
from tinker_cookbook.record.episodes import RecordedGroup, TrainedDatum, turn_table
from tinker_cookbook.record.examples import example_table
from tinker_cookbook.record.images import ImageFiles, image_file
from tinker_cookbook.record.read import open_record, whole_prompts
from tinker_cookbook.record.schema import IMAGE
from tinker_cookbook.record.vocabulary import token_texts
from tinker_cookbook.record.write import RecordWriter
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition
from tinker_cookbook.supervised.common import datum_from_tokens_weights
from tinker_cookbook.tokenizer_utils import get_tokenizer


def turns_of(record, step) -> list[dict]:
    table = record.table(step)
    assert table is not None
    return table.to_pylist()


def test_the_record_has_what_was_sampled_and_trained(recorded, stories_model):
    folder, rows = recorded
    record = open_record(folder)
    assert record.steps() == {
        0: ["eval_test"], 1: ["train"], 2: ["train"], 3: ["train"], 4: ["eval_test", "train"],
    }  # fmt: skip
    turns = turns_of(record, 3)
    assert {(turn["group"], turn["member"]) for turn in turns} == {
        (group, member) for group in range(4) for member in range(4)
    }
    assert {turn["weights_step"] for turn in turns} == {2}
    trained = [turn for turn in turns if turn["datum"] is not None]
    assert sorted(turn["datum"] for turn in trained) == list(range(16))
    # The metrics of the step, computed again from the record alone.
    assert np.mean([turn["episode_reward"] for turn in turns]) == pytest.approx(
        rows[3]["reward/total"]
    )
    sampled, scored = (
        np.concatenate([turn[name] for turn in trained])
        for name in ("logprobs", "trainer_logprobs")
    )
    assert -sampled.mean() == pytest.approx(rows[3]["optim/entropy"], rel=1e-6)
    assert (sampled - scored).mean() == pytest.approx(rows[3]["optim/kl_sample_train_v1"], abs=1e-7)
    for group in range(4):
        members = [turn for turn in turns if turn["group"] == group]
        mean = np.mean([turn["episode_reward"] for turn in members])
        for turn in members:
            expected = turn["episode_reward"] - mean
            assert turn["advantages"] == pytest.approx([expected] * len(turn["answer"]), abs=1e-6)


def test_entropies_are_those_of_the_model(recorded, stories_model):
    model = AutoModelForCausalLM.from_pretrained(stories_model)
    table = open_record(recorded[0]).table(0, "eval_test")
    assert table is not None
    for turn in table.to_pylist():
        ids = torch.tensor([[*turn["prompt"], *turn["answer"]]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(turn["prompt"]) - 1 : -1]
        expected = torch.distributions.Categorical(logits=logits).entropy()
        assert turn["entropies"] == pytest.approx(expected.tolist(), rel=1 / 64, abs=1e-4)


def random_episodes(rng, reference) -> pa.Table:
    """A group of long answers; nothing that an update needs is repeated in an answer."""
    prompt, length = tinker.ModelInput.from_ints(rng.integers(0, 50_000, 60).tolist()), 400
    groups, data = [], []
    for member in range(8):
        values = rng.normal(size=(5, length)).astype(np.float32)
        tokens = rng.zipf(1.3, length).clip(max=50_000).tolist()
        action = TokensWithLogprobs(tokens, values[0].tolist(), entropies=abs(values[1]).tolist())
        turn = Transition(prompt, action, 1.0, True)
        groups.append(Trajectory([turn], tinker.ModelInput.empty()))
        advantages = values[2] if reference else np.full(length, 0.25, np.float32)
        numbers = advantages, values[3], 0, 0, values[4] if reference else None
        data.append(TrainedDatum(0, member, [(0, 0)], *numbers))
    group = TrajectoryGroup(groups, [0.0] * 8, [{}] * 8)
    return turn_table([RecordedGroup(0, group)], data)


def random_examples(rng, reference) -> pa.Table:
    """Examples of a batch with a given log-probability for each target."""
    data, columns = [], {}
    for _ in range(16):
        tokens = rng.zipf(1.3, 200).clip(max=50_000)
        data.append(datum_from_tokens_weights(tokens, np.r_[np.zeros(50), np.ones(150)]))
    numbers = [rng.normal(size=199).astype(np.float32) for _ in data]
    logprobs = [tinker.TensorData.from_numpy(one) for one in numbers]
    if reference:
        columns = {"reference_logprobs": numbers[::-1], "margin": rng.normal(size=16)}
    return example_table(data, logprobs, columns, ImageFiles())


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("make", [random_episodes, random_examples])
def test_a_token_takes_at_most_16_bytes(tmp_path, make, reference):
    table = make(np.random.default_rng(0), reference)
    with RecordWriter(tmp_path) as writer:
        writer.write(1, "train", lambda: table)
    parts = pq.read_metadata(tmp_path / "record" / "step_000001.train.parquet").to_dict()
    size = sum(one["total_byte_size"] for one in parts["row_groups"])
    tokens = sum(
        len(ids)
        for name in ("prompt", "answer", "tokens")
        if name in table.column_names
        for ids in table[name].to_pylist()
    )
    assert size <= 16 * tokens


def test_an_image_is_stored_once(tmp_path):
    chunk = tinker.types.ImageChunk(data=b"pixels", format="png", expected_tokens=3)
    prompt = tinker.ModelInput(chunks=[tinker.EncodedTextChunk(tokens=[1, 2]), chunk])
    datum = tinker.Datum(model_input=prompt, loss_fn_inputs={})
    files = ImageFiles(tmp_path)
    first, second = example_table([datum, datum], [], {}, files).to_pylist()
    assert first["tokens"] == [1, 2, IMAGE, IMAGE, IMAGE]
    assert first["images"] == second["images"]
    path = image_file(tmp_path, first["images"][0])
    assert path is not None
    assert path.read_bytes() == b"pixels"
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    (image,) = example_table([datum], [], {}, ImageFiles()).to_pylist()[0]["images"]
    assert image_file(tmp_path, image) is None


def test_a_record_that_cannot_be_written_ends_the_run(tmp_path):
    (tmp_path / "record").write_text("a file, not a folder")
    error = pytest.raises(TrainingError, match=r"cannot be written.*set record=off")
    with error, RecordWriter(tmp_path) as writer:
        writer.write(1, "train", lambda: turn_table([]))


def test_each_name_of_an_evaluation_has_its_own_file(tmp_path):
    names = ["eval_a/b", "eval_a.b", "eval_a b", "eval_a%2Fb", "eval_a_b", "eval_größe"]
    with RecordWriter(tmp_path) as writer:
        for number, name in enumerate(names):
            writer.write(3, name, partial(pa.table, {"number": [number]}))
    record = open_record(tmp_path)
    assert sorted(record.steps()[3]) == sorted(names)
    for number, name in enumerate(names):
        table = record.table(3, name)
        assert table is not None
        assert table["number"].to_pylist() == [number]
    assert (tmp_path / "record" / "step_000003.eval_a_b.parquet").is_file()


def test_texts_of_tokens_need_no_tokenizer(recorded, stories_model):
    record = open_record(recorded[0])
    turn = turns_of(record, 1)[0]
    texts = token_texts(recorded[0], [*turn["prompt"], *turn["answer"]])
    expected = get_tokenizer(stories_model).decode(turn["answer"])
    assert "".join(map(str, map(texts.get, turn["answer"]))).strip() == str(expected).strip()


def test_pandas_reads_the_files(recorded):
    folder, rows = recorded
    files = sorted((folder / "record").glob("*.train.parquet"))
    means = [pd.read_parquet(file).episode_reward.mean() for file in files]
    assert means == pytest.approx([row["reward/total"] for row in rows[1:]])
    # Several steps at once, as with duckdb and polars.
    whole = dataset.dataset([str(file) for file in files]).to_table()
    assert whole.num_rows == 64


def test_a_file_without_its_end_is_damaged_and_removed_by_the_next_run(recorded, tmp_path):
    whole = (recorded[0] / "record" / "step_000001.train.parquet").read_bytes()
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "step_000001.train.parquet").write_bytes(whole[:-100])
    (tmp_path / "record" / ".step_000002.train.parquet.7.tmp").write_bytes(whole[:-100])
    with pytest.raises(DataError, match=r"step_000001\.train\.parquet: the file is damaged"):
        open_record(tmp_path).table(1)
    assert open_record(tmp_path).table(2) is None
    with RecordWriter(tmp_path):
        assert list((tmp_path / "record").iterdir()) == []


@pytest.mark.parametrize(("level", "tokens"), [("summary", False), ("off", None)])
def test_levels_of_the_record(stories_model, tmp_path, level, tokens):
    config = story_config(stories_model, tmp_path / "run", {"num_batches": 1}, record=level)
    run(config)
    files = list((tmp_path / "run").glob("record/step_*.parquet"))
    assert len(files) == (1 if tokens is False else 0)
    for file in files:
        assert ("answer" in pq.read_schema(file).names) is tokens


def test_prompts_of_later_turns_are_whole():
    turns = [
        {"prompt_kept": 0, "prompt": [1, 2], "answer": [3]},
        {"prompt_kept": 3, "prompt": [4], "answer": [5]},
        {"prompt_kept": 1, "prompt": [9], "answer": [6]},
    ]
    assert [list(one) for one in whole_prompts(turns)] == [[1, 2], [1, 2, 3, 4], [1, 9]]
