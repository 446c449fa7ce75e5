"""Batches: which rows, in which order, and what is dropped."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataError,
    DataValidationError,
    RendererError,
)
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised.batch_loop import first_datum
from tinker_cookbook.supervised.common import (
    count_loss_tokens,
    datum_from_tokens_weights,
)
from tinker_cookbook.supervised.data import (
    StreamingSupervisedDatasetFromHFDataset,
    SupervisedDatasetFromHFDataset,
    conversation_to_data,
    conversation_to_datum,
    trained_batch,
)
from tinker_cookbook.supervised.nll_evaluator import all_data
from tinker_cookbook.supervised.types import EmptyBatchError


def to_datum(row):
    """A datum whose first token is the row's number; trained unless the number is negative."""
    return datum_from_tokens_weights([abs(row), 1], [0.0, float(row >= 0)])


def numbers(batch):
    return [datum.model_input.to_ints()[0] for datum in batch]


def epoch(dataset):
    return [numbers(dataset.get_batch(i)) for i in range(len(dataset))]


def flat(batches):
    return [number for batch in batches for number in batch]


def test_the_last_partial_batch_is_trained():
    dataset = SupervisedDatasetFromHFDataset(list(range(10)), 4, map_fn=to_datum)
    assert len(dataset) == 3
    assert epoch(dataset) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(SupervisedDatasetFromHFDataset(list(range(8)), 4, map_fn=to_datum)) == 2
    with pytest.raises(IndexError, match="batch index: got 3, expected 0 to 2"):
        dataset.get_batch(3)


def test_an_epochs_order_depends_on_its_seed_alone():
    dataset = SupervisedDatasetFromHFDataset(list(range(10)), 4, map_fn=to_datum)
    dataset.set_epoch(7)
    first = epoch(dataset)
    assert sorted(flat(first)) == list(range(10))
    dataset.set_epoch(8)
    assert epoch(dataset) != first
    dataset.set_epoch(7)
    assert [numbers(dataset.get_batch(i)) for i in (2, 0, 1)] == [first[2], first[0], first[1]]
    code = (
        "import random, numpy; random.seed(5); numpy.random.seed(5)\n"
        "from tinker_cookbook.supervised.data import SupervisedDatasetFromHFDataset as D\n"
        "d = D(list(range(10)), 4, map_fn=id); d.set_epoch(3); d.set_epoch(7)\n"
        "print(d._order.tolist())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout.strip() == str(flat(first)), printed.stderr


def test_untrainable_examples_are_dropped_counted_once_and_explained_once(caplog):
    rows = [0, -1, 2, -3, 4, 5]
    dataset = SupervisedDatasetFromHFDataset(rows, 3, map_fn=to_datum)
    with caplog.at_level(logging.WARNING):
        for seed in (1, 2, 3):
            dataset.set_epoch(seed)
            assert sorted(flat(epoch(dataset))) == [0, 2, 4, 5]
    assert dataset.num_dropped == 2
    warnings = [r.getMessage() for r in caplog.records if "without a token" in r.getMessage()]
    assert len(warnings) == 1
    assert "max_length truncates before the answer" in warnings[0]


def test_a_row_may_give_several_datums_and_lose_some():
    dataset = SupervisedDatasetFromHFDataset(
        [1, 2], 2, flatmap_fn=lambda row: [to_datum(row), to_datum(-row), to_datum(row + 10)]
    )
    assert epoch(dataset) == [[1, 11, 2, 12]]
    assert dataset.num_dropped == 2


def test_a_batch_of_which_nothing_can_be_trained_is_an_error_of_its_own():
    dataset = SupervisedDatasetFromHFDataset(
        [0, -1], 1, flatmap_fn=lambda row: [to_datum(row)] * (row >= 0)
    )
    assert numbers(dataset.get_batch(0)) == [0]
    with pytest.raises(EmptyBatchError, match=r"batch 1: got 1 rows without a datum.*raise max"):
        dataset.get_batch(1)
    assert trained_batch(dataset, 1) == []


def test_a_batch_of_untrained_datums_alone_keeps_them_and_loops_pass_over_it():
    dataset = SupervisedDatasetFromHFDataset([0, -1, -2], 1, map_fn=to_datum)
    assert [len(dataset.get_batch(i)) for i in range(3)] == [1, 1, 1]
    assert [len(trained_batch(dataset, i)) for i in range(3)] == [1, 0, 0]
    assert len(all_data(dataset)) == 1
    assert dataset.num_dropped == 2
    first_datum(dataset, 0)
    with pytest.raises(DataValidationError, match="none of the examples"):
        first_datum(SupervisedDatasetFromHFDataset([-1], 1, map_fn=to_datum), 0)


@pytest.mark.parametrize(
    ("rows", "batch_size", "error", "word"),
    [
        ([], 1, DataValidationError, "the dataset is empty: got 0 rows, expected at least one"),
        ([1, 2], 3, ConfigurationError, "batch_size: got 3, expected at most 2"),
        ([1, 2], 0, ConfigurationError, "batch_size: got 0, expected at least 1"),
    ],
)
def test_invalid_batch_sizes_are_refused(rows, batch_size, error, word):
    with pytest.raises(error, match=word):
        SupervisedDatasetFromHFDataset(rows, batch_size, map_fn=to_datum)


def test_an_error_of_a_row_names_the_row():
    def refuse(row):
        raise RendererError("content: got 5, expected a string")

    dataset = SupervisedDatasetFromHFDataset(["a"], 1, map_fn=refuse)
    with pytest.raises(DataError, match="row 0 of the dataset: content: got 5"):
        dataset.get_batch(0)


def stream(n, batch_size, length, **options):
    import datasets

    rows = datasets.Dataset.from_list([{"n": i} for i in range(n)]).to_iterable_dataset()
    return StreamingSupervisedDatasetFromHFDataset(
        rows, batch_size, length, map_fn=lambda row: to_datum(row["n"]), **options
    )


def test_a_stream_is_batched_forwards_and_shuffled_by_seed():
    dataset = stream(10, 4, 10)
    assert len(dataset) == 3
    dataset.set_epoch(3)
    first = epoch(dataset)
    assert [len(batch) for batch in first] == [4, 4, 2]
    assert sorted(flat(first)) == list(range(10)) != flat(first)
    with pytest.raises(ConfigurationError, match="batch index: got 0, but the stream has passed"):
        dataset.get_batch(0)
    dataset.set_epoch(3)
    assert numbers(dataset.get_batch(0)) == numbers(dataset.get_batch(0)) == first[0]
    resumed = stream(10, 4, 10)
    resumed.set_epoch(3)
    assert numbers(resumed.get_batch(2)) == first[2]
    resumed.set_epoch(4)
    assert epoch(resumed) != first


THINKING = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\nIt is 4."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "<think>\nThree twice.\n</think>\n\nIt is 6."},
]


