"""Files of comparisons: the formats, what is left out and counted, and what is refused."""

from __future__ import annotations

import gzip
import json

import pytest
from comparisons import labeled, pair_row, said, write_rows

from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.preference.comparison_file import comparison_of_row
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl

PROMPT = [said("user", "Hi")]
GOOD, BAD = said("assistant", "Hello!"), said("assistant", "Go away.")

FORMATS = {
    "official": {
        "comparison": {
            "prompt_conversation": PROMPT,
            "completion_A": [GOOD],
            "completion_B": [BAD],
        },
        "label": "A",
    },
    "texts": {"prompt": "Hi", "chosen": "Hello!", "rejected": "Go away."},
    "messages": {"prompt": PROMPT, "chosen": GOOD, "rejected": BAD},
    "lists": {"prompt_conversation": PROMPT, "chosen": [GOOD], "rejected": [BAD]},
    "answers that repeat the prompt": {
        "prompt": "Hi",
        "messages": [*PROMPT, GOOD],
        "chosen": [*PROMPT, GOOD],
        "rejected": [*PROMPT, BAD],
    },
    "conversations": {"chosen": [*PROMPT, GOOD], "rejected": [*PROMPT, BAD]},
    "dialogues": {
        "chosen": "\n\nHuman: Hi\n\nAssistant: Hello!",
        "rejected": "\n\nHuman: Hi\n\nAssistant: Go away.",
    },
    "from and value": {
        "conversations": [{"from": "human", "value": "Hi"}],
        "chosen": {"from": "gpt", "value": "Hello!"},
        "rejected": {"from": "gpt", "value": "Go away."},
    },
}


@pytest.mark.parametrize("row", FORMATS.values(), ids=FORMATS)
def test_every_format_says_the_same(row):
    assert comparison_of_row(row) == labeled("A", "Hello!", "Go away.", "Hi")


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json"])
def test_files_plain_gzipped_and_as_an_array(tmp_path, suffix):
    path = tmp_path / f"pairs{suffix}"
    rows = list(FORMATS.values())
    if suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode()) if suffix.endswith(".gz") else text.encode())
    train, test = ComparisonBuilderFromJsonl(train_path=str(path)).get_labeled_comparisons()
    assert train == [labeled("A", "Hello!", "Go away.", "Hi")] * len(rows)
    assert test is None


def test_dialogues_share_their_first_turns():
    start = "\n\nHuman: Hi\n\nAssistant: Hello. Human: or not?\n\nHuman: Why?\n\nAssistant:"
    found = comparison_of_row({"chosen": f"{start} So.", "rejected": f"{start} Because. "})
    assert [m["role"] for m in found.comparison.prompt_conversation] == [
        "user",
        "assistant",
        "user",
    ]
    assert found.comparison.completion_A == [said("assistant", "So.")]
    assert found.comparison.completion_B == [said("assistant", "Because.")]


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ([*PROMPT, GOOD], [said("user", "Ho"), GOOD]),
        ([*PROMPT, GOOD, said("user", "a"), BAD], [*PROMPT, GOOD, said("user", "b"), BAD]),
        ([*PROMPT, GOOD], [*PROMPT, GOOD, said("user", "a"), BAD]),
    ],
    ids=["no turn in common", "part at a question", "one goes on"],
)
def test_conversations_that_answer_no_common_question_are_none(chosen, rejected):
    assert comparison_of_row({"chosen": chosen, "rejected": rejected}) is None


def test_rows_of_no_use_are_left_out_and_counted_by_reason(tmp_path, caplog):
    path = write_rows(
        tmp_path / "pairs.jsonl",
        pair_row(0),
        pair_row(1, rejected="Yes, 1."),
        pair_row(2, chosen="  \n"),
        pair_row(3, rejected=""),
        {"chosen": [*PROMPT, GOOD], "rejected": [*PROMPT, GOOD]},
        {"chosen": [*PROMPT, GOOD], "rejected": [said("user", "Ho"), GOOD]},
        pair_row(6),
    )
    train, _ = ComparisonBuilderFromJsonl(train_path=path).comparison_sets
    assert [c.comparison.prompt_conversation[0]["content"] for c in train.usable] == [
        "Question 0?",
        "Question 6?",
    ]
    assert sorted(train.dropped.counts.values()) == [1, 2, 2]
    told = "5 comparisons skipped: 2 with answers that are the same, 2 with an empty answer, 1 with"
    assert train.dropped.describe().startswith(told)
    assert told in caplog.text


BAD_ROWS = {
    "not JSON": ('{"prompt": ', "not JSON"),
    "no object": ([1], "got a JSON list"),
    "no rejected": ({"prompt": "a", "chosen": "b"}, "expected 'rejected'"),
    "misspelt": ({"prompt": "a", "chosen": "b", "rejectd": "c"}, "did you mean 'rejected'"),
    "null": (pair_row(0, chosen=None), "expected 'chosen'"),
    "a number": (pair_row(0, chosen=3), "chosen: got 3, expected a text"),
    "no prompt": ({"chosen": "b", "rejected": "c"}, "expected a dialogue that begins"),
    "empty prompt": (pair_row(0, prompt=[]), "the prompt: got no message"),
    "no answer": (pair_row(0, rejected=[]), "rejected .B.: got no message"),
    "ends with a question": (pair_row(0, chosen=[said("user", "a")]), "expected an assistant"),
    "bad message": (pair_row(0, chosen=[{"content": "a"}]), "role: got None"),
    "bad speaker": (pair_row(0, chosen={"from": "gtp", "value": "a"}), "did you mean 'gpt'"),
    "bad label": (FORMATS["official"] | {"label": "C"}, "label: got 'C', expected 'A', 'B'"),
    "no label": ({"comparison": FORMATS["official"]["comparison"]}, "label: got None"),
    "half a comparison": (
        {"comparison": {"prompt_conversation": "a"}, "label": "A"},
        "completion_A",
    ),
    "comparison is text": ({"comparison": "a", "label": "A"}, "comparison: got str"),
}


@pytest.mark.parametrize(("row", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_invalid_lines_are_refused(tmp_path, row, message):
    path = write_rows(tmp_path / "pairs.jsonl", pair_row(0), "", row)
    with pytest.raises(DataFormatError, match=message) as caught:
        _ = ComparisonBuilderFromJsonl(train_path=path).comparison_sets
    assert str(caught.value).startswith(f"{path}:3: ")


def test_rows_are_held_out_by_seed(tmp_path):
    path = write_rows(tmp_path / "pairs.jsonl", *(pair_row(i) for i in range(20)))

    def held_out(seed):
        builder = ComparisonBuilderFromJsonl(train_path=path, test_size=5, shuffle_seed=seed)
        train, test = builder.get_labeled_comparisons()
        prompts = [
            [c.comparison.prompt_conversation[0]["content"] for c in p] for p in (train, test)
        ]
        assert sorted(prompts[0] + prompts[1]) == sorted(f"Question {i}?" for i in range(20))
        assert len(test) == 5
        return prompts[1]

    assert held_out(0) == held_out(0) != held_out(1)


def test_swap_gives_training_comparisons_in_both_orders(tmp_path):
    train = write_rows(tmp_path / "train.jsonl", FORMATS["official"])
    builder = ComparisonBuilderFromJsonl(train_path=train, test_path=train, swap=True)
    one = labeled("A", "Hello!", "Go away.", "Hi")
    assert builder.get_labeled_comparisons() == ([one, one.swap()], [one])
