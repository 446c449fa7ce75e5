"""The preference datasets that recipes know by name, from local copies of their first rows."""

from __future__ import annotations

import pytest
from comparisons import labeled, said, write_rows

from recipes.preference.datasets import (
    HelpSteer3ComparisonBuilder,
    HHHComparisonBuilder,
    get_comparison_builder,
)
from tinker_cookbook.exceptions import ConfigurationError, DataError, DataFormatError


def dialogue(answer, question="Hi"):
    return f"\n\nHuman: {question}\n\nAssistant: {answer}"


def hhh_row(i):
    return {"chosen": dialogue("Yes", f"Q{i}"), "rejected": dialogue("No", f"Q{i}")}


def helpsteer_row(preference):
    return {
        "domain": "general",
        "context": [said("user", "Hi")],
        "response1": "Yes",
        "response2": "No",
        "overall_preference": preference,
    }


@pytest.fixture
def folder(tmp_path):
    """Writes splits into a folder, as a copy of a Hub dataset has them."""

    def write(**splits):
        for split, rows in splits.items():
            write_rows(tmp_path / f"{split}.jsonl", *rows)
        return str(tmp_path)

    return write


def test_hhh_trains_on_all_and_holds_out_part_of_its_test_split(folder):
    path = folder(train=map(hhh_row, range(6)), test=map(hhh_row, range(10, 20)))
    train, test = HHHComparisonBuilder(path=path, test_size=4).get_labeled_comparisons()
    assert train == [labeled("A", "Yes", "No", f"Q{i}") for i in range(6)]
    numbers = [int(c.comparison.prompt_conversation[0]["content"][1:]) for c in test]
    assert len(set(numbers)) == 4
    assert min(numbers) >= 10
    again = HHHComparisonBuilder(path=path, test_size=4).get_labeled_comparisons()
    assert again == (train, test)
    assert HHHComparisonBuilder(path=path, test_size=0).get_labeled_comparisons()[1] is None
    assert len(HHHComparisonBuilder(path=path).get_labeled_comparisons()[1]) == 10


@pytest.mark.parametrize(
    ("preference", "label"), [(-3, "A"), (-1, "A"), (0, "Tie"), (1, "B"), (3, "B")]
)
def test_helpsteer3_prefers_by_the_sign(preference, label):
    builder = HelpSteer3ComparisonBuilder()
    found = builder.example_to_labeled_comparison(helpsteer_row(preference))
    assert found == labeled(label, "Yes", "No", "Hi")


def test_helpsteer3_rows_that_cannot_be_read_are_named(folder):
    row = helpsteer_row(1) | {"response2": None}
    path = folder(train=[helpsteer_row(1), row], validation=[helpsteer_row(1)])
    with pytest.raises(DataFormatError, match=r"row 1: .*expected 'response2'"):
        HelpSteer3ComparisonBuilder(path=path).get_labeled_comparisons()


@pytest.mark.parametrize("name", ["hhh", "helpsteer3", "ultrafeedback"])
def test_without_the_hub_the_file_option_is_named(name, monkeypatch):
    pytest.importorskip("datasets")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"not in the local cache.*dataset=FILE\.jsonl"):
        get_comparison_builder(name).get_labeled_comparisons()


def test_the_example_is_there_and_nothing_of_it_is_left_out():
    train, test = get_comparison_builder("example").comparison_sets
    assert (len(train.usable), len(test.usable)) == (320, 80)
    assert not train.dropped
    assert not test.dropped


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hh",), "dataset: got 'hh', expected one of example, hhh.*did you mean 'hhh'"),
        (("hhh", "x.jsonl"), "test_path: got x.jsonl with dataset=hhh"),
        (("example", "x.jsonl"), "test_path: got x.jsonl with dataset=example"),
        (("example", None, 5), "test_size: got 5 with dataset=example"),
    ],
)
def test_invalid_names_are_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        get_comparison_builder(*arguments)