def trained_runs(datum):
    """(tokens before, trained tokens) of each run of trained tokens."""
    targets = datum.loss_fn_inputs["target_tokens"].tolist()
    mask = [w != 0 for w in datum.loss_fn_inputs["weights"].tolist()]
    whole = [datum.model_input.to_ints()[0], *targets]
    runs, start = [], None
    for i, on in enumerate([*mask, False]):
        if on and start is None:
            start = i
        elif not on and start is not None:
            runs.append((whole[: start + 1], whole[start + 1 : i + 1]))
            start = None
    return runs


@pytest.mark.parametrize(
    ("name", "family", "pieces"), [("qwen3", "qwen3", 2), ("llama3", "llama3", 1)]
)
def test_every_answer_is_trained_behind_the_prompt_of_inference(
    make_renderer, name, family, pieces
):
    renderer = make_renderer(name, family)
    prompts = [renderer.build_generation_prompt(THINKING[:i]).to_ints() for i in (1, 3)]
    data = conversation_to_data(THINKING, renderer, max_length=None)
    assert len(data) == pieces
    runs = [run for datum in data for run in trained_runs(datum)]
    assert [before for before, _ in runs] == prompts
    for (_, trained), message in zip(runs, (THINKING[1], THINKING[3]), strict=True):
        assert message["content"].split("\n\n")[-1] in renderer.tokenizer.decode(trained)
    assert sum(sum(datum.loss_fn_inputs["weights"].tolist()) for datum in data) == pytest.approx(1)
    if pieces > 1:  # one datum for the whole conversation cannot do that
        whole = conversation_to_datum(THINKING, renderer, max_length=None)
        assert trained_runs(whole)[0][1] != runs[0][1]


def test_max_length_cuts_answers_off_and_the_dataset_drops_what_is_left(make_renderer):
    renderer = make_renderer("chatml", "smollm2")
    row = [{"role": "user", "content": "word " * 50}, {"role": "assistant", "content": "Yes."}]
    whole = conversation_to_datum(row, renderer, None, TrainOnWhat.LAST_ASSISTANT_MESSAGE)
    assert count_loss_tokens(whole) > 1
    cut = conversation_to_datum(row, renderer, 40)
    assert cut.model_input.length == 39
    assert count_loss_tokens(cut) == 0
    short = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    dataset = SupervisedDatasetFromHFDataset(
        [row, short], 2, flatmap_fn=lambda messages: conversation_to_data(messages, renderer, 60)
    )
    assert len(dataset.get_batch(0)) == 1
    assert dataset.num_dropped == 1
