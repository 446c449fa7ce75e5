"""Pairs of datums: their tokens, weights and order, what is cut, and what is left out."""

from __future__ import annotations

import pytest
from comparisons import labeled, pair_row, said, write_rows

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.supervised.nll_evaluator import all_data
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig, EmptyBatchError


def judged_row(label, i=0):
    one = labeled(label, f"Yes, {i}.", f"No, {i}.", f"Question {i}?")
    return {"comparison": vars(one.comparison), "label": label}


@pytest.fixture
def builder(tmp_path, tokenizer_folder):
    """Makes a builder of pairs from rows."""

    def make(*rows, batch_size=1, max_length=None, test=(), renderer="smollm2", **settings):
        path = write_rows(tmp_path / "train.jsonl", *rows)
        test_path = write_rows(tmp_path / "test.jsonl", *test) if test else None
        config = ChatDatasetBuilderCommonConfig(
            model_name_for_tokenizer=tokenizer_folder(
                "smollm2" if renderer == "smollm2" else "qwen3"
            ),
            renderer_name=renderer,
            max_length=max_length,
            batch_size=batch_size,
        )
        return DPODatasetBuilderFromComparisons(
            common_config=config,
            comparison_builder=ComparisonBuilderFromJsonl(train_path=path, test_path=test_path),
            **settings,
        )

    return make


def whole(datum):
    """All tokens of a datum, the last target included."""
    return [*datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()[-1]]


def weights_of(datum):
    return datum.loss_fn_inputs["weights"].tolist()


def trained_text(builder, datum):
    targets = datum.loss_fn_inputs["target_tokens"].tolist()
    return builder.tokenizer.decode(
        [t for t, w in zip(targets, weights_of(datum), strict=True) if w]
    )


@pytest.mark.parametrize("renderer", ["smollm2", "qwen3_instruct", "qwen3", "qwen3_5"])
def test_both_begin_with_the_prompt_and_train_the_answer(builder, renderer):
    made = builder(pair_row(), renderer=renderer)
    chosen, rejected = made()[0].get_batch(0)
    prompt = made.renderer.build_generation_prompt([said("user", "Question 0?")]).to_ints()
    for datum, text in ((chosen, "Yes, 0."), (rejected, "No, 0.")):
        example, weights = made.renderer.build_supervised_example(
            [said("user", "Question 0?"), said("assistant", text)]
        )
        assert whole(datum) == example.to_ints()
        assert weights_of(datum) == weights.tolist()[1:]
        assert whole(datum)[: len(prompt)] == prompt
        assert sum(weights_of(datum)[: len(prompt) - 1]) == 0
        assert text in trained_text(made, datum)


def test_the_label_says_which_comes_first(builder):
    for label, first in (("A", "Yes"), ("B", "No")):
        made = builder(judged_row(label))
        chosen, rejected = made()[0].get_batch(0)
        assert trained_text(made, chosen).startswith(first)
        assert not trained_text(made, rejected).startswith(first)


def test_a_batch_of_n_comparisons_is_2n_datums_in_turn(builder):
    made = builder(*(pair_row(i) for i in range(7)), batch_size=3)
    train, _ = made()
    assert [len(train.get_batch(i)) for i in range(len(train))] == [6, 6, 2]
    for i in range(len(train)):
        texts = [trained_text(made, datum) for datum in train.get_batch(i)]
        for yes, no in zip(texts[::2], texts[1::2], strict=True):
            assert (yes[:3], no[:2]) == ("Yes", "No")
            assert yes[3:] == no[2:]


def test_an_epochs_order_depends_on_its_seed_alone(builder):
    train, _ = builder(*(pair_row(i) for i in range(12)), batch_size=4)()

    def epoch(seed, batches=(0, 1, 2)):
        train.set_epoch(seed)
        return {i: [whole(datum) for datum in train.get_batch(i)] for i in batches}

    first = epoch(1)
    assert first != epoch(2)
    assert epoch(1, (2, 0)) == {2: first[2], 0: first[0]}
    other, _ = builder(*(pair_row(i) for i in range(12)), batch_size=4)()
    other.set_epoch(1)
    assert [whole(datum) for datum in other.get_batch(1)] == first[1]


def test_ties_are_left_out_and_counted(builder):
    rows = [judged_row(label, i) for i, label in enumerate(["A", "Tie", "B", "Tie"])]
    train, test = builder(*rows, test=rows, batch_size=2)()
    assert (len(all_data(train)), len(all_data(test))) == (4, 4)
    assert train.num_dropped == test.num_dropped == 2
    assert train.report() == ["2 comparisons skipped: 2 with a tie"]
    with pytest.raises(DataValidationError, match="training data: got only comparisons without"):
        builder(judged_row("Tie"))()


def test_max_length_cuts_the_end_of_answers(builder):
    rows = [pair_row(i, chosen=f"Yes {i} " + "and so on " * 30) for i in range(3)]
    full, _ = builder(*rows, batch_size=3)()
    cut, _ = builder(*rows, batch_size=3, max_length=40)()
    for datum, short in zip(full.get_batch(0), cut.get_batch(0), strict=True):
        assert whole(short) == whole(datum)[:40]
        assert weights_of(short) == weights_of(datum)[:39]


def test_prompts_that_fill_max_length_are_left_out_and_counted(builder):
    rows = [pair_row(0), pair_row(1, prompt="Why? " * 100), pair_row(2)]
    train, _ = builder(*rows, batch_size=3, max_length=60)()
    for _ in range(2):
        assert len(train.get_batch(0)) == 4
    assert train.report() == ["1 comparisons skipped: 1 with a prompt that fills max_length"]
    train, _ = builder(rows[1], max_length=60)()
    with pytest.raises(EmptyBatchError, match="raise max_length"):
        train.get_batch(0)
