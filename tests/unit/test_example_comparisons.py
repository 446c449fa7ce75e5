"""The example comparisons: their format, and that neither length nor a phrase gives them away."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "example_data"
TRAIN, HELD_OUT = FOLDER / "comparisons.jsonl", FOLDER / "comparisons_test.jsonl"
FILES = [(TRAIN, 320), (HELD_OUT, 80)]
IDS = [path.stem for path, _ in FILES]


def rows_of(path):
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def question(row):
    prompt = row["prompt"]
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def sentences(text):
    return set(re.split(r"(?<=[.!?]) ", text))


@pytest.mark.parametrize(("path", "count"), FILES, ids=IDS)
def test_each_line_is_one_pair_and_nothing_else(path, count):
    text = path.read_bytes().decode("utf-8")
    assert text.endswith("\n")
    assert "\r" not in text
    rows = rows_of(path)
    assert len(rows) == count
    for row in rows:
        assert list(row) == ["prompt", "chosen", "rejected"]
        for answer in (row["chosen"], row["rejected"]):
            assert answer == answer.strip() != ""
            assert answer[-1] in ".!?"
        if not isinstance(row["prompt"], str):
            roles = "".join(message["role"][0] for message in row["prompt"])
            assert re.fullmatch(r"s?(ua)*u", roles)


def test_no_sentence_of_the_held_out_rambling_is_in_the_training_part():
    """What is learned has to be the manner, not its phrases."""
    known = {s for row in rows_of(TRAIN) for s in sentences(row["rejected"])}
    for row in rows_of(HELD_OUT):
        filler = sentences(row["rejected"]) - sentences(row["chosen"])
        assert filler
        assert not filler & known
